"""The word embeddings' gradient goes to the rows of `main_grad` that were read, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from accel.feature import Context
from accel.log import log_once
from accel.patches import fused_embedding_gradient
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

from .test_fused_adamw import one_rank

VOCABULARY, HIDDEN, TOKENS, BATCH = 50, 24, 30, 2


def embedding(dtype: torch.dtype = torch.bfloat16, **options: Any) -> Any:
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

    torch.manual_seed(1)
    config = ModelParallelConfig(
        params_dtype=dtype,
        use_cpu_initialization=True,
        **{"gradient_accumulation_fusion": True} | options,
    )
    config.deterministic_mode = options.get("deterministic_mode", False)
    module = VocabParallelEmbedding(
        VOCABULARY, HIDDEN, init_method=torch.nn.init.normal_, config=config
    )
    weight = module.weight
    weight.main_grad = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2))
    weight.grad_added_to_main_grad = False
    return module


def summed(module: Any, ids: Tensor, batches: int = 1) -> tuple[Tensor, Tensor, bool]:
    """Outputs, `main_grad` once data parallelism has had the gradient, and whether that was there before."""
    weight = module.weight
    for batch in range(batches):
        out = module(ids)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(3 + batch))
        out.backward(dout.to(out.dtype))
        assert weight.grad.shape == weight.shape
        if not weight.grad_added_to_main_grad or getattr(weight, "zero_out_wgrad", False):
            weight.main_grad.add_(weight.grad.data)
        weight.grad = None
    return out.detach(), weight.main_grad, weight.grad_added_to_main_grad


def each_once() -> Tensor:
    return torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(4))[:40].view(2, 20)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_are_read_once_have_upstreams_bits(dtype: torch.dtype) -> None:
    with one_rank(fused_embedding_gradient=True):
        ours = summed(embedding(dtype), each_once(), batches=3)
    with one_rank():
        theirs = summed(embedding(dtype), each_once(), batches=3)
    assert (ours[2], theirs[2]) == (True, False)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


def test_rows_that_are_read_more_often_are_nearer_to_the_exact_sum() -> None:
    ids = torch.randint(0, 7, (BATCH, TOKENS), generator=torch.Generator().manual_seed(5))
    with one_rank(fused_embedding_gradient=True):
        module = embedding()
        before = module.weight.main_grad.double()
        _, ours, _ = summed(module, ids)
        again = summed(embedding(), ids)[1]
    with one_rank():
        _, theirs, _ = summed(embedding(), ids)
    dout = torch.randn(BATCH, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3))
    rows = dout.bfloat16().double().view(-1, HIDDEN)
    exact = before.index_add(0, ids.view(-1), rows)
    assert torch.equal(ours, again)
    assert (ours - exact).abs().max() < 1e-5 < (theirs - exact).abs().max()


def test_rows_are_added_in_the_tokens_order_whatever_the_threads() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.nn.Parameter(torch.zeros(100, 512, dtype=torch.bfloat16))
    ids = torch.randint(0, 100, (2048,), generator=generator)
    dout = torch.randn(2048, 512, generator=generator).bfloat16()
    expected = torch.randn(100, 512, generator=generator)
    weight.main_grad, weight.grad_added_to_main_grad = expected.clone(), False
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        fused_embedding_gradient._Rows.apply(weight, ids).backward(dout)
    finally:
        torch.set_num_threads(threads)
    for row, of_token in zip(ids.tolist(), dout.float(), strict=True):
        expected[row] += of_token
    assert torch.equal(weight.main_grad, expected)


@pytest.mark.parametrize(
    "change",
    [
        {"shared": True},
        {"main_grad": torch.zeros(VOCABULARY, HIDDEN, dtype=torch.bfloat16)},
        {"__fsdp_param__": True},
        {"gradient_accumulation_fusion": False},
        {"deterministic_mode": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_stays_upstreams(change: dict[str, Any]) -> None:
    options = {k: v for k, v in change.items() if k.endswith(("fusion", "mode"))}
    with one_rank(fused_embedding_gradient=True):
        module = embedding(**options)
        for name, value in change.items():
            setattr(module.weight, name, value)
        assert summed(module, each_once())[2] is False


def test_hooks_of_the_gradient_are_heard() -> None:
    """As a program freezes the tokens that a vocabulary had before it was extended."""
    for wanted in ({}, {"fused_embedding_gradient": True}):
        with one_rank(**wanted):
            module = embedding()
            before = module.weight.main_grad.clone()
            module.weight.register_hook(torch.zeros_like)
            assert torch.equal(summed(module, each_once())[1], before)


def test_what_else_the_weight_is_used_for_has_its_gradient() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = embedding(torch.float32)
            self.weight = self.lookup.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.lookup(ids) + self.weight.pow(2).sum()

    found = []
    for wanted in ({}, {"fused_embedding_gradient": True}):
        with one_rank(**wanted):
            found.append(summed(Twice(), each_once()))
    assert [of_run[2] for of_run in found] == [False, True]
    torch.testing.assert_close(found[1][1], found[0][1])


def test_a_weight_without_data_parallelism_or_gradient_is_looked_up_as_ever() -> None:
    with one_rank(fused_embedding_gradient=True):
        module = embedding()
        with torch.no_grad():
            assert module(each_once()).grad_fn is None
        module.weight.requires_grad_(False)
        assert not module(each_once()).requires_grad
        bare = embedding()
        del bare.weight.main_grad
        bare(each_once()).sum().backward()
        assert bare.weight.grad.abs().sum() > 0


def test_the_sums_of_data_parallelism_that_reduces_while_it_computes() -> None:
    """Its hooks run: every bucket is reduced, and the norm of all gradients is upstream's."""
    norms = []
    for on in (True, False):
        with one_rank(fused_embedding_gradient=on, gradient_accumulation_fusion=on):
            from megatron.core.distributed import (
                DistributedDataParallel,
                DistributedDataParallelConfig,
            )
            from megatron.core.transformer import TransformerConfig

            config = TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=1)
            module = embedding()
            del module.weight.main_grad, module.weight.grad_added_to_main_grad
            options = DistributedDataParallelConfig(
                overlap_grad_reduce=True, grad_reduce_in_fp32=True
            )
            parallel = DistributedDataParallel(config, options, module)
            parallel.zero_grad_buffer()
            parallel(each_once()).float().sin().sum().backward()
            parallel.finish_grad_sync()
            assert module.weight.grad_added_to_main_grad is on
            assert module.weight.grad is None
            norms.append(module.weight.main_grad.norm())
    assert norms[0] == norms[1] > 0


