"""The local experts as grouped products: SequentialMLP's parameters, numbers, gradients and checkpoints."""

from __future__ import annotations

import inspect
import logging

import pytest
import torch

from accel.log import log_once

from .moe_layer import CONFIGS, EXPERTS, HIDDEN, assert_same, build, one_rank, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_computes_what_sequential_experts_do(name: str, dtype: torch.dtype) -> None:
    with one_rank("off"):
        stock = step(build(dtype, **CONFIGS[name]))
    with one_rank("off", grouped_gemm=True):
        assert_same(step(build(dtype, **CONFIGS[name], moe_grouped_gemm=True)), stock)


def test_the_experts_really_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    from accel.patches import grouped_gemm

    calls = []
    product = grouped_gemm.grouped_linear

    def counted(*args, **options):
        calls.append(1)
        return product(*args, **options)

    monkeypatch.setattr(grouped_gemm, "grouped_linear", counted)
    with one_rank("off", grouped_gemm=True):
        step(build())
    assert len(calls) == 2, "one for each linear layer of all experts"


def test_state_dict_and_sharded_state_dict_are_those_of_sequential_experts() -> None:
    found = []
    for feature in (False, True):
        with one_rank("off", grouped_gemm=feature):
            layer = build(moe_grouped_gemm=True)
            sharded = layer.experts.sharded_state_dict("experts.")
            found.append(
                (
                    {k: tuple(v.shape) for k, v in layer.state_dict().items() if v is not None},
                    sorted((k, v.key, type(v).__name__) for k, v in sharded.items()),
                )
            )
    assert found[0] == found[1]
    assert f"experts.local_experts.{EXPERTS - 1}.linear_fc2.weight" in found[1][0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_added_to_main_grad_in_fp32(dtype: torch.dtype) -> None:
    """Two micro-batches with --gradient-accumulation-fusion; the first expert gets no token."""
    found = []
    for feature in (False, True):
        with one_rank("off", grouped_gemm=feature, gradient_accumulation_fusion=True):
            layer = build(dtype, gradient_accumulation_fusion=True)
            experts = list(layer.experts.parameters())
            for p in experts:
                p.main_grad = torch.ones(p.shape)
                p.grad_added_to_main_grad = False
            counts = torch.tensor([0, 3, 7, 0, 5, 1, 4, 4])
            generator = torch.Generator().manual_seed(0)
            for _ in range(2):
                x = torch.randn(24, HIDDEN, generator=generator).to(dtype).requires_grad_()
                y, _ = layer.experts(x, counts, torch.rand(24, generator=generator).to(dtype))
                y.backward(torch.randn(y.shape, generator=generator).to(dtype))
            assert all(p.grad_added_to_main_grad for p in experts)
            found.append({f"{i}": p.main_grad for i, p in enumerate(experts)} | {"x": x.grad})
            assert torch.equal(experts[0].main_grad, torch.ones(experts[0].shape))
    for name, stock in found[0].items():
        # bf16: activations between the two products are rounded in either order
        rtol = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            found[1][name], stock, rtol=rtol, atol=rtol * float(stock.abs().max())
        )


@pytest.mark.parametrize("frozen", [False, True])
def test_under_autocast_experts_are_those_of_torchs_layers(frozen: bool) -> None:
    from accel.patches.grouped_gemm import GroupedLinear

    torch.manual_seed(1)
    layers = [torch.nn.Linear(HIDDEN, 24, bias=False) for _ in range(2)]
    layers[0].weight.requires_grad_(not frozen)
    for layer in layers:
        layer.gradient_accumulation_fusion = False
    x, counts = torch.randn(9, HIDDEN), torch.tensor([4, 5])
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = GroupedLinear(layers, counts)(x)
        expected = torch.cat([layers[0](x[:4]), layers[1](x[4:])])
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-9)


