"""`--use-precision-aware-optimizer` on shards of two ranks: the run of stock, also across a resumption."""

from __future__ import annotations

from pathlib import Path

import pytest

from accel.testing.distributed import launch, under_torchrun

from .test_resume import numbers
from .training import MODEL, SCRIPT

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
AWARE = ["--use-precision-aware-optimizer"]
FLAGS = """
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist --train-iters 5 --lr-decay-iters 5
""".split()


@pytest.mark.parametrize("aware_first", [True, False])
def test_each_goes_on_from_the_others_checkpoint(aware_first: bool, tmp_path: Path) -> None:
    one, other = (AWARE, []) if aware_first else ([], AWARE)
    command = [str(SCRIPT), *MODEL, *FLAGS]
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    whole = numbers(launch(2, [*command, *one, *save], seconds=150))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = numbers(launch(2, [*command, *other, "--load", str(tmp_path)], seconds=150))
    assert len(whole) == 5
    # As in test_resume: the first loss that a process logs is averaged into its second.
    assert [norm for _, norm in resumed] == [norm for _, norm in whole[2:]]
    assert [resumed[i][0] for i in (0, 2)] == [whole[i][0] for i in (2, 4)]
