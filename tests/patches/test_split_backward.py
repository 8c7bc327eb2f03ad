"""Megatron's models in its data parallelism: backward passes in two parts, the weights' some micro-batches
late, give the main gradients of whole ones, to the bit."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import accel
from accel import patching
from accel.parallel.split_backward import WeightPart, input_part
from accel.patches import _linear, _split_backward

from .moe_layer import one_rank

VOCABULARY, SEQUENCE, BATCH, HIDDEN, LAYERS, EXPERTS = 24, 6, 2, 16, 2, 3
ITERATIONS, MICRO_BATCHES, LAG = 2, 4, 2

MOE = {
    "num_moe_experts": EXPERTS,
    "moe_router_topk": EXPERTS,  # no expert without tokens, whose layers run in another way
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
DENSE = 4 * LAYERS + 1
SPARSE = (2 + 2 * EXPERTS) * LAYERS + 1

MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "local": ({}, DENSE),
    "local, tied": ({"tied": True}, DENSE + 1),  # and the embedding's gradient
    "local, fp32": ({"dtype": torch.float32}, DENSE),
    "local, recomputed": (RECOMPUTE, DENSE),
    "sequential experts": (MOE, SPARSE),
    "grouped experts": ({"grouped_gemm": True, **MOE}, SPARSE),
    "te": ({"te": True}, DENSE),
    "te, tied, recomputed": ({"te": True, "tied": True, **RECOMPUTE}, DENSE + 1),
    "te, grouped experts": ({"te": True, **MOE, "moe_grouped_gemm": True}, SPARSE),
}
"""How a model is built, and how many gradients a backward pass of it leaves for later."""


def build(
    *,
    fusion: bool,
    overlap: bool,
    te: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    **options: Any,
) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        hidden_dropout=0.1,
        attention_dropout=0.0,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        gradient_accumulation_fusion=fusion,
        **options,
    )
    experts = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
    }
    make = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec
        if te
        else gpt_layer_specs.get_gpt_layer_local_spec
    )
    model = GPTModel(
        config,
        make(**experts),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=tied,
    )
    data_parallel = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=overlap, bucket_size=2000
    )
    return DistributedDataParallel(config, data_parallel, model.to(dtype))


def losses(model: Any) -> Iterator[Tensor]:
    draw = torch.Generator().manual_seed(2)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    for _ in range(MICRO_BATCHES):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=draw)
        yield model(tokens, positions, mask, labels=tokens.roll(-1, 1)).mean()


def whole(model: Any, sync: Callable[[int], Any]) -> list[int]:
    for number, loss in enumerate(losses(model)):
        with sync(number):
            loss.backward()
    return []


def split(model: Any, sync: Callable[[int], Any]) -> list[int]:
    """Returns how much each input part left for later."""
    left: list[int] = []
    waiting: deque[tuple[int, WeightPart]] = deque()

    def compute() -> None:
        number, part = waiting.popleft()
        with sync(number):
            part.compute()

    for number, loss in enumerate(losses(model)):
        with sync(number), input_part() as part:
            loss.backward()
        left.append(len(part))
        waiting.append((number, part))
        if len(waiting) > LAG:
            compute()
    while waiting:
        compute()
    return left


def train(model: Any, run: Callable[..., list[int]]) -> tuple[list[Tensor], list[Counter], Any]:
    """Main gradients and how often each was ready, of each iteration; and what `run` returned."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    names = {parameter: name for name, parameter in model.named_parameters()}
    register = _ParamAndGradBucketGroup.register_grad_ready
    found, counts, result = [], [], None

    @functools.wraps(register)
    def counted(self: Any, parameter: Tensor, *args: Any) -> None:
        counts[-1][names[parameter]] += self.is_last_microbatch
        register(self, parameter, *args)

    def sync(number: int) -> Any:
        last = number == MICRO_BATCHES - 1
        return contextlib.nullcontext() if last else model.no_sync()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_ParamAndGradBucketGroup, "register_grad_ready", counted)
        for _ in range(ITERATIONS):
            counts.append(Counter())
            model.zero_grad_buffer()
            result = run(model, sync)
            model.finish_grad_sync()
            assert all(p.grad is None for p in model.parameters())
            found += [p.main_grad.clone() for p in model.parameters()]
    return found, counts, result


@contextlib.contextmanager
def split_schedule() -> Iterator[None]:
    undo = _linear.switch_on()
    try:
        with patching.apply([_linear.LINEAR, _split_backward.HOOK]):
            yield
    finally:
        undo()