def test_a_second_derivative_is_an_error() -> None:
    """The weights' gradients are no part of any graph: what is derived from it would be wrong."""
    with one_rank("off", grouped_gemm=True, gradient_accumulation_fusion=True):
        layer = build(gradient_accumulation_fusion=True)
        for p in layer.experts.parameters():
            p.main_grad = torch.zeros(p.shape)
        counts = torch.tensor([0, 3, 7, 0, 5, 1, 4, 4])
        x = torch.randn(24, HIDDEN, requires_grad=True)
        y, _ = layer.experts(x, counts, torch.rand(24))
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda e: e.local_experts[1].register_forward_hook(lambda *a: None), "experts with hooks"),
        (
            lambda e: e.local_experts[1].linear_fc1.register_forward_hook(lambda *a: None),
            "linear layers with hooks",
        ),
        (
            lambda e: e.local_experts[1].register_forward_pre_hook(lambda *a: None),
            "experts with hooks",
        ),
        (
            lambda e: setattr(
                e.local_experts[3].linear_fc1, "forward", e.local_experts[3].linear_fc1.forward
            ),
            "linear layers with a forward of their own",
        ),
        (
            lambda e: setattr(e.local_experts[2], "linear_fc2", Renamed.of(e.local_experts[2])),
            "a linear layer of type Renamed without --moe-grouped-gemm",
        ),
        (lambda e: setattr(e.config, "add_bias_linear", True), "experts with biases"),
    ],
)
def test_what_cannot_be_grouped_runs_sequentially_and_says_so(change, reason, caplog) -> None:
    with one_rank("off"):
        stock = step(build())
    log_once.cache_clear()
    with (
        one_rank("off", grouped_gemm=True),
        caplog.at_level(logging.WARNING, logger="accel"),
    ):
        layer = build()
        change(layer.experts)
        ours = step(layer)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
    said = [r.message for r in caplog.records if "SequentialMLP" in r.message]
    assert said == [f"grouped_gemm of SequentialMLP: using plain PyTorch: {reason}"]


class Renamed(torch.nn.Module):
    """Somebody's own linear layer around Megatron's."""

    @staticmethod
    def of(expert: torch.nn.Module) -> torch.nn.Module:
        layer = expert.linear_fc2
        layer.__class__ = type("Renamed", (type(layer),), {})
        return layer


def test_parameter_gathering_is_waited_for() -> None:
    """Overlapped parameter gathering waits in forward pre-hooks of the modules that own parameters."""
    from megatron.core.distributed import distributed_data_parallel as upstream

    with one_rank("off", grouped_gemm=True):
        layer = build()
        waited: list[str] = []

        class DistributedDataParallel:
            def _make_forward_pre_hook(self, name: str):
                def hook(module: torch.nn.Module, *unused: object) -> None:
                    waited.append(name)

                return hook

        own, upstreams = DistributedDataParallel(), upstream.DistributedDataParallel
        assert "def hook(module, *unused)" in inspect.getsource(upstreams._make_forward_pre_hook)
        for name, module in layer.experts.named_modules():
            module.register_forward_pre_hook(own._make_forward_pre_hook(name))
        step(layer)
    owners = {f"local_experts.{e}.linear_fc{i}" for e in range(EXPERTS) for i in (1, 2)}
    assert owners <= set(waited)


def test_tokens_with_a_batch_dimension_run_sequentially() -> None:
    """Upstream's own test gives them: the experts' tokens are counted along the first dimension."""
    counts = torch.tensor([1, 0, 2, 0, 0, 1, 0, 0])
    x, probs = torch.randn(4, 2, HIDDEN), torch.rand(4, 2)
    outputs = []
    for options in ({}, {"grouped_gemm": True}):
        with one_rank("off", **options):
            torch.manual_seed(0)
            outputs.append(build().experts(x, counts, probs)[0])
    assert torch.equal(*outputs)


def test_probabilities_on_the_inputs_of_several_experts_are_refused_as_upstream_does() -> None:
    with one_rank("off", grouped_gemm=True):
        layer = build()
        layer.experts.config.moe_apply_probs_on_input = True
        with pytest.raises(AssertionError, match="moe_apply_probs_on_input"):
            step(layer)


def test_hooks_on_all_experts_keep_them_from_being_cut_into_pieces() -> None:
    """`moe_overlap` calls their layers in place of the module."""
    from accel.patches import _experts

    with one_rank("off", grouped_gemm=True):
        experts = build().experts
        assert _experts.reason(experts) is None
        experts.register_forward_hook(lambda *a: None)
        assert _experts.reason(experts) == "experts with hooks"
