"""One rank's gradients without a buffer are those of upstream's buffer, bit for bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.feature import Context, choose
from accel.log import log_once
from accel.patches import FEATURES, unbuffered_gradients
from accel.upstream import SUPPORTED_MEGATRON
from tests.ops.contract import needs_native
from tests.versions import run_on

from .test_fused_adamw import build, one_rank
from .test_shared_weights import masters, moments

pytestmark = needs_native
ON = {"fused_adamw": True, "shared_weights": True}


@contextmanager
def unbuffered(micro_batches: int = 1) -> Iterator[None]:
    """The patch of the constructor, as the feature applies it under a command line."""
    from megatron.core import num_microbatches_calculator as batches
    from megatron.core.distributed import DistributedDataParallel

    init = DistributedDataParallel.__init__
    batches.init_num_microbatches_calculator(0, None, micro_batches, 1, 1)
    DistributedDataParallel.__init__ = unbuffered_gradients.without_buffer(init)
    log_once.cache_clear()
    try:
        yield
    finally:
        DistributedDataParallel.__init__ = init
        batches.unset_num_microbatches_calculator()


def trained(model: Any) -> list[Any]:
    return [p for p in model.parameters() if p.requires_grad]


def run_backward(model: Any, seed: int, micro_batches: int = 1) -> None:
    model.zero_grad_buffer()
    for batch in range(micro_batches):
        x = torch.randn(12, 40, generator=torch.Generator().manual_seed(100 * seed + batch))
        (model(x.bfloat16()).float() * 3).sin().sum().backward()


def take_steps(
    model: Any, optimizer: Any, micro_batches: int = 1, count: int = 4
) -> tuple[list[float], list[Tensor]]:
    """Gradient norms, and the last gradients in fp32."""
    norms = []
    for step in range(count):
        optimizer.zero_grad()
        run_backward(model, step, micro_batches)
        model.finish_grad_sync()
        successful, norm, _ = optimizer.step()
        assert successful
        norms.append(norm)
    return norms, [p.main_grad.float().clone() for p in trained(model)]


def check_same(micro_batches: int = 1, **options: Any) -> None:
    with one_rank(**ON):
        model, optimizer = build(bf16=True, **options)
        assert model.buffers
        norms, grads = take_steps(model, optimizer, micro_batches)
        (inner,) = optimizer.chained_optimizers
        expected = grads + masters(model, inner) + moments(inner)
    with one_rank(**ON), unbuffered():
        model, optimizer = build(bf16=True, **options)
        assert not model.buffers
        our_norms, grads = take_steps(model, optimizer, micro_batches)
        (inner,) = optimizer.chained_optimizers
        found = grads + masters(model, inner) + moments(inner)
    assert our_norms == norms
    assert all(norm > 1 for norm in norms), "clipping has nothing to do"
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_steps_are_those_of_the_buffer(version: str) -> None:
    run_on(version, check_same)


@pytest.mark.parametrize("option", ["frozen", "tied"])
def test_frozen_and_tied_parameters(option: str) -> None:
    check_same(**{option: True})


def test_more_micro_batches_than_were_said_are_summed_in_fp32() -> None:
    check_same(micro_batches=3)
    with one_rank(**ON), unbuffered():
        model, _ = build(bf16=True)
        run_backward(model, 0)
        assert {p.main_grad.dtype for p in trained(model)} == {torch.bfloat16}
        run_backward(model, 0, micro_batches=2)
        assert {p.main_grad.dtype for p in trained(model)} == {torch.float32}


def test_a_gradient_is_there_from_its_backward_to_the_next_step() -> None:
    with one_rank(**ON), unbuffered():
        model, optimizer = build(bf16=True)
        assert not any(hasattr(p, "main_grad") for p in trained(model))
        take_steps(model, optimizer, count=1)
        for p in trained(model):
            assert p.grad is None
            assert p.decoupled_grad is p.main_grad, "the optimizer has copied it"
        model.zero_grad_buffer()
        optimizer.zero_grad()
        assert not any(hasattr(p, "main_grad") for p in trained(model))
        assert {p.decoupled_grad for p in trained(model)} == {None}
        run_backward(model, 0)
        model.offload_grad_buffers()
        model.restore_grad_buffers()
        assert not any(hasattr(p, "main_grad") for p in trained(model))


def test_a_parameter_without_gradient_has_zeros_and_decays() -> None:
    def run() -> tuple[Any, Any]:
        model, optimizer = build(bf16=True)
        model.zero_grad_buffer()
        model.module[0](torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
        model.finish_grad_sync()
        optimizer.step()
        return model, optimizer

    with one_rank(**ON):
        expected = [p.detach().clone() for p in run()[0].parameters()]
    with one_rank(**ON), unbuffered():
        model, _ = run()
        assert not model.module[2].weight.main_grad.any()
    assert all(map(torch.equal, model.parameters(), expected))


@pytest.mark.parametrize("factor", [0.3, 2.0])
def test_scaling_is_in_fp32(factor: float) -> None:
    def scaled() -> list[Tensor]:
        model, _ = build(bf16=True)
        run_backward(model, 0)
        model.finish_grad_sync()
        model.scale_gradients(factor)
        return [p.main_grad for p in trained(model)]

    with one_rank(**ON):
        expected = scaled()
    with one_rank(**ON), unbuffered():
        assert all(map(torch.equal, scaled(), expected))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf], ids=str)
def test_nan_is_found_as_in_a_bucket(bad: float) -> None:
    from megatron.core import rerun_state_machine as rerun

    rerun.destroy_rerun_state_machine()
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.DISABLED)
    try:
        with one_rank(**ON), unbuffered():
            model, _ = build(bf16=True)
            model.ddp_config.check_for_nan_in_grad = True
            run_backward(model, 0)
            model.finish_grad_sync()
            trained(model)[1].main_grad.view(-1)[3] = bad
            word = "NaN" if bad != bad else "Inf"
            with pytest.raises(RuntimeError, match=f"found {word} in local grad norm"):
                model.finish_grad_sync()
    finally:
        rerun.destroy_rerun_state_machine()


class Machine:
    """A rerun state machine that notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool, float]] = []

    def is_unexpectedly_large(self, result: Tensor, threshold: float, context: str) -> bool:
        return bool(result > 1e9)

    def validate_result(
        self, result: Tensor, rejection_func: Any, message: str, tolerance: float, fatal: bool
    ) -> None:
        values = {"NaN": torch.nan, "Inf": torch.inf, "large": 1e10}
        (rejected,) = (
            n for n, v in values.items() if rejection_func(torch.tensor(v)) and n in message
        )
        self.asked.append((rejected, fatal, tolerance))
        self.norm = result


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("nan", [False, True])
def test_the_checks_are_upstreams(nan: bool, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import rerun_state_machine as rerun
    from megatron.core.distributed import param_and_grad_buffer

    def asked() -> Machine:
        machine = Machine()
        for module in (rerun, param_and_grad_buffer):
            monkeypatch.setattr(module, "get_rerun_state_machine", lambda: machine)
        model, _ = build(bf16=True)
        model.ddp_config.check_for_nan_in_grad = nan
        model.ddp_config.check_for_large_grads = large
        run_backward(model, 0)
        model.finish_grad_sync()
        return machine

    with one_rank(**ON):
        expected = asked()
    with one_rank(**ON), unbuffered():
        found = asked()
    assert found.asked == expected.asked
    assert len(found.asked) == 2 * nan + large
    if nan or large:
        torch.testing.assert_close(found.norm, expected.norm, rtol=1e-5, atol=0)


def test_a_model_stays_as_it_is_when_accel_goes() -> None:
    """Or its gradients would be summed over all steps to come."""
    with one_rank(**ON):
        with unbuffered():
            model, _ = build(bf16=True)
        for _ in range(2):
            run_backward(model, 0)
            assert {p.main_grad.dtype for p in trained(model)} == {torch.bfloat16}
        from megatron.core.distributed import DistributedDataParallel

        assert isinstance(model, DistributedDataParallel)


def test_a_model_is_freed() -> None:
    with one_rank(**ON), unbuffered():
        model, optimizer = build(bf16=True)
        run_backward(model, 0)
        gone = [weakref.ref(model), weakref.ref(model.module[0].weight)]
        del model, optimizer
        gc.collect()
        assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_distributed_optimizer": True}, "the optimizer steps on the buffer"),
        ({"overlap_param_gather": True, "use_distributed_optimizer": True}, "on the buffer"),
        ({"bf16": False, "fp16": True}, "parameters of torch.float16"),
        ({"micro_batches": 2}, "2 micro-batches"),
        ({"micro_batches": None}, "unknown number of micro-batches"),
    ],
    ids=str,
)
def test_a_model_that_needs_the_buffer_has_it(
    options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core import num_microbatches_calculator as batches

    count = options.pop("micro_batches", 1)
    with one_rank(**ON), unbuffered(count or 1), caplog.at_level("WARNING", logger="accel"):
        if count is None:
            batches.unset_num_microbatches_calculator()
        model, _ = build(**{"bf16": True} | options)
        assert model.buffers
    assert reason in caplog.text


# What is asked for

ARGS = {
    "world_size": 1,
    "micro_batch_size": 2,
    "global_batch_size": 2,
    "bf16": True,
    "fp16": False,
    "optimizer": "adam",
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"world_size": 4}, "gradients are reduced among 4 ranks"),
        ({"global_batch_size": 6}, "gradients of 3 micro-batches are summed"),
        ({"bf16": False}, "parameters are fp32"),
        ({"optimizer": "sgd"}, "--optimizer sgd is not served"),
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer: the optimizer steps"),
        ({"calculate_per_token_loss": True}, "--calculate-per-token-loss: gradients are scaled"),
        ({"loss_scale": 1024.0}, "--loss-scale: gradients are scaled in fp32"),
        ({"save_wgrads_interval": 2}, "--save-wgrads-interval: gradients are saved in fp32"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl: graphs have the buffer's addresses"),
        ({"cuda_graph_impl": "none"}, None),
        ({"rampup_batch_size": ["2", "2", "9"]}, "--rampup-batch-size: steps come to have more"),
        ({"accel_host_optimizer": True}, "--accel-host-optimizer: gradients travel in fp32"),
        ({"yaml_cfg": "run.yaml"}, "--yaml-cfg: the model's configuration is made by another"),
        ({"accel_memory_budget": 4.0}, "--accel-memory-budget: its plan counts on gradients"),
    ],
    ids=str,
)
def test_idle_where_the_arguments_need_the_buffer(
    change: dict[str, Any], reason: str | None
) -> None:
    context = Context("cpu", "0.19.2", SimpleNamespace(**ARGS | change))
    found = unbuffered_gradients.FEATURE.idle(context)
    assert found is None if reason is None else reason in (found or "")


