"""`fused_add_norm`: which additions are computed with their norms, with the bits of the two steps."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import accel
from accel.feature import Context
from accel.log import log_once
from accel.patches import fused_add_norm
from tests.layers.test_residual import counted
from tests.ops.contract import needs_native

from .blocks import HIDDEN, TOKENS, at_once, block, gradients
from .test_fused_adamw import one_rank
from .test_mamba import hybrid

LAYERS = 3
BIASES = {"add_bias_linear": True, "gated_linear_unit": False, "activation_func": F.gelu}
MOE = {
    "num_moe_experts": 4,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_ffn_hidden_size": 128,
}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SUMS = 2 * LAYERS
"""Two of each layer; the last one is read by the norm behind the layers."""

CASES: dict[str, tuple[dict[str, Any], int]] = {
    "Llama": ({}, SUMS),
    "biases": (BIASES, SUMS),
    "zero-centred": ({"layernorm_zero_centered_gamma": True}, SUMS),
    "experts": (MOE, SUMS),
    "bf16": ({"params_dtype": torch.bfloat16, "bf16": True}, SUMS),
    "dropout": ({"hidden_dropout": 0.1}, 0),
    "another norm": ({"normalization": "LayerNorm"}, 0),
    "stream in fp32": (
        {"params_dtype": torch.bfloat16, "bf16": True, "fp32_residual_connection": True},
        0,
    ),
}


def model(spec: str, **config: Any) -> Any:
    """In training, with the fused norms."""
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **config}
    if spec == "local":
        moe = {"num_experts": 4, "moe_grouped_gemm": True} if "num_moe_experts" in config else {}
        return block(LAYERS, moe, **given)
    from megatron.core.models.gpt import gpt_layer_specs

    with pytest.MonkeyPatch.context() as patch:
        of_te = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        moe = {"num_experts": 4, "moe_grouped_gemm": True} if "num_moe_experts" in config else {}
        patch.setattr(
            gpt_layer_specs, "get_gpt_layer_local_spec", lambda **_: of_te(**moe), raising=True
        )
        return block(LAYERS, **given)


def three_passes(made: Any) -> list[list[torch.Tensor]]:
    made = made.train()
    if made.config.bf16:
        made.bfloat16()
        made.register_forward_pre_hook(lambda _, args: (args[0].bfloat16(), *args[1:]))
    return [gradients(made)[0] for _ in range(3)]


@needs_native
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_two_steps(case: str, spec: str) -> None:
    config, sums = CASES[case]
    with one_rank(fused_norm=True, te_layers=True), counted() as apart:
        expected = three_passes(model(spec, **config))
    with one_rank(fused_add_norm=True, te_layers=True), counted() as together:
        found = three_passes(model(spec, **config))
    assert not apart
    assert len(together) == 2 * sums, "two passes after the first, which teaches"
    assert set(together) <= {(TOKENS, 1, HIDDEN)}
    for ours, stock in zip(found, expected, strict=True):
        assert len(ours) == len(stock)
        assert all(map(torch.equal, ours, stock))


@needs_native
@pytest.mark.parametrize("config", [{}, FULL], ids=["kept", "computed again"])
def test_hybrid_models(config: dict[str, Any]) -> None:
    """One addition in each layer."""
    pattern = "M-M*"

    def passes() -> list[list[torch.Tensor]]:
        return three_passes(hybrid(pattern, hidden_size=HIDDEN, **config).decoder)

    with one_rank(fused_norm=True, te_layers=True), counted() as apart:
        expected = passes()
    with one_rank(fused_add_norm=True, te_layers=True), counted() as together:
        found = passes()
    assert not apart
    assert len(together) == (0 if config else 2 * len(pattern))
    for ours, stock in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, stock))


@needs_native
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_layers_that_are_computed_again_as_a_whole(spec: str) -> None:
    """What the next layer reads is a copy in the backward pass; within a layer it is not."""
    with one_rank(fused_norm=True, te_layers=True):
        expected = three_passes(model(spec, **FULL))
    with one_rank(fused_add_norm=True, te_layers=True):
        made = model(spec, **FULL)
        found = three_passes(made)
        with counted() as together:
            found += [gradients(made)[0]]
    assert len(together) == LAYERS, "only where it is computed again"
    for ours, stock in zip(found, [*expected, expected[-1]], strict=True):
        assert all(map(torch.equal, ours, stock))


@needs_native
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_layers_in_checkpoints_without_reentry(spec: str) -> None:
    """Which must save the same tensors again, whether the norms are not known yet, or known since."""

    def passes() -> list[torch.Tensor]:
        made = model(spec).train()
        layers = [layer.forward for layer in made.layers]
        found = []
        for checkpointed in (True, False, True):
            for layer, forward in zip(made.layers, layers, strict=True):
                again = functools.partial(checkpoint, forward, use_reentrant=False)
                layer.forward = again if checkpointed else forward
            found += [t for _ in range(2) for t in gradients(made)[0]] + at_once(made)
        return found

    with one_rank(fused_norm=True, te_layers=True):
        expected = passes()
    with one_rank(fused_add_norm=True, te_layers=True), counted() as together:
        found = passes()
    assert together, "outside of checkpoints"
    assert all(map(torch.equal, found, expected))


@needs_native
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_passes_that_begin_before_others_go_back(spec: str) -> None:
    """As in pipelines, whose layers are computed again: the norm behind them reads a checkpoint's result."""

    def two_at_once(made: Any) -> list[torch.Tensor]:
        made.zero_grad()
        draw = torch.Generator().manual_seed(5)
        xs = [torch.randn(TOKENS, 1, HIDDEN, generator=draw).requires_grad_() for _ in range(2)]
        mask = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).triu(1)
        outputs = [made(x, mask) for x in xs]
        for output in outputs:
            output.square().sum().backward()
        return [
            *(output.detach() for output in outputs),
            *(t.grad for t in (*xs, *made.parameters())),
        ]

    with one_rank(fused_norm=True, te_layers=True):
        expected = [two_at_once(made) for made in [model(spec, **FULL).train()] for _ in range(3)]
    with one_rank(fused_add_norm=True, te_layers=True):
        found = [two_at_once(made) for made in [model(spec, **FULL).train()] for _ in range(3)]
    for ours, stock in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, stock))