def tied_gradient() -> tuple[Tensor, set[torch.layout]]:
    """The `main_grad` of a weight that looks words up and gives their logits, after two micro-batches, and
    the layouts of what autograd had for it beside."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    module = embedding()
    weight = module.weight
    weight.zero_out_wgrad = True  # as Megatron's models mark it
    output = ColumnParallelLinear(
        *(HIDDEN, VOCABULARY),
        config=ModelParallelConfig(params_dtype=torch.bfloat16, gradient_accumulation_fusion=True),
        init_method=torch.nn.init.normal_,
        bias=False,
        skip_weight_param_allocation=True,
    )
    layouts = set()

    def added(parameter: Any) -> None:  # as data parallelism does it
        layouts.add(parameter.grad.layout)
        parameter.main_grad.add_(parameter.grad.data)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(added)
    for seed in range(2):
        logits, _ = output(module(each_once()), weight=weight)
        dout = torch.randn(logits.shape, generator=torch.Generator().manual_seed(seed))
        logits.backward(dout.to(logits.dtype))
    return weight.main_grad, layouts


def check_tied() -> None:
    with one_rank():
        expected, of_upstream = tied_gradient()
    with one_rank(fused_embedding_gradient=True):
        alone, beside_zeros = tied_gradient()
    with one_rank(fused_embedding_gradient=True, fused_weight_gradient=True):
        found, of_ours = tied_gradient()
    assert of_upstream == beside_zeros == {torch.strided}
    assert of_ours == {torch.sparse_coo}
    assert torch.equal(alone, expected), "each word is looked up once"
    # the same products of bf16 numbers, summed in fp32 in orders of their own
    bound = 40 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_a_weight_that_the_output_layer_shares_has_the_gradients_of_both(version: str) -> None:
    run_on(version, check_tied)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"gradient_accumulation_fusion": True}, None),
        ({"gradient_accumulation_fusion": False}, "--no-gradient-accumulation-fusion"),
    ],
)
def test_idle_where_no_call_could_be_served(
    args: dict[str, Any] | None, reason: str | None
) -> None:
    given = None if args is None else SimpleNamespace(**args)
    found = fused_embedding_gradient.FEATURE.idle(Context("cpu", "0.19.2", given))
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("num_ids", [1, 7, 500])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_sums_of_ids_are_those_of_the_embeddings_gradient(num_ids: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, num_ids, (300,), generator=generator, dtype=dtype)
    rows = torch.randn(300, 16, generator=generator).bfloat16()
    sums, their_ids = fused_embedding_gradient.summed_by_id(rows, ids)
    expected = torch.ops.aten.embedding_dense_backward(rows, ids.long(), num_ids, -1, False)
    assert torch.equal(torch.zeros_like(expected).index_add_(0, their_ids, sums), expected)
    there = len(ids.unique())
    assert torch.equal(their_ids[:there], ids.unique())
    assert not sums[there:].any()
    assert not their_ids[there:].any()


def check_served() -> None:
    with one_rank(fused_embedding_gradient=True):
        assert summed(embedding(), each_once())[2] is True


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_every_version_is_served(version: str) -> None:
    run_on(version, check_served)


def test_embeddings_from_before_it_was_on_stay_upstreams(caplog: pytest.LogCaptureFixture) -> None:
    with one_rank():
        module = embedding()
    log_once.cache_clear()
    with one_rank(fused_embedding_gradient=True), caplog.at_level("WARNING", logger="accel"):
        assert summed(module, each_once())[2] is False
    assert "built before accel was on" in caplog.text