def test_idle_where_another_library_clips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unbuffered_gradients, "fused_adam_library", lambda: "Apex")
    context = Context("cuda", "0.19.2", SimpleNamespace(**ARGS))
    found = unbuffered_gradients.FEATURE.idle(context)
    assert found == "Apex takes the norm of gradients, of tensors of one dtype"


@pytest.mark.parametrize(
    ("wishes", "on"),
    [
        ({}, True),
        ({"preset": "exact"}, False),
        ({"preset": "exact", "unbuffered_gradients": True}, True),
        ({"unbuffered_gradients": False}, False),
        ({"shared_weights": False}, False),
        ({"fused_adamw": False}, False),
    ],
    ids=str,
)
def test_features_that_add_to_the_buffer_say_so(wishes: dict[str, Any], on: bool) -> None:
    shown = {f"accel_{name}": value for name, value in wishes.items()}
    context = Context("cpu", "0.19.2", SimpleNamespace(**ARGS, **shown))
    wished = {name: value for name, value in wishes.items() if name != "preset"}
    preset = wishes.get("preset", "fast")
    chosen = {c.feature.name: c for c in choose(FEATURES, preset, wished, context)}
    assert (chosen["unbuffered_gradients"].state == "active") is on
    adding = [chosen["fused_weight_gradient"], chosen["fused_embedding_gradient"]]
    told = "gradients stay where the backward puts them (unbuffered_gradients)" if on else ""
    expected = ("active", told) if preset == "fast" else ("off", "")
    assert {(choice.state, choice.reason) for choice in adding} == {expected}


def test_programs_without_arguments_keep_the_buffer() -> None:
    assert "says nothing" in (unbuffered_gradients.FEATURE.idle(Context("cpu", "0.19.2")) or "")
