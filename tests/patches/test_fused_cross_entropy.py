"""Megatron's cross entropy functions, served: stock's numbers on one and two ranks, every flag."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel.feature import Context
from accel.patches.fused_cross_entropy import vocab_parallel, without_te
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import needs_native

pytestmark = needs_native

ROWS, SHARD = (5, 3), 61  # [s, b], and the tokens of one rank
FLAGS = {
    "unfused": SimpleNamespace(cross_entropy_loss_fusion=False),
    "native": SimpleNamespace(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native"),
    "te": SimpleNamespace(
        cross_entropy_loss_fusion=True,
        cross_entropy_fusion_impl="te",
        cuda_graph_impl="none",
        cuda_graph_scope=[],
    ),
}


def tensor_parallel(size: int) -> Any:
    """Megatron's tensor-parallel group of this rank."""
    from megatron.core import parallel_state

    accel.enable(preset="off")
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    return parallel_state.get_tensor_model_parallel_group()


def leave() -> None:
    from megatron.core import parallel_state

    accel.disable()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def model_loss(group: Any, flags: SimpleNamespace, labels: Tensor, logits: Tensor) -> Tensor:
    """``LanguageModule.compute_language_model_loss`` of a model that has nothing else."""
    from megatron.core.models.common.language_module.language_module import LanguageModule

    model = SimpleNamespace(
        config=flags, tp_group=group, pg_collection=SimpleNamespace(tp=group), cp_group=None
    )
    return LanguageModule.compute_language_model_loss(model, labels, logits)


def problem(group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, slice]:
    """Whole logits [s, b, V], labels [b, s] with one that no rank has, dloss [b, s], our shard."""
    generator = torch.Generator().manual_seed(4)
    logits = (torch.randn(*ROWS, SHARD * group.size(), generator=generator) * 3).to(dtype)
    labels = torch.randint(0, logits.shape[-1], ROWS[::-1], generator=generator)
    labels[0, 0] = -1
    dloss = torch.rand(ROWS[::-1], generator=generator)
    return logits, labels, dloss, slice(SHARD * group.rank(), SHARD * (group.rank() + 1))


def gradient(loss: Any, logits: Tensor, dloss: Tensor) -> tuple[Tensor, Tensor]:
    produced = logits.clone().requires_grad_() * 1
    result = loss(produced)
    value = result.detach().clone()
    return value, torch.autograd.grad(result, produced, dloss.to(result.dtype))[0]


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_stocks_loss_and_gradient(size: int, dtype: torch.dtype, flags: str) -> None:
    group = tensor_parallel(size)
    try:
        whole, labels, dloss, shard = problem(group, dtype)
        # Stock has no "te" here; the mathematics is that of the unfused one.
        stock_flags = FLAGS["unfused" if flags == "te" else flags]

        def run(flags: SimpleNamespace) -> tuple[Tensor, Tensor]:
            def loss(x: Tensor) -> Tensor:
                return model_loss(group, flags, labels, x)

            return gradient(loss, whole[..., shard], dloss)

        stock_loss, stock_grad = run(stock_flags)
        accel.disable()
        accel.enable(preset="fast")
        loss, grad = run(FLAGS[flags])

        def exactly(x: Tensor) -> Tensor:
            log_p = x.log_softmax(-1)
            x_t = x.gather(-1, labels.t().clamp(min=0).unsqueeze(-1)).squeeze(-1)
            per_token = torch.where(labels.t() >= 0, x_t, x.detach().amax(-1))
            return (-(log_p[..., 0] - x[..., 0] + per_token)).t()

        exact_loss, exact_grad = gradient(exactly, whole.double(), dloss)
        options = {"roundings": 8, "magnitude": float(whole.double().abs().max() * 2)}
        assert_close_to_baseline(loss, stock_loss, exact_loss, **options)
        assert loss.is_contiguous()
        exact_grad = exact_grad[..., shard]
        assert_close_to_baseline(grad, stock_grad.to(dtype), exact_grad, roundings=8, magnitude=1.0)
    finally:
        leave()


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("size", [1, 2])
def test_label_smoothing(size: int) -> None:
    """On one rank ours; on two Megatron's own, bit for bit."""
    from megatron.core import tensor_parallel as megatron

    group = tensor_parallel(size)
    try:
        whole, labels, dloss, shard = problem(group, torch.float32)
        labels = labels.t().contiguous().clamp(min=0)

        def run() -> tuple[Tensor, Tensor]:
            def loss(x: Tensor) -> Tensor:
                return megatron.vocab_parallel_cross_entropy(x, labels, label_smoothing=0.1)

            return gradient(loss, whole[..., shard], dloss.t())

        stock = run()
        accel.disable()
        accel.enable(preset="fast")
        for ours, theirs in zip(run(), stock, strict=True):
            if size == 2:
                assert torch.equal(ours, theirs)
            else:
                torch.testing.assert_close(ours, theirs)
    finally:
        leave()


@pytest.mark.parametrize("named", [False, True])
def test_label_smoothing_of_a_group_that_is_named_stays_there(named: bool) -> None:
    """Not that of the default tensor-parallel group; before megatron-core 0.19 there is nothing to name."""
    from megatron.core import parallel_state

    pair, calls = SimpleNamespace(size=lambda: 2), []

    def upstream(*args: Any, **options: Any) -> Tensor:
        calls.append((args, options))
        return logits

    logits, labels = torch.randn(2, 3, 8), torch.zeros(2, 3, dtype=torch.long)
    options = {"tp_group": pair} if named else {}
    with patch.object(parallel_state, "get_tensor_model_parallel_group", lambda: pair):
        assert vocab_parallel(upstream)(logits, labels, 0.1, **options) is logits
    assert calls == [((logits, labels, 0.1), options)]


@pytest.mark.distributed(world_size=1)
def test_overwrites_logits_in_the_backward_but_never_a_leaf() -> None:
    group = tensor_parallel(1)
    try:
        accel.disable()
        accel.enable(preset="fast")
        logits, labels, dloss, _ = problem(group, torch.bfloat16)
        produced = logits.clone().requires_grad_() * 1
        loss = model_loss(group, FLAGS["native"], labels, produced)
        assert torch.equal(produced, logits)
        (grad,) = torch.autograd.grad(loss, produced, dloss)
        assert grad.data_ptr() == produced.data_ptr()
        leaf = logits.clone().requires_grad_()
        model_loss(group, FLAGS["native"], labels, leaf).backward(dloss)
        assert torch.equal(leaf, logits)
        assert torch.equal(leaf.grad, grad)
    finally:
        leave()


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is here"
)
def test_te_becomes_native_and_says_so() -> None:
    def context(**args: Any) -> Context:
        return Context("cpu", "0.19.2", SimpleNamespace(**args))

    asked = context(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    assert len(without_te(asked)) == 1
    assert asked.args.cross_entropy_fusion_impl == "native"
    assert without_te(asked) == []
    idle = context(cross_entropy_loss_fusion=False, cross_entropy_fusion_impl="te")
    assert without_te(idle) == []
    assert without_te(context()) == [], "a nested yaml namespace has no such attributes"
