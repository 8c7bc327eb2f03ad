"""Packs, and batches that bring a group, over two ranks in the local spec of every supported Megatron."""

from __future__ import annotations

import pytest

from accel.testing.distributed import launch, under_torchrun
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import path_of

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
@pytest.mark.parametrize("what", ["packs", "groups"])
def test_a_model_trains_as_on_one_rank(what: str, version: str) -> None:
    program = ["-m", "tests.distributed.packed_training", what, "p2p", "all_gather", "a2a"]
    launch(2, program, environment={"PYTHONPATH": path_of(version)})
