"""Adam under Megatron's optimizers: as exact as stock, same state dicts, model weights in the same pass."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.log import log_once
from accel.patches import fused_adamw
from accel.testing.tolerance import assert_close_to_baseline
from accel.upstream import SUPPORTED_MEGATRON
from tests.ops.contract import needs_native
from tests.versions import run_on

pytestmark = needs_native

STEPS = 20
HYPER: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
# The gradient is clipped before the step: one rounding more than in the test of the op.
ROUNDINGS = 9
INFINITE_AT = 1  # the step whose gradients overflow, in the fp16 case

CASES = {
    "fp32": {},
    "fp32_l2": {"decoupled_weight_decay": False},
    "fp32_distributed": {"use_distributed_optimizer": True},
    "bf16": {"bf16": True},
    "bf16_distributed": {"bf16": True, "use_distributed_optimizer": True},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**10, "hysteresis": 1},
    "fp16_distributed": {
        "fp16": True,
        "initial_loss_scale": 2.0**10,
        "hysteresis": 1,
        "use_distributed_optimizer": True,
    },
}


@contextmanager
def one_rank(**features: bool) -> Iterator[None]:
    """Megatron's process groups with this process alone, and the given features."""
    from megatron.core import parallel_state

    accel.enable(preset="off", **features)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        accel.disable()


def build(**options: Any) -> tuple[Any, Any]:
    """A small model in Megatron's DDP, and its optimizer."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    flags = {name: options.get(name, False) for name in ("bf16", "fp16")}
    dtype = torch.bfloat16 if flags["bf16"] else torch.half if flags["fp16"] else torch.float32
    ddp = {k: options[k] for k in options if k in ("use_distributed_optimizer",)}
    overlap = options.pop("overlap_param_gather", False)
    frozen, tied = options.pop("frozen", False), options.pop("tied", False)
    get = options.pop("get", get_megatron_optimizer)
    torch.manual_seed(0)
    layers = torch.nn.Linear(40, 70), torch.nn.LayerNorm(70), torch.nn.Linear(70, 33)
    layers[1].requires_grad_(not frozen)
    layers[0].weight.shared_embedding = tied
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, **flags),
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            overlap_param_gather=overlap,
            overlap_grad_reduce=overlap,
            **ddp,
        ),
        torch.nn.Sequential(*layers).to(dtype),
    )
    options = {"optimizer": "adam", "overlap_param_gather": overlap, **HYPER, **options}
    config = OptimizerConfig(clip_grad=1.0, params_dtype=dtype, **options)
    optimizer = get(config, [model])
    for group in optimizer.param_groups:
        group["lr"] = HYPER["lr"]
    return model, optimizer


def gradients(model: Any, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=draw) for p in model.parameters()]


def one_step(model: Any, optimizer: Any, step: int, scale: float | Tensor = 1.0) -> Any:
    """A step with gradients that do not depend on the weights, so that no difference is amplified."""
    model.zero_grad_buffer()
    optimizer.zero_grad()
    for p, grad in zip(model.parameters(), gradients(model, step), strict=True):
        if not p.requires_grad:
            continue
        p.main_grad.copy_(grad * scale)
        if scale != 1 and step == INFINITE_AT:
            p.main_grad.view(-1)[0] = torch.inf
    model.start_grad_sync()
    model.finish_grad_sync()
    return optimizer.step()


@dataclass
class Run:
    """What a run left behind: fp32 weights and moments by parameter, the model's weights, the log."""

    main: list[Tensor] = field(default_factory=list)
    moments: list[Tensor] = field(default_factory=list)
    model: list[Tensor] = field(default_factory=list)
    log: list[tuple[bool, float | None]] = field(default_factory=list)
    state_dict: dict = field(default_factory=dict)


def take_steps(model: Any, optimizer: Any, steps: range) -> Run:
    run = Run()
    for step in steps:
        successful, norm, _ = one_step(model, optimizer, step, optimizer.get_loss_scale())
        run.log.append((successful, norm))
    (inner,) = optimizer.chained_optimizers
    by_address = {p.data_ptr(): s for p, s in inner.optimizer.state.items()}
    for p in model.parameters():
        main = getattr(p, "main_param", p).detach()
        state = by_address[main.data_ptr()]
        run.model.append(p.detach().clone())
        run.main.append(main.clone().view(p.shape))
        run.moments += [state[key].clone().view(p.shape) for key in ("exp_avg", "exp_avg_sq")]
    run.state_dict = optimizer.state_dict()
    return run


