"""Random states that a GPU's run saved, resumed on the CPU, and the reverse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
    ours = cuda_rng_states.setting_states(upstream)
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


class Gpu:
    """`torch.cuda`'s random state, as torch's CUDAGeneratorImpl has it."""

    def __init__(self) -> None:
        self.state = of_a_gpu(7)

    def get_rng_state(self) -> torch.Tensor:
        return self.state.clone()

    def set_rng_state(self, state: torch.Tensor) -> None:
        assert state.numel() in (8, 16), "RNG state is wrong size"
        self.state = state.clone()

    def manual_seed(self, seed: int) -> None:
        self.state = torch.tensor([seed, 0]).view(torch.uint8)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    found = Gpu()
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        monkeypatch.setattr(torch.cuda, name, getattr(found, name))
    return found


def saved_by(device: str) -> dict[str, Any]:
    def state(seed: int) -> torch.Tensor:
        return (
            of_a_gpu(seed) if device == "gpu" else torch.Generator().manual_seed(seed).get_state()
        )

    kinds = {"data-parallel-rng": state(2), "model-parallel-rng": state(3)}
    host = torch.Generator().manual_seed(4).get_state()
    return {"torch_rng_state": host, "cuda_rng_state": state(1), "rng_tracker_states": kinds}


@pytest.mark.parametrize("form", ["a list", "of FSDP", "of one rank"])
def test_states_of_a_cpu_seed_a_gpus(form: str, gpu: Gpu) -> None:
    def loaded(device: str) -> dict[str, Any]:
        """What upstream's function finds, then what ours makes of it."""
        states = saved_by(device)
        tree = {
            "a list": {"rng_state": [states]},
            "of FSDP": {"rng_state": {"(0, 0)": [states]}},
            "of one rank": {**states, "model": {}},
        }[form]
        found = cuda_rng_states.reading_states(lambda: (tree, "", False, None))()
        assert found[0] is tree
        return tree if form == "of one rank" else states

    theirs = loaded("gpu")
    assert torch.equal(theirs["cuda_rng_state"], of_a_gpu(1)), "a GPU's own are as they were"
    found = loaded("cpu")
    made = [found["cuda_rng_state"], *found["rng_tracker_states"].values()]
    assert {state.numel() for state in made} == {16}
    assert len({tuple(state.tolist()) for state in made}) == 3
    assert found["torch_rng_state"].numel() == 5056
    again = loaded("cpu")
    assert torch.equal(again["cuda_rng_state"], found["cuda_rng_state"])
    assert torch.equal(gpu.state, of_a_gpu(7)), "the generator is left as it was"
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    cuda_rng_states.setting_states(CudaRNGStatesTracker.set_states)(
        tracker, saved_by("cpu")["rng_tracker_states"]
    )
    for name, state in tracker.get_states().items():
        assert torch.equal(state, found["rng_tracker_states"][name])


def test_a_checkpoint_without_random_states_is_left_alone(gpu: Gpu) -> None:
    for tree in (None, {}, {"model": {}}, {"rng_state": []}, {"rng_state": [{}]}):
        found = cuda_rng_states.reading_states(lambda tree=tree: (tree, "", False, None))()
        assert found[0] is tree
