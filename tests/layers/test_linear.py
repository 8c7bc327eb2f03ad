"""`Linear`, `LayerNormLinear` and `GroupedLinear` as modules: parameters, state dicts, hooks, refusals."""

from __future__ import annotations

import copy
import io
from fractions import Fraction
from unittest import mock

import pytest
import torch

from accel.layers import stand_in
from accel.layers.grouped_linear import GroupedLinear
from accel.layers.linear import LayerNormLinear, Linear
from accel.log import log_once
from accel.memory.recompute import Recomputed
from accel.ops import layer_norm_ref, rms_norm_ref
from tests.ops.contract import needs_native

K, N = 6, 10


def test_state_dict_keys_are_transformer_engines() -> None:
    assert list(Linear(K, N).state_dict()) == ["weight", "bias", "_extra_state"]
    assert list(LayerNormLinear(K, N, bias=False, normalization="RMSNorm").state_dict()) == [
        "layer_norm_weight",
        "weight",
        "_extra_state",
    ]
    assert list(LayerNormLinear(K, N).state_dict()) == [
        *("layer_norm_weight", "layer_norm_bias", "weight", "bias", "_extra_state")
    ]
    assert list(GroupedLinear(2, K, N).state_dict()) == [
        *("weight0", "bias0", "weight1", "bias1", "_extra_state")
    ]
    assert list(stand_in.LayerNorm(K).state_dict()) == ["weight", "bias", "_extra_state"]


@pytest.mark.parametrize("make", [Linear, LayerNormLinear], ids=["Linear", "LayerNormLinear"])
def test_extra_state_is_tolerated_and_never_required(make: type) -> None:
    source, target = make(K, N), make(K, N)
    state = source.state_dict()
    assert state["_extra_state"].numel() == 0
    target.load_state_dict(state)
    state.pop("_extra_state")
    target.load_state_dict(state)
    assert torch.equal(target.weight, source.weight)
    state["_extra_state"] = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(ValueError, match="FP8 scales"):
        target.load_state_dict(state)


