"""Random states that a GPU's run saved, resumed on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import accel
from accel.feature import Context
from accel.patches import cuda_rng_states
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on


def of_a_gpu(seed: int) -> torch.Tensor:
    """CUDAGeneratorImpl's state: seed and offset, 8 bytes each."""
    return torch.tensor([seed, 4], dtype=torch.int64).view(torch.uint8)


def check_states() -> None:
    accel.enable(preset="off", cuda_rng_states=False, device="cpu")
    try:
        check_states_on_the_cpu()
    finally:
        accel.disable()


def check_states_on_the_cpu() -> None:
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    def draws(set_states: object, **states: object) -> list[torch.Tensor]:
        tracker = CudaRNGStatesTracker()
        set_states(tracker, states)  # type: ignore[operator]
        drawn = []
        for name in (*states, *states):
            with tracker.fork(name):
                drawn.append(torch.rand(3))
        return drawn

    upstream = CudaRNGStatesTracker.set_states
    with pytest.raises(RuntimeError, match="Expected a CPUGeneratorImplState of size 5056"):
        draws(upstream, a=of_a_gpu(1))
    ours = cuda_rng_states.of_the_cpu(upstream)
    first = draws(ours, a=of_a_gpu(1), b=of_a_gpu(2))
    assert len({tuple(drawn.tolist()) for drawn in first}) == 4, "two streams that go on"
    again = draws(ours, a=of_a_gpu(1), b=of_a_gpu(2))
    assert all(map(torch.equal, first, again))
    cpus = torch.Generator().manual_seed(5)
    state = cpus.get_state()
    assert torch.equal(draws(ours, a=state)[0], torch.rand(3, generator=cpus))
    states = {
        "graphs": torch.Generator()
    }  # upstream's form where the tracker is made for CUDA graphs
    tracker = CudaRNGStatesTracker()
    ours(tracker, states)
    assert tracker.get_states() == states


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_states_of_a_gpu_seed_the_cpus(version: str) -> None:
    run_on(version, check_states)


@pytest.mark.parametrize(("load", "reason"), [("folder", None), (None, "--load is not given")])
def test_where_it_is_idle(load: str | None, reason: str | None) -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(load=load))
    assert cuda_rng_states.FEATURE.idle(context) == reason
