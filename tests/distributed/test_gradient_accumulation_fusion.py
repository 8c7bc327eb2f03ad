"""`--gradient-accumulation-fusion` trains what a training without it does."""

from __future__ import annotations

import pytest

from .against_stock import FreshStore, check_training

TIED_LOOKUPS = """
    --pipeline-model-parallel-size 2 --mtp-num-layers 1 --mtp-loss-scaling-factor 1 --num-layers 2
    --seq-length 32 --max-position-embeddings 32 --optimizer sgd --sgd-momentum 0 --lr 0.1
"""
"""Nothing but gradients moves the weights. Without that of the words that are looked up ahead the norms are
5 % smaller."""

PRINTED = 1e-3
"""A norm above 1 has three decimals in the log, a loss six digits."""


@pytest.mark.distributed(world_size=2)
def test_words_looked_up_ahead_on_a_tied_last_stage(fresh_store: FreshStore) -> None:
    without = ["--no-gradient-accumulation-fusion"]
    check_training("tied", TIED_LOOKUPS, [], without, fresh_store, PRINTED, bf16=False)
