"""A GPT model whose loss makes the logits in pieces: stock's loss and gradients, or whole logits."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.log import log_once
from accel.patches.linear_cross_entropy import Projection
from tests.ops.contract import needs_native

pytestmark = needs_native

SEQUENCE, BATCH, VOCABULARY = 8, 3, 96


def start(size: int, **features: bool) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    accel.enable(preset="fast", **features)
    if not dist.is_initialized():
        dist.init_process_group("nccl")
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)


def stop() -> None:
    from megatron.core import parallel_state

    accel.disable()
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def build(size: int, *, tied: bool = False, **options: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=4,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        **{"gradient_accumulation_fusion": False, **options},
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )


def batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = tokens.roll(-1, 1)
    labels[0, -1] = -100  # padding, which the mask below hides
    causal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": causal.cuda(),
        "labels": labels,
    }


def step(model: Any, main_grad: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses [b, s] and the gradient of each parameter, two micro-batches added up.

    With ``main_grad`` as Megatron's data parallelism does it: its hook adds what autograd hands on,
    unless the layer says that it has added the gradient itself.
    """

    def hook(parameter: Tensor) -> None:
        parameter.hook_calls += 1
        if not parameter.grad_added_to_main_grad or getattr(parameter, "zero_out_wgrad", False):
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    if main_grad:
        for parameter in model.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
            parameter.hook_calls = 0
            parameter.register_post_accumulate_grad_hook(hook)
    mask = torch.rand(BATCH, SEQUENCE, generator=torch.Generator().manual_seed(3))
    mask[0, -1] = 0
    for _ in range(2):
        losses = model(**batch())
        (losses * mask).sum().backward()
    if main_grad:
        assert all(p.hook_calls >= 2 for p in model.parameters())
    grads = {n: p.main_grad if main_grad else p.grad for n, p in model.named_parameters()}
    return losses.detach() * (mask > 0), {n: g.clone() for n, g in grads.items()}


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", ["tp1", "tp2", "tp2_sp"])
def test_stocks_losses_and_gradients(
    layout: str, tied: bool, main_grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1 if layout == "tp1" else 2
    options = {
        "sequence_parallel": layout == "tp2_sp",
        "gradient_accumulation_fusion": main_grad,
    }
    made: list[Projection] = []
    loss_of = Projection.loss
    monkeypatch.setattr(Projection, "loss", lambda self, *t: made.append(self) or loss_of(self, *t))
    try:
        start(size)
        stock_losses, stock_grads = step(build(size, tied=tied, **options), main_grad)
        assert not made
        accel.disable()
        start(size, linear_cross_entropy=True)
        losses, grads = step(build(size, tied=tied, **options), main_grad)
        assert len(made) == 2
        torch.testing.assert_close(losses, stock_losses, rtol=1e-5, atol=1e-6)
        assert grads.keys() == stock_grads.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(
                grad, stock_grads[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
            )
    finally:
        stop()


@pytest.mark.distributed(world_size=1)
@pytest.mark.parametrize("implementation", ["te", "native"])
def test_transformer_engines_loss_ignores_a_label(implementation: str) -> None:
    fusion = {
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": implementation,
    }
    try:
        start(1, linear_cross_entropy=True)
        inputs = batch()
        inputs["labels"][0, :3] = -100
        for options in ({}, fusion):
            losses = build(1, **options)(**inputs)
            ignored = bool(options) and implementation == "te"
            assert bool((losses[0, :3] == 0).all()) is ignored
            assert (losses[0, 3:-1] > 0).all()  # the last is -100 too
    finally:
        stop()


@pytest.mark.distributed(world_size=1)
def test_without_labels_the_logits_are_whole_and_nothing_is_left_behind() -> None:
    try:
        start(1, linear_cross_entropy=True)
        model = build(1)
        inputs = batch()
        model(**inputs)
        assert "forward" not in vars(model.output_layer)
        inputs.pop("labels")
        assert model(**inputs).shape == (BATCH, SEQUENCE, VOCABULARY)
    finally:
        stop()


@pytest.mark.distributed(world_size=1)
def test_who_needs_whole_logits_gets_them_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        start(1, linear_cross_entropy=True)
        plain = build(1)
        expected = plain(**batch())
        seen: list[Tensor] = []

        def hooked(model: Any) -> None:
            model.output_layer.register_forward_hook(lambda m, i, out: seen.append(out[0]))

        def own_loss(model: Any) -> None:
            stock = model.compute_language_model_loss
            model.compute_language_model_loss = lambda *a: seen.append(a[1]) or stock(*a)

        def overridden(model: Any) -> None:
            kind = type(model)

            def loss(self: Any, *a: Any) -> Tensor:
                seen.append(a[1])
                return kind.compute_language_model_loss(self, *a)

            model.__class__ = type("Own", (kind,), {"compute_language_model_loss": loss})

        def own_forward(model: Any) -> None:
            stock = model.output_layer.forward

            def forward(*a: Any, **options: Any) -> Any:
                logits, bias = stock(*a, **options)
                seen.append(logits)
                return logits, bias

            model.output_layer.forward = forward

        def backward_hook(model: Any) -> None:
            model.output_layer.register_full_backward_hook(lambda m, dx, dy: None)
            hooked(model)

        changes = (
            *((hooked, "hooks read"), (own_loss, "a loss of its own"), (overridden, "a loss of")),
            *((own_forward, "a forward of its own"), (backward_hook, "hooks read")),
        )
        for change, reason in changes:
            model = build(1)
            model.load_state_dict(plain.state_dict())
            change(model)
            log_once.cache_clear()
            with caplog.at_level(logging.WARNING, logger="accel"):
                caplog.clear()
                for _ in range(2):
                    torch.testing.assert_close(model(**batch()), expected)
            assert [reason in r.message for r in caplog.records] == [True]
        assert [logits.shape for logits in seen] == [(SEQUENCE, BATCH, VOCABULARY)] * 10
    finally:
        stop()


def test_multi_token_prediction_is_refused_with_the_reason() -> None:
    from accel.feature import Context, choose
    from accel.patches import FEATURES

    args = {"bf16": True, "optimizer": "adam", "use_precision_aware_optimizer": False}
    context = Context("cpu", "0.19.2", SimpleNamespace(mtp_num_layers=1, **args))
    with pytest.raises(ValueError, match=r"--mtp-num-layers exclude each other: .* whole logits"):
        choose(FEATURES, "fast", {"linear_cross_entropy": True}, context)
    choices = {c.feature.name: c for c in choose(FEATURES, "max", {}, context)}
    assert choices["linear_cross_entropy"].state == "skipped"
    assert choices["fused_cross_entropy"].state == "active"
