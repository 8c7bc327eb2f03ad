"""A step whose first chunk is gathered under way: its experts come after their own optimizer's step."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from accel.feature import Context
from accel.patches import expert_param_gather
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on


class Chunk:
    """Megatron's `DistributedDataParallel`, as far as an optimizer's step knows it."""

    def __init__(self, done: list[str]) -> None:
        self.bucket_groups = [Group("dense", done)]
        self.expert_parallel_bucket_groups = [Group("experts", done)]

    def start_param_sync(self, force_dispatch: bool) -> None:
        assert force_dispatch
        for group in self.bucket_groups + self.expert_parallel_bucket_groups:
            group.start_param_sync()


class Group:
    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def start_param_sync(self) -> None:
        self.done.append(f"gather {self.name}")


class Part:
    """One of the chained optimizers."""

    def __init__(self, name: str, chunks: list[Chunk], done: list[str], fails: bool) -> None:
        self.name, self.model_chunks, self.done, self.fails = name, chunks, done, fails

    def step_with_ready_grads(self) -> bool:
        if self.fails:
            raise RuntimeError("no memory")
        self.done.append(f"step {self.name}")
        return True


def done_by_a_step(overlapped: bool = True, wrapped: bool = True, fails: bool = False) -> list[str]:
    from megatron.core.optimizer.optimizer import ChainedOptimizer

    step = ChainedOptimizer.step_with_ready_grads
    if wrapped:
        step = expert_param_gather.experts_last(step)
    done: list[str] = []
    first, second = Chunk(done), Chunk([])
    optimizer = ChainedOptimizer.__new__(ChainedOptimizer)
    optimizer.config = SimpleNamespace(
        overlap_param_gather_with_optimizer_step=overlapped, reuse_grad_buf_for_mxfp8_param_ag=False
    )
    optimizer.chained_optimizers = [
        Part("dense", [first], done, False),
        Part("dense later", [second], done, False),
        Part("experts", [first, second], done, fails),
    ]
    try:
        assert step(optimizer)
    finally:
        assert [group.name for group in first.expert_parallel_bucket_groups] == ["experts"]
    return done


def check_order() -> None:
    steps = ["step dense later", "step experts"]
    assert done_by_a_step() == ["step dense", "gather dense", *steps, "gather experts"]
    assert done_by_a_step(overlapped=False) == ["step dense", *steps]
    too_early = ["step dense", "gather dense", "gather experts", *steps]
    assert done_by_a_step(wrapped=False) == too_early, "upstream is right: remove the feature"


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_experts_are_gathered_when_all_have_stepped(version: str) -> None:
    run_on(version, check_order)


def test_a_step_that_fails_leaves_the_chunk_as_it_was() -> None:
    with pytest.raises(RuntimeError, match="no memory"):
        done_by_a_step(fails=True)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"overlap_param_gather_with_optimizer_step": True, "num_experts": 4}, None),
        (
            {"overlap_param_gather_with_optimizer_step": True, "num_experts": None},
            "--num-experts is not given",
        ),
        (
            {"overlap_param_gather_with_optimizer_step": False, "num_experts": 4},
            "--overlap-param-gather-with-optimizer-step is not given",
        ),
    ],
)
def test_where_it_is_idle(args: dict | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    assert expert_param_gather.FEATURE.idle(Context("cpu", "0.19.2", given)) == reason
