"""`--overlap-param-gather-with-optimizer-step` trains experts that two ranks share as it does without."""

from __future__ import annotations

import os

import pytest

from .against_stock import FreshStore
from .test_resume import numbers
from .training import KINDS, train

FLAGS = """
    --expert-model-parallel-size 2 --moe-grouped-gemm --pipeline-model-parallel-size 2
    --num-virtual-stages-per-pipeline-rank 2 --use-distributed-optimizer --overlap-grad-reduce
    --overlap-param-gather --ckpt-format torch --global-batch-size 16 --train-iters 3
""".split()
OVERLAPPED = "--overlap-param-gather-with-optimizer-step"


@pytest.mark.distributed(world_size=8)
def test_trains_as_without_it(fresh_store: FreshStore) -> None:
    expected, found = [], []
    for rows, more in ((expected, []), (found, [OVERLAPPED])):
        fresh_store()
        rows += numbers(train([*KINDS["moe"], *FLAGS, *more]))
    assert found == expected
    assert len(expected) == 3 * (int(os.environ["RANK"]) == 7)
