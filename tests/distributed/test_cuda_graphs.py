"""A CPU trains with the flags for CUDA graphs as it does without."""

from __future__ import annotations

import pytest
import torch

from .against_stock import FreshStore
from .test_resume import numbers
from .training import train

FLAGS = "--num-layers 1 --hidden-dropout 0.1 --train-iters 2".split()
GRAPHS = "--cuda-graph-impl local --optimizer-cuda-graph --cuda-graph-warmup-steps 1".split()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the runtime for machines without CUDA")
@pytest.mark.distributed(world_size=1)
def test_trains_as_without_them(fresh_store: FreshStore) -> None:
    expected = numbers(train(FLAGS))
    fresh_store()
    printed = train([*FLAGS, *GRAPHS])
    assert "--cuda-graph-impl local --optimizer-cuda-graph: there are no CUDA graphs" in printed
    assert numbers(printed) == expected
    assert len(expected) == 2