@needs_native
@pytest.mark.parametrize("spec", ["local", "transformer_engine"])
def test_layers_that_are_compiled_compute_the_two_apart(spec: str) -> None:
    """The first layer is not: its last sum is read by a norm that is."""
    with one_rank(fused_norm=True, te_layers=True):
        expected = three_passes(model(spec))
    with one_rank(fused_add_norm=True, te_layers=True), counted() as together:
        made = model(spec)
        for layer in made.layers[1:]:
            layer.compile(backend="eager")
        found = three_passes(made)
    assert len(together) == 2, "within the first layer"
    for ours, stock in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, stock))


@needs_native
def test_a_model_outlives_the_feature() -> None:
    with one_rank(fused_add_norm=True):
        made = model("local")
        with counted() as together:
            expected = three_passes(made)
        assert len(together) == 2 * SUMS
        accel.enable(preset="off", fused_norm=True)
        with counted() as apart:
            found = three_passes(made)
        assert not apart
        for ours, stock in zip(found, expected, strict=True):
            assert all(map(torch.equal, ours, stock))


@needs_native
def test_evaluation_is_plain_and_loses_nothing() -> None:
    with one_rank(fused_add_norm=True):
        made = model("local").train()
        gradients(made)
        with counted() as together:
            with torch.no_grad():
                made.eval()(torch.randn(TOKENS, 1, HIDDEN), None)
            assert not together
            gradients(made.train())
        assert len(together) == SUMS