def in_a_file(state: object) -> io.BytesIO:
    """As Transformer Engine's versions before 2.0 kept the extra state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file


def test_an_extra_state_in_a_file_is_looked_at() -> None:
    module = Linear(K, N)
    state = module.state_dict()
    for nothing in (None, in_a_file(None), in_a_file(torch.empty(0))):
        module.load_state_dict({**state, "_extra_state": nothing})
    scales = {"scale_fwd": torch.ones(3)}
    for held in (in_a_file(scales), in_a_file(Fraction(1, 2)), scales):
        with pytest.raises(ValueError, match="FP8 scales"):
            module.load_state_dict({**state, "_extra_state": held})


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_layer_norm_linear_is_norm_then_linear(kind: str, zero_centered: bool) -> None:
    module = LayerNormLinear(
        K,
        N,
        normalization=kind,
        zero_centered_gamma=zero_centered,
        return_layernorm_output=True,
        return_bias=True,
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(4, 3, K)
    if kind == "RMSNorm":
        normed = rms_norm_ref(x, module.layer_norm_weight, 1e-5, zero_centered=zero_centered)
    else:
        weight, bias = module.layer_norm_weight, module.layer_norm_bias
        normed = layer_norm_ref(x, weight, bias, 1e-5, zero_centered=zero_centered)
    y, bias, out = module(x)
    assert torch.equal(out, normed)
    assert torch.equal(y, normed @ module.weight.t())
    assert bias is module.bias


@needs_native
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("options", [{}, {"return_bias": True}, {"return_layernorm_output": True}])
def test_a_norms_output_can_be_freed(kind: str, options: dict[str, bool]) -> None:
    """But not where it is returned."""
    torch.manual_seed(1)
    module = LayerNormLinear(K, N, normalization=kind, **options)
    results = []
    for recomputed in (False, True):
        module.recompute_norm = recomputed
        x = torch.randn(6, K, generator=torch.Generator().manual_seed(2)).requires_grad_()
        with mock.patch.object(
            Recomputed, "free", autospec=True, side_effect=Recomputed.free
        ) as free:
            y = module(x)
        assert free.call_count == (recomputed and "return_layernorm_output" not in options)
        found = [t for t in (y if isinstance(y, tuple) else (y,)) if t is not None]
        sum(t.square().sum() for t in found).backward()
        results.append([x.grad, *(p.grad for p in module.parameters()), *found])
        module.zero_grad()
    assert len(results[0]) == len(results[1])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("return_bias", [False, True])
@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0, 0], [5, 0, 0]], ids=str)
def test_grouped_linear_is_one_linear_for_each_group(counts: list[int], return_bias: bool) -> None:
    module = GroupedLinear(3, K, N, return_bias=return_bias)
    with torch.no_grad():
        for e in range(3):
            getattr(module, f"bias{e}").normal_()
    x = torch.randn(sum(counts), K, requires_grad=True)
    out = module(x, counts)
    y = out[0] if return_bias else out
    parts = []
    for e, rows in enumerate(x.split(counts)):
        part = rows @ getattr(module, f"weight{e}").t()
        parts.append(part if return_bias else part + getattr(module, f"bias{e}"))
    expected = torch.cat(parts)
    torch.testing.assert_close(y, expected)
    wanted = [x, *(getattr(module, f"weight{e}") for e in range(3))]
    got = torch.autograd.grad(y.square().sum(), wanted)
    torch.testing.assert_close(got, torch.autograd.grad(expected.square().sum(), wanted))


def test_delayed_weight_gradients_come_with_backward_dw() -> None:
    module = Linear(K, N, bias=False, delay_wgrad_compute=True)
    told = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: told.append(module.weight.grad))
    assert module.weight.skip_backward_post_hook is True
    x = torch.randn(4, K)
    module(x).sum().backward()
    assert module.weight.grad is None
    module.backward_dw()
    torch.testing.assert_close(module.weight.grad, torch.ones(4, N).t() @ x)
    assert told[0] is module.weight.grad
    with pytest.raises(RuntimeError, match="no backward is left"):
        module.backward_dw()


def test_a_delayed_gradient_in_main_grad_shows_in_grad_for_the_hook() -> None:
    """Megatron's overlapped reduction refuses a weight without `.grad`."""
    options = {"bias": False, "delay_wgrad_compute": True, "fuse_wgrad_accumulation": True}
    layers = [
        Linear(K, N, **options),
        GroupedLinear(2, K, N, get_rng_state_tracker=None, **options),
    ]
    x = torch.randn(4, K)
    for layer, args in zip(layers, [(x,), (x, [1, 3])], strict=True):
        weights = list(layer.parameters())
        for weight in weights:
            weight.main_grad = torch.zeros(N, K)
            weight.grad_added_to_main_grad = False
        layer(*args).sum().backward()
        assert all(weight.grad is None for weight in weights)
        layer.backward_dw()
        assert all(weight.grad is not None and weight.grad_added_to_main_grad for weight in weights)
        total = sum(weight.main_grad for weight in weights)
        torch.testing.assert_close(total, torch.ones(4, N).t() @ x)


@pytest.mark.parametrize(
    "options", [{"fuse_wgrad_accumulation": True}, {"delay_wgrad_compute": True}], ids=str
)
def test_some_frozen_experts_are_refused(options: dict[str, bool]) -> None:
    module = GroupedLinear(3, K, N, bias=False, get_rng_state_tracker=None, **options)
    for weight in module.parameters():
        weight.main_grad = torch.zeros(N, K)
    module.weight1.requires_grad_(False)
    with pytest.raises(NotImplementedError, match=r"experts \[1\] of 3 are frozen"):
        module(torch.randn(6, K), [1, 2, 3])
    with torch.no_grad():
        assert module(torch.randn(6, K), [1, 2, 3]).shape == (6, N)


