"""``examples/pretrain_hybrid.py`` learns, without `mamba-ssm`, and ranks that share its layers, tokens or
stages lose what one rank does. Layouts differ in the order of fp32 sums only, as in
``tests/distributed/test_layouts.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from accel.testing.distributed import launch, under_torchrun
from tests.tiers import cases

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_hybrid.py"
ITERATIONS = 10
RELATIVE_TOLERANCE = 1e-5

LAYOUTS = {
    "tp2_sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "pp2": "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-M*|M-M*",
    "pp2_zb_h1": "--pipeline-model-parallel-size 2 --hybrid-layer-pattern M-M*|M-M* --accel-schedule zb-h1",
    "dp2_distributed_optimizer": "--use-distributed-optimizer",
}
ONE_RANK = {
    "max": "--accel-preset max",
    "swapped": "--accel-swap-attention all",
    "budget": "--accel-memory-budget 0.001",
    "recomputed": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}
_LOSSES = re.compile(r"iteration\s+\d+/.*lm loss: (\S+) ")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that start from weights which one rank has saved after it learnt."""
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    save = f"--save-interval {ITERATIONS} --no-save-optim --no-save-rng --save {folder}"
    learnt = losses(pretrain(1, save.split()))
    assert learnt[-1] < 0.75 * learnt[0]
    return ["--load", folder, "--finetune", "--no-load-optim", "--no-load-rng"]


@pytest.fixture(scope="module")
def expected(checkpoint: list[str]) -> np.ndarray:
    """What one rank loses from there."""
    return losses(pretrain(1, checkpoint))


@pytest.mark.parametrize("layout", cases(LAYOUTS, "tp2_sp cp2 pp2_zb_h1"))
def test_ranks_lose_what_one_does(layout: str, checkpoint: list[str], expected: np.ndarray) -> None:
    found = losses(pretrain(2, [*checkpoint, *LAYOUTS[layout].split()]))
    np.testing.assert_allclose(found, expected, rtol=RELATIVE_TOLERANCE)


@pytest.mark.parametrize("features", cases(ONE_RANK, "max budget"))
def test_features_change_nothing(
    features: str, checkpoint: list[str], expected: np.ndarray
) -> None:
    found = losses(pretrain(1, [*checkpoint, *ONE_RANK[features].split()]))
    np.testing.assert_allclose(found, expected, rtol=RELATIVE_TOLERANCE)


def pretrain(ranks: int, flags: list[str]) -> str:
    return launch(ranks, [str(SCRIPT), "--mock-data", *flags])


def losses(output: str) -> np.ndarray:
    found = np.array([float(loss) for loss in _LOSSES.findall(output)])
    assert len(found) == ITERATIONS
    return found
