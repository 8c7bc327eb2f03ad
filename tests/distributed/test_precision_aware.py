"""`--use-precision-aware-optimizer` on shards of two ranks: the run of stock, also across a resumption."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.testing.distributed import under_torchrun

from .test_resume import check_resumption

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
AWARE = ["--use-precision-aware-optimizer"]
FLAGS = """
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist
""".split()


@pytest.mark.parametrize("aware_first", [pytest.param(True, marks=pytest.mark.thorough), False])
def test_each_goes_on_from_the_others_checkpoint(aware_first: bool, tmp_path: Path) -> None:
    one, other = (AWARE, []) if aware_first else ([], AWARE)
    check_resumption(2, FLAGS, tmp_path, first=one, then=other)