@pytest.mark.parametrize("where", ["grad", "main_grad", "later"])
@pytest.mark.parametrize("kind", [Linear, GroupedLinear], ids=["Linear", "GroupedLinear"])
def test_under_autocast_all_is_as_in_torchs_own_layer(kind: type, where: str) -> None:
    """Products in bf16 of fp32 weights, in both directions; the backward outside of autocast, and within."""
    counts = [[1, 3]] if kind is GroupedLinear else []
    size = (2, K, N) if counts else (K, N)
    layer = kind(
        *size,
        bias=not counts,
        fuse_wgrad_accumulation=where == "main_grad",
        delay_wgrad_compute=where == "later",
    )
    weights = [p for name, p in layer.named_parameters() if name.startswith("weight")]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    copies = [w.detach().clone().requires_grad_() for w in weights]
    bias = None if counts else torch.zeros(N, requires_grad=True)
    x = torch.randn(4, K, requires_grad=True)
    parts = counts[0] if counts else [4]
    exact = [torch.zeros_like(w) for w in weights]
    for within in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x, *counts)
            rows = zip(x.split(parts), copies, strict=True)
            expected = torch.cat([torch.nn.functional.linear(r, w, bias) for r, w in rows])
        dy = torch.randn(4, N).to(torch.bfloat16)
        x.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            y.backward(dy)
        if where == "later":
            layer.backward_dw()
        dx, x.grad = x.grad, None
        expected.backward(dy)
        assert torch.equal(y, expected)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(dx, x.grad)
        rounded = x.detach().to(torch.bfloat16).float()
        for dw, d, r in zip(exact, dy.float().split(parts), rounded.split(parts), strict=True):
            dw += d.t() @ r
    for weight, copy_, dw in zip(weights, copies, exact, strict=True):
        if where == "main_grad":  # nothing is rounded to bf16 on the way
            torch.testing.assert_close(weight.main_grad, dw)
        else:
            torch.testing.assert_close(weight.grad, copy_.grad)
    if bias is not None:
        torch.testing.assert_close(layer.bias.grad, bias.grad)


def test_a_layer_without_memory_has_a_result_without_memory() -> None:
    assert Linear(K, N, device="meta")(torch.empty(4, K, device="meta")).shape == (4, N)


def test_reset_parameters_fills_what_was_made_without_memory() -> None:
    """As Megatron's FSDP makes a model: on "meta", then `to_empty`, which drops attributes."""

    def build(device: str) -> list[torch.nn.Module]:
        where = {"device": device, "parallel_mode": "column", "delay_wgrad_compute": True}
        return [
            LayerNormLinear(K, N, zero_centered_gamma=True, **where),
            GroupedLinear(2, K, N, **where),
            stand_in.LayerNorm(K, sequence_parallel=True, device=device),
            stand_in.RMSNorm(K, sequence_parallel=True, device=device),
        ]

    torch.manual_seed(0)
    expected = build("cpu")
    torch.manual_seed(0)
    for layer, filled in zip(build("meta"), expected, strict=True):
        layer = copy.deepcopy(layer).to_empty(device="cpu")
        layer.reset_parameters()
        for (name, parameter), other in zip(
            layer.named_parameters(), filled.parameters(), strict=True
        ):
            assert torch.equal(parameter, other), name
            assert vars(parameter) == vars(other), name


def test_bad_arguments_are_named() -> None:
    with pytest.raises(NotImplementedError, match="symmetric_ar_type"):
        Linear(K, N, symmetric_ar_type="two_shot")
    with pytest.raises(ValueError, match="parallel_mode='diagonal'"):
        Linear(K, N, parallel_mode="diagonal")
    with pytest.raises(ValueError, match="out_features=10 is no multiple of the 3 ranks"):
        Linear(K, N, tp_size=3, parallel_mode="column")
    with pytest.raises(ValueError, match="normalization='BatchNorm'"):
        LayerNormLinear(K, N, normalization="BatchNorm")
    split = Linear(K, N, tp_size=2, parallel_mode="column", device="meta")
    with pytest.raises(RuntimeError, match="set_tensor_parallel_group"):
        split(torch.ones(2, K, device="meta"))


def test_nothing_pretends_to_be_the_package() -> None:
    import sys

    modules = stand_in.modules(distributed={}, router={})
    assert "transformer_engine.pytorch" in modules
    assert not [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]
    with pytest.raises(NotImplementedError, match="FP8"):
        modules["transformer_engine.pytorch.fp8"].fp8_autocast(enabled=True)


def test_weights_without_a_mode_are_a_ranks_own_until_others_say_otherwise() -> None:
    """Megatron passes no mode for experts, and counts what is not marked on one tensor-parallel rank."""
    layer = Linear(8, 16, parallel_mode=None)
    assert layer.weight.tensor_model_parallel is True
    layer.weight.tensor_model_parallel = False
    layer.reset_parameters()
    assert layer.weight.tensor_model_parallel is False


def test_userbuffers_that_nobody_has_get_a_line(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    with caplog.at_level("WARNING", logger="accel"):
        Linear(8, 8)
        GroupedLinear(2, 8, 8, ub_name="fc1")  # Megatron always names them
        assert not caplog.records
        for _ in range(2):
            Linear(8, 8, ub_name="proj")
    (record,) = caplog.records
    assert "accel.enable(tp_overlap=True)" in record.getMessage()