def exact(case: str, taken: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights and moments of the given steps in fp64."""
    with one_rank():
        model, _ = build(**CASES[case])
        params = [p.detach().double().requires_grad_() for p in model.parameters()]
        grads = {step: [g.double() for g in gradients(model, step)] for step in taken}
    decoupled = CASES[case].get("decoupled_weight_decay", True)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    decayed = [p for p in params if p.ndim > 1]
    plain = [p for p in params if p.ndim == 1]
    groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0}]
    optimizer = kind(groups, betas=(0.9, 0.999), **HYPER)
    for step in taken:
        norm = torch.cat([g.flatten() for g in grads[step]]).norm()
        assert norm > 1, "clipping has nothing to do"
        for p, grad in zip(params, grads[step], strict=True):
            p.grad = grad / (norm + 1e-6)
        optimizer.step()
    moments = [optimizer.state[p][key] for p in params for key in ("exp_avg", "exp_avg_sq")]
    return [p.detach() for p in params], moments


@pytest.fixture(scope="module", params=CASES)
def runs(request: pytest.FixtureRequest) -> tuple[str, Run, Run]:
    """The case's name, the stock run and ours."""
    with one_rank():
        stock = take_steps(*build(**CASES[request.param]), range(STEPS))
    with one_rank(fused_adamw=True):
        ours = take_steps(*build(**CASES[request.param]), range(STEPS))
    return request.param, stock, ours


def test_twenty_steps_are_as_exact_as_stock(runs: tuple[str, Run, Run]) -> None:
    case, stock, ours = runs
    taken = [step for step, (successful, _) in enumerate(ours.log) if successful]
    overflows = [INFINITE_AT] if "fp16" in case and "bf16" not in case else []
    assert [step for step in range(STEPS) if step not in taken] == overflows
    assert [s for s, _ in ours.log] == [s for s, _ in stock.log]
    norms = [[n for _, n in run.log if n is not None] for run in (ours, stock)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    weights, moments = exact(case, taken)
    for name, a, b, c in (
        ("main", ours.main, stock.main, weights),
        ("moment", ours.moments, stock.moments, moments),
    ):
        for i, values in enumerate(zip(a, b, c, strict=True)):
            assert_close_to_baseline(*values, name=f"{name} {i}", roundings=ROUNDINGS)


def test_model_weights_are_the_main_weights_rounded(runs: tuple[str, Run, Run]) -> None:
    _, _, ours = runs
    for model, main in zip(ours.model, ours.main, strict=True):
        assert torch.equal(model, main.to(model.dtype))


def test_state_dict_has_the_keys_shapes_and_types_of_stock(runs: tuple[str, Run, Run]) -> None:
    _, stock, ours = runs
    assert outline(ours.state_dict) == outline(stock.state_dict)


def outline(value: Any) -> Any:
    """A nested value without its numbers."""
    if isinstance(value, dict):
        return {key: outline(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [outline(item) for item in value]
    if isinstance(value, Tensor):
        return (value.shape, value.dtype)
    return type(value)


@pytest.mark.parametrize("case", ["fp32", "fp32_l2", "bf16", "fp16"])
@pytest.mark.parametrize("fused_first", [True, False])
def test_checkpoints_move_both_ways(case: str, fused_first: bool) -> None:
    middle = 6
    with one_rank():
        expected = take_steps(*build(**CASES[case]), range(STEPS))
    with one_rank(fused_adamw=fused_first):
        model, optimizer = build(**CASES[case])
        take_steps(model, optimizer, range(middle))
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    with one_rank(fused_adamw=not fused_first):
        model, optimizer = build(**CASES[case])
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        found = take_steps(model, optimizer, range(middle, STEPS))
    for a, b in zip(found.main, expected.main, strict=True):
        torch.testing.assert_close(a, b)
    (inner,) = optimizer.chained_optimizers
    steps = {float(state["step"]) for state in inner.optimizer.state.values()}
    assert steps == {float(sum(successful for successful, _ in expected.log))}


@pytest.mark.parametrize("case", ["bf16", "bf16_distributed", "fp16"])
def test_the_step_writes_every_model_weight_itself(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def watched(*tensors: Any, **options: Any) -> None:
        written.extend(tensors[-1])
        adamw(*tensors, **options)

    adamw = fused_adamw.adamw
    monkeypatch.setattr(fused_adamw, "adamw", watched)
    with one_rank(fused_adamw=True):
        model, optimizer = build(**CASES[case])
        take_steps(model, optimizer, range(1))
        assert {t.data_ptr() for t in written} == {p.data_ptr() for p in model.parameters()}
        (inner,) = optimizer.chained_optimizers
        assert inner.optimizer.model_copies == {}, "nothing is held beyond the step"


def test_a_weight_without_gradient_is_copied_as_before() -> None:
    mains = [torch.tensor([1.1, 2.2], requires_grad=True) for _ in range(2)]
    mains[0].grad = torch.zeros(2)
    copies = [torch.zeros(2, dtype=torch.bfloat16) for _ in range(2)]
    optimizer = SimpleNamespace(
        param_groups=[{"params": mains}],
        model_copies={m.data_ptr(): c for m, c in zip(mains, copies, strict=True)},
    )
    with torch.no_grad():
        fused_adamw.copying_what_is_left(lambda self: pytest.fail("copies everything"))(
            SimpleNamespace(optimizer=optimizer)
        )
    assert torch.equal(copies[0], torch.zeros(2, dtype=torch.bfloat16))
    assert torch.equal(copies[1], mains[1].bfloat16())


def test_what_we_do_not_step_stays_torchs_and_is_named(caplog: pytest.LogCaptureFixture) -> None:
    from megatron.core.optimizer.optimizer import FP32Optimizer

    log_once.cache_clear()
    weight = torch.nn.Parameter(torch.ones(3))
    config = SimpleNamespace(optimizer="adam")
    with one_rank(fused_adamw=True):
        for options in ({"amsgrad": True}, {"maximize": True}, {"fused": True}):
            optimizer = torch.optim.AdamW([weight], **options)
            FP32Optimizer(optimizer, config, None)
            assert type(optimizer) is torch.optim.AdamW
        tensor_lr = torch.optim.AdamW([weight], lr=torch.tensor(1e-3))
        FP32Optimizer(tensor_lr, config, None)
        assert type(tensor_lr) is torch.optim.AdamW
        messages = [record.message for record in caplog.records]
        assert len(messages) == 4
        assert messages[0].endswith("the optimizer was built with amsgrad=True")
        FP32Optimizer(torch.optim.SGD([weight]), SimpleNamespace(optimizer="sgd"), None)
        FP32Optimizer(None, config, None)
        assert len(caplog.records) == 4, "an optimizer that is no Adam is nothing to report"


def test_torchs_hooks_still_run() -> None:
    from megatron.core.optimizer.optimizer import FP32Optimizer

    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    with one_rank(fused_adamw=True):
        FP32Optimizer(optimizer, SimpleNamespace(optimizer="adam"), None)
    assert isinstance(optimizer, torch.optim.AdamW)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))

    def closure() -> Tensor:
        weight.grad = torch.ones(3)
        seen.append("closure")
        return weight.sum()

    assert optimizer.step(closure) == 3
    assert seen == ["before", "closure", "after"]
    assert (weight < 1).all()


def test_off_leaves_every_name_alone() -> None:
    from megatron.core import utils
    from megatron.core.optimizer import clip_grads

    with one_rank(fused_adamw=True):
        assert clip_grads.l2_norm_impl is fused_adamw.multi_tensor_l2_norm
        assert clip_grads.multi_tensor_scale_impl is fused_adamw.multi_tensor_scale
    with one_rank():
        assert clip_grads.l2_norm_impl is utils.local_multi_tensor_l2_norm
        _, optimizer = build()
        (inner,) = optimizer.chained_optimizers
        assert type(inner.optimizer) is torch.optim.AdamW


def shards_and_weights(fused: bool, bf16: bool, overlap: bool) -> list[list[Tensor]]:
    """This rank's master shards and the whole model, after some steps of the distributed optimizer."""
    accel.enable(preset="off", fused_adamw=fused)
    model, optimizer = build(
        bf16=bf16, use_distributed_optimizer=True, overlap_param_gather=overlap
    )
    for step in range(STEPS):
        one_step(model, optimizer, step)
        if overlap:
            model.start_param_sync(force_sync=True)
    (inner,) = optimizer.chained_optimizers
    mains = [p.detach() for group in inner.optimizer.param_groups for p in group["params"]]
    return [mains, [p.detach() for p in model.parameters()]]


@pytest.mark.distributed(world_size=2)
def test_shards_of_two_ranks_are_those_of_stock() -> None:
    from megatron.core import parallel_state

    accel.enable(preset="off")
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    for bf16 in (False, True):
        for overlap in (False, True):
            mains, weights = shards_and_weights(True, bf16, overlap)
            stock_mains, stock_weights = shards_and_weights(False, bf16, overlap)
            assert 0 < sum(p.numel() for p in mains) < sum(p.numel() for p in weights)
            torch.testing.assert_close(mains, stock_mains)
            # a master weight between two bf16 numbers may be rounded to either: one step of bf16
            rtol = 2**-7 if bf16 else 1e-6
            torch.testing.assert_close(weights, stock_weights, rtol=rtol, atol=1e-6)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    accel.disable()


def clip(optimizer: Any, total_norm: float, only: slice = slice(None)) -> Any:
    """Megatron's clipping to a norm of 1; the inner optimizer."""
    from megatron.core.optimizer.optimizer import clip_grad_by_total_norm_fp32

    (mixed,) = optimizer.chained_optimizers
    clip_grad_by_total_norm_fp32(mixed.get_parameters()[only], 1.0, total_norm)
    return mixed.optimizer


@pytest.mark.parametrize("case", ["fp32", "bf16", "bf16_distributed"])
def test_the_step_clips_and_leaves_the_gradients_alone(case: str) -> None:
    with one_rank(fused_adamw=True):
        model, optimizer = build(**CASES[case])
        successful, norm, _ = one_step(model, optimizer, 0)
        (mixed,) = optimizer.chained_optimizers
        assert successful
        assert norm > 1
        assert mixed.optimizer.grad_scale() is None
        for p, grad in zip(model.parameters(), gradients(model, 0), strict=True):
            assert torch.equal(p.main_grad, grad)
            # what the first step keeps of a gradient: a tenth, of the clipped one
            (of_main,) = (
                state["exp_avg"]
                for main, state in mixed.optimizer.state.items()
                if main.data_ptr() == getattr(p, "main_param", p).data_ptr()
            )
            torch.testing.assert_close(of_main.view(p.shape), 0.1 * grad / norm, rtol=1e-5, atol=0)


def test_of_two_optimizers_of_the_same_parameters_either_clips() -> None:
    from megatron.core.optimizer import get_megatron_optimizer

    with one_rank(fused_adamw=True):
        model, first = build()
        config = first.chained_optimizers[0].config
        others = [get_megatron_optimizer(config, [model]) for _ in range(6)]
        for optimizer in (first, *others):
            _, norm, _ = one_step(model, optimizer, 0)
            assert norm > 1
            states = optimizer.chained_optimizers[0].optimizer.state
            for p, grad in zip(model.parameters(), gradients(model, 0), strict=True):
                of_p = states[p]["exp_avg"]
                torch.testing.assert_close(of_p, 0.1 * grad / norm, rtol=1e-5, atol=0)


def test_a_step_that_is_skipped_leaves_nothing_to_the_next() -> None:
    with one_rank(fused_adamw=True):
        model, optimizer = build(bf16=True)
        one_step(model, optimizer, 0)
        inner = clip(optimizer, total_norm=8.0)
        assert inner.grad_scale().item() == pytest.approx(1 / (8 + 1e-6), rel=1e-7)
        clip(optimizer, total_norm=0.5)
        assert inner.grad_scale() is None


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_a_program_may_clip_before_the_step_does(version: str) -> None:
    run_on(version, check_two_clips)


def check_two_clips() -> None:
    """By a number of its own, and of gradients that the step then finds short enough."""
    found = []
    for wanted in ({}, {"fused_adamw": True}):
        with one_rank(**wanted):
            model, optimizer = build()
            one_step(model, optimizer, 0)
            step, optimizer.step = optimizer.step, lambda: None
            one_step(model, optimizer, 1)
            optimizer.prepare_grads()
            first = optimizer.clip_grad_norm(0.05)
            _, norm, _ = step()
            assert norm == pytest.approx(0.05, rel=1e-4)
            found.append((first, [p.detach().clone() for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for ours, stocks in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(ours, stocks)


def test_gradients_that_change_between_clipping_and_step_are_refused() -> None:
    with one_rank(fused_adamw=True):
        model, optimizer = build(bf16=True)
        one_step(model, optimizer, 0)
        inner = clip(optimizer, total_norm=8.0)
        before = [p.detach().clone() for p in model.parameters()]
        next(model.parameters()).main_grad.add_(1)
        for main in (p for group in inner.param_groups for p in group["params"]):
            main.grad = torch.ones_like(main)
        with pytest.raises(
            RuntimeError, match="changed between their clipping and the optimizer's step"
        ):
            inner.step()
        assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_some_of_an_optimizers_parameters_are_clipped_at_once() -> None:
    with one_rank(fused_adamw=True):
        model, optimizer = build()
        model.zero_grad_buffer()
        (mixed,) = optimizer.chained_optimizers
        for p in mixed.get_parameters():
            p.grad = torch.ones_like(p)
        inner = clip(optimizer, total_norm=8.0, only=slice(2))
        means = [p.grad.mean().item() for p in mixed.get_parameters()]
        assert means[:2] == pytest.approx([1 / 8] * 2)
        assert set(means[2:]) == {1.0}
        assert inner.grad_scale() is None