@needs_native
@pytest.mark.parametrize("kind", ["hook", "retain_grad"])
def test_a_layers_output_has_its_whole_gradient_where_somebody_asks(kind: str) -> None:
    """Not only what comes past the next norm; a hook that changes it changes all that comes before."""

    def asking(made: Any) -> list[torch.Tensor]:
        made.train()
        kept: list[torch.Tensor] = []

        def ask(layer: Any, args: Any, output: Any) -> None:
            if kind == "hook":
                output[0].register_hook(lambda grad: kept.append(grad.clone()) or grad * 2)
            else:
                output[0].retain_grad()
                kept.append(output[0])

        made.layers[0].register_forward_hook(ask)
        found = [t for _ in range(3) for t in gradients(made)[0]]
        assert len(kept) == 3
        return [*found, *(t if kind == "hook" else t.grad for t in kept)]

    with one_rank(fused_norm=True, te_layers=True):
        expected = asking(model("local"))
    with one_rank(fused_add_norm=True, te_layers=True), counted() as together:
        found = asking(model("local"))
    assert together, "all other sums are computed with their norms"
    assert all(map(torch.equal, found, expected))


@needs_native
def test_parameters_that_are_gathered_when_their_module_runs_switch_it_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    log_once.cache_clear()
    with one_rank(fused_add_norm=True):
        made = model("local", gradient_accumulation_fusion=False)
        for overlapped in (False, True):
            config = DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                overlap_grad_reduce=overlapped,
                overlap_param_gather=overlapped,
            )
            with caplog.at_level("WARNING", logger="accel"):
                wrapped = DistributedDataParallel(made.config, config, made)
            if overlapped:
                wrapped.disable_forward_pre_hook(param_sync=False)
            for again in (False, True):
                if again:  # a program that chooses features once more
                    accel.enable(preset="off", device="cpu", fused_add_norm=True)
                with counted() as together:
                    for _ in range(3):
                        made.train()(torch.randn(TOKENS, 1, HIDDEN, requires_grad=True), None)
                assert bool(together) is not overlapped
    assert "gathered beside the forward pass" in caplog.text


@needs_native
def test_a_layer_whose_configuration_does_not_allow_it(caplog: pytest.LogCaptureFixture) -> None:
    """A program without a command line has no flags to be asked."""
    log_once.cache_clear()
    config = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with one_rank(fused_norm=True, te_layers=True):
        expected = three_passes(model("transformer_engine", **config))
    with (
        one_rank(fused_add_norm=True, te_layers=True),
        counted() as together,
        caplog.at_level("WARNING", logger="accel"),
    ):
        found = three_passes(model("transformer_engine", **config))
    assert not together
    assert "--recompute-modules layernorm" in caplog.text
    for ours, stock in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, stock))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, None),
        ({"overlap_param_gather": True}, "--overlap-param-gather: a norm's weight may come after"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp"),
        ({"use_torch_fsdp2": True}, "--use-torch-fsdp2"),
        ({"recompute_modules": ["core_attn"]}, None),
        ({"recompute_modules": ["core_attn", "layernorm"]}, "--recompute-modules layernorm"),
        ({"offload_modules": ["qkv_linear"]}, None),
        ({"offload_modules": ["core_attn", "mlp_norm"]}, "--offload-modules mlp_norm"),
        ({"cuda_graph_impl": "none"}, None),
        ({"cuda_graph_impl": "local"}, "not with --cuda-graph-impl local"),
    ],
)
def test_what_it_refuses(args: dict[str, Any], line: str | None) -> None:
    reason = fused_add_norm.FEATURE.refuses(Context("cpu", "0.19.2", SimpleNamespace(**args)))
    assert (reason is None) if line is None else line in str(reason)


@pytest.mark.parametrize("other", ["recompute_norm", "swap_attention", "memory_budget"])
def test_what_frees_or_moves_norms_goes_first(other: str) -> None:
    accel.enable(preset="fast", **{other: 1.0 if other == "memory_budget" else True})
    features = accel.status()["features"]
    accel.disable()
    assert features[other]["state"] == "active"
    assert features["fused_add_norm"]["state"] == "skipped"
    assert "exclude each other" in features["fused_add_norm"]["reason"]


@pytest.mark.parametrize(
    ("args", "line"),
    [({"normalization": "RMSNorm"}, None), ({"normalization": "LayerNorm"}, "LayerNorm")],
)
def test_when_it_is_idle(args: dict[str, Any], line: str | None) -> None:
    reason = fused_add_norm.FEATURE.idle(Context("cpu", "0.19.2", SimpleNamespace(**args)))
    assert (reason is None) if line is None else line in str(reason)