@pytest.mark.parametrize("fusion", [False, True], ids=["", "fusion"])
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
@pytest.mark.parametrize("name", MODELS)
# In a process of their own: a model with experts, and so its forty groups, is not let go before its end, and
# each group has three threads that wake a hundred times a second.
@pytest.mark.distributed(world_size=1)
def test_main_gradients_are_those_of_whole_backward_passes(
    name: str, overlap: bool, fusion: bool
) -> None:
    given, put_off = MODELS[name]
    options = dict(given)
    features = {
        "gradient_accumulation_fusion": True,
        "grouped_gemm": options.pop("grouped_gemm", False),
    }
    found = []
    for run in (whole, split):
        with one_rank("off", **features):
            schedule = split_schedule() if run is split else contextlib.nullcontext()
            with schedule:
                torch.manual_seed(1)
                model = build(fusion=fusion, overlap=overlap, **options)
                found.append(train(model, run))
    (expected, expected_ready, _), (gradients, ready, left) = found
    assert left == [put_off] * MICRO_BATCHES
    names = [n for n, _ in model.named_parameters()]
    assert all(g.any() for g in expected)
    differ = {
        n for n, a, b in zip(names * ITERATIONS, expected, gradients, strict=True) if not a.equal(b)
    }
    assert not differ
    assert ready == expected_ready
    assert ready == [Counter(names if overlap else ())] * ITERATIONS


def run_linear(split_it: bool, sequence: bool, fusion: bool) -> list[Tensor]:
    """Both of Megatron's linear layers, on this rank's part: outputs, input's and weights' gradients."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        sequence_parallel=sequence,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=fusion,
        params_dtype=torch.bfloat16,
    )
    common = {"config": config, "init_method": torch.nn.init.normal_, "bias": True}
    column = tensor_parallel.ColumnParallelLinear(HIDDEN, 4 * HIDDEN, **common)
    row = tensor_parallel.RowParallelLinear(
        4 * HIDDEN, HIDDEN, input_is_parallel=True, skip_bias_add=False, **common
    )
    weights = [column.weight, row.weight]
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape)
    x = torch.randn(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    y = row(column(x)[0])[0]
    dy = torch.randn(y.shape, dtype=y.dtype)
    if split_it:
        with input_part() as part:
            y.backward(dy)
        assert len(part) == 2
        part.compute()
    else:
        y.backward(dy)
    gradients = [w.main_grad if fusion else w.grad for w in weights]
    return [y, x.grad, column.bias.grad, row.bias.grad, *gradients]


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize("fusion", [False, True], ids=["", "fusion"])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp2", "tp2_sp"])
def test_layers_of_several_ranks_compute_what_stocks_do(sequence: bool, fusion: bool) -> None:
    """One group of ranks: the gather of a column layer's input is a part of the weights' part."""
    accel.enable(preset="off", gradient_accumulation_fusion=True)
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl")
    try:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        found = []
        for split_it in (False, True):
            torch.manual_seed(1)
            model_parallel_cuda_manual_seed(1)
            with split_schedule() if split_it else contextlib.nullcontext():
                found.append(run_linear(split_it, sequence, fusion))
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        accel.disable()
    assert all(map(torch.equal, *found))


def test_what_a_call_asks_for_decides_who_serves_it() -> None:
    calls: list[int] = []

    def linear_with_grad(
        input, weight, bias, gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel,
        grad_output_buffer=None, wgrad_deferral_limit=0, tp_group=None, gtp_remat_size=1,
    ):  # fmt: skip
        calls.append(1)
        return input @ weight.t()

    wrapped = _linear.through_ours(linear_with_grad)
    x, weight = torch.randn(3, 5), torch.randn(4, 5, requires_grad=True)

    def ours(weight: Tensor = weight, **options: Any) -> bool:
        calls.clear()
        y = wrapped(x, weight, None, False, False, False, **options)
        assert torch.equal(y, x @ weight.t())
        return not calls

    assert not ours(), "while no split schedule trains"
    undo = _linear.switch_on()
    try:
        assert ours()
        assert ours(grad_output_buffer=None, wgrad_deferral_limit=None, gtp_remat_size=1)
        assert not ours(gtp_remat_size=2)
        assert not ours(weight.detach())
        with torch.autocast("cpu", torch.bfloat16, enabled=True):
            calls.clear()
            wrapped(x, weight, None, False, False, False)
        assert calls
    finally:
        undo()
    assert not ours()
