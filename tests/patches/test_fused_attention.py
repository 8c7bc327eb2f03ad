"""The attention kernel at Megatron's seam: who is served, and that the numbers are upstream's."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import accel
from accel.feature import Context
from accel.log import log_once
from accel.ops import _attention_backends
from accel.patches import context_parallel, fused_attention
from accel.patches.fused_attention import accept_backends, choose_backend
from accel.testing.tolerance import assert_close_to_baseline
from accel.upstream import SUPPORTED_MEGATRON
from tests.ops.contract import needs_native
from tests.versions import run_on

HEADS, GROUPS, WIDTH = 4, 2, 16

pytestmark = needs_native


@pytest.fixture
def megatron() -> Iterator[None]:
    """As much of Megatron's global state as its attention needs, on one rank."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    accel.enable(preset="exact")
    parallel_state._set_global_memory_buffer()
    tracker = random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add(random._MODEL_PARALLEL_RNG_TRACKER_NAME, 1234)
    yield
    tracker.reset()
    parallel_state.destroy_global_memory_buffer()
    accel.disable()


def build(mask_type: str = "causal", layer_number: int = 1, **options: Any) -> torch.nn.Module:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    options = {"attention_dropout": 0.0, "bf16": True, **options}
    config = TransformerConfig(
        num_layers=4,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        **options,
    )
    return DotProductAttention(
        config,
        layer_number,
        AttnMaskType[mask_type],
        "self",
        pg_collection=SimpleNamespace(tp=SimpleNamespace(size=lambda: 1)),
    )


def qkv(
    queries: int, keys: int | None = None, batch: int = 2, dtype=torch.bfloat16
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(queries, HEADS), *[(keys or queries, GROUPS)] * 2]
    return [
        torch.randn(n, batch, h, WIDTH, generator=generator).to(dtype).requires_grad_()
        for n, h in shapes
    ]


def results(module: torch.nn.Module, tensors: list[Tensor], *args: Any, **kwargs: Any):
    """The result, and the gradients of the tensors and of an offset; recomputed, the module is a function."""
    out = module(*tensors, *args, **kwargs)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(6)).to(out.dtype)
    leaves = [*tensors, *(module.parameters() if isinstance(module, torch.nn.Module) else [])]
    for t in leaves:
        t.grad = None
    out.backward(dout)  # Megatron's recomputation refuses torch.autograd.grad
    return [out.detach(), *(t.grad for t in leaves)]


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "attention" in r.message]


@pytest.fixture(autouse=True)
def said(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    caplog.set_level(logging.WARNING, logger="accel")


def causal_mask(size: int) -> Tensor:
    return torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)


CASES = {
    "causal": ("causal", None, {}),
    "causal mask": ("causal", causal_mask(37), {}),
    "causal mask of each sequence": ("padding", causal_mask(37).repeat(2, 1, 1, 1), {}),
    "no mask": ("no_mask", None, {}),
    "a mask that hides nothing": ("padding", torch.zeros(2, 1, 1, 37, dtype=torch.bool), {}),
    "window": ("causal", None, {"window_size": (9, 0)}),
    "window on both sides": ("causal", None, {"window_size": (9, 4)}),
    "query-key layer scaling": ("causal", None, {"apply_query_key_layer_scaling": True}),
    "softmax in fp32": ("causal", None, {"attention_softmax_in_fp32": True}),
    "softmax off by one": ("causal", None, {"softmax_type": "off-by-one"}),
    "attention sinks": ("causal", None, {"softmax_type": "learnable", "window_size": (9, 0)}),
    "one layer in two has a window": (
        "causal",
        None,
        {"window_size": (9, 0), "window_attn_skip_freq": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_served_with_upstreams_numbers(case: str, megatron: None, caplog: Any) -> None:
    mask_type, mask, options = CASES[case]
    for layer_number in (1, 2):
        module = build(mask_type, layer_number, **options)
        fp64 = build(mask_type, layer_number, **{**options, "bf16": False})
        tensors = qkv(37)
        fp64.double().load_state_dict(module.state_dict())
        stock = results(module, tensors, mask)
        exact = results(fp64, [t.detach().double().requires_grad_() for t in tensors], mask)
        accel.enable(preset="exact", fused_attention=True)
        fused = results(module, tensors, mask)
        accel.enable(preset="exact")
        for i, values in enumerate(zip(fused, stock, exact, strict=True)):
            assert_close_to_baseline(*values, name=f"{case}: {i}", roundings=2)
        assert not torch.equal(fused[1], stock[1]), "upstream's own path ran"
    assert fallbacks(caplog) == []


REFUSED = {
    "a padding mask": ("padding", torch.rand(2, 1, 37, 37) > 0.5, {}, "attention mask of its own"),
    "a causal mask with one more": (
        "causal",
        causal_mask(37).index_fill(-1, torch.tensor([3]), True),
        {},
        "attention mask of its own",
    ),
    "padding_causal": ("padding_causal", None, {}, "padding_causal without packed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_upstreams_and_says_so_once(
    case: str, megatron: None, caplog: Any
) -> None:
    mask_type, mask, options, reason = REFUSED[case]
    module = build(mask_type, **options)
    stock = results(module, qkv(37), mask)
    accel.enable(preset="exact", fused_attention=True)
    for _ in range(2):
        for ours, theirs in zip(results(module, qkv(37), mask), stock, strict=True):
            assert torch.equal(ours, theirs)
    (line,) = fallbacks(caplog)
    assert reason in line


def test_unfused_backend_is_upstreams(megatron: None, caplog: Any) -> None:
    from megatron.core.transformer.enums import AttnBackend

    module = build(attention_backend=AttnBackend.unfused)
    stock = results(module, qkv(37), None)
    accel.enable(preset="exact", fused_attention=True)
    for ours, theirs in zip(results(module, qkv(37), None), stock, strict=True):
        assert torch.equal(ours, theirs)
    assert fallbacks(caplog) == []


def test_packed_sequences_are_their_sequences(megatron: None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = [5, 0, 20, 12]
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    accel.enable(preset="exact", fused_attention=True)
    module = build()
    tensors = [t.detach().squeeze(1).requires_grad_() for t in qkv(37, batch=1)]
    packed = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts, max_seqlen_q=20
    )
    out = module(*tensors, None, packed_seq_params=packed)
    assert out.shape == (37, HEADS * WIDTH)
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        alone = module(*(t[begin:end, None] for t in tensors), None)
        assert torch.equal(out[begin:end], alone[:, 0])


def test_every_causal_kind_of_a_pack_is_causal(megatron: None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    starts = torch.tensor([0, 20, 37]).int()
    accel.enable(preset="exact", fused_attention=True)
    module = build()
    tensors = [t.detach().squeeze(1) for t in qkv(37, batch=1)]
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    by_kind = {
        kind: module(*tensors, None, attn_mask_type=kind, packed_seq_params=packed)
        for kind in (AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.no_mask)
    }
    assert torch.equal(by_kind[AttnMaskType.causal_bottom_right], by_kind[AttnMaskType.causal])
    assert not torch.equal(by_kind[AttnMaskType.no_mask], by_kind[AttnMaskType.causal])


def test_padding_between_packed_sequences(megatron: None) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    plain, padded = torch.tensor([0, 5, 14]), torch.tensor([0, 8, 24])
    accel.enable(preset="exact", fused_attention=True)
    module = build()
    tensors = [t.detach().squeeze(1) for t in qkv(24, batch=1)]
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=plain,
        cu_seqlens_kv=plain,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )
    out = module(*tensors, None, packed_seq_params=packed)
    for begin, length in ((0, 5), (8, 9)):
        alone = module(*(t[begin : begin + length, None] for t in tensors), None)
        assert torch.equal(out[begin : begin + length], alone[:, 0])
    with pytest.raises(ValueError, match="padding between them need a causal mask"):
        module(*tensors, None, attn_mask_type=AttnMaskType.no_mask, packed_seq_params=packed)
    packed.cu_seqlens_kv = torch.tensor([0, 3, 12])
    with pytest.raises(ValueError, match="as many keys as queries in each"):
        module(*tensors, None, packed_seq_params=packed)
    packed.cu_seqlens_q_padded = packed.cu_seqlens_kv_padded = None
    with pytest.raises(
        ValueError, match=r"context parallelism: .* as many keys as queries in each"
    ):
        context_parallel._starts(packed, causal=True)
    packed.cu_seqlens_kv = plain.clone()
    assert torch.equal(context_parallel._starts(packed, causal=True), plain)


def test_queries_after_a_cache_see_it_whole(megatron: None) -> None:
    """Upstream refuses more than one; with the whole sequence as queries the last rows are the same."""
    accel.enable(preset="exact", fused_attention=True)
    module = build()
    query, key, value = (t.detach() for t in qkv(37))
    whole = module(query, key, value, None)
    for cached in (30, 36):
        last = module(query[cached:], key, value, None)
        torch.testing.assert_close(last, whole[cached:])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_follows_the_tracker_and_is_replayed(
    sequence_parallel: bool, megatron: None
) -> None:
    from megatron.core.tensor_parallel import checkpoint
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    accel.enable(preset="exact", fused_attention=True)
    parallel = {"sequence_parallel": True, "tensor_model_parallel_size": 2}
    module = build(attention_dropout=0.3, **(parallel if sequence_parallel else {}))
    states = get_cuda_rng_tracker().get_states(), torch.get_rng_state()

    def rewind() -> None:
        get_cuda_rng_tracker().set_states({k: v.clone() for k, v in states[0].items()})
        torch.set_rng_state(states[1])

    states = ({k: v.clone() for k, v in states[0].items()}, states[1])
    plain = results(module, qkv(37), None)
    again = results(module, qkv(37), None)
    assert not torch.equal(plain[0], again[0]), "each call drops something else"
    moved = not torch.equal(torch.get_rng_state(), states[1])
    assert moved == sequence_parallel, "the draw came from the other stream"
    rewind()
    recomputed = results(
        lambda *tensors: checkpoint(lambda *t: module(*t, None), False, *tensors), qkv(37)
    )
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)
    module.eval()
    assert torch.equal(results(module, qkv(37), None)[0], results(module, qkv(37), None)[0])


def test_dropout_keeps_the_mean(megatron: None) -> None:
    accel.enable(preset="exact", fused_attention=True)
    module = build(attention_dropout=0.5)
    tensors = [t.detach() for t in qkv(8, batch=256, dtype=torch.float32)]
    tensors[2].fill_(1.0)
    mean = module(*tensors, None).mean().item()  # of independent sums whose variance is at most 1
    assert abs(mean - 1) < 5 / (8 * 256 * HEADS) ** 0.5


def of_device(device: str = "cpu", **args: Any) -> Context:
    return Context(device, "0.19.2", argparse.Namespace(**args))


@pytest.mark.parametrize("device", ["cpu", "cuda", "npu"])
def test_backends_that_upstreams_validator_refuses(device: str) -> None:
    from megatron.core.transformer.enums import AttnBackend

    for spec in (None, ["some.module", "some_spec"]):
        local = of_device(device, attention_backend=AttnBackend.local, spec=spec)
        assert len(accept_backends(local)) == 1
        assert local.args.attention_backend is AttnBackend.auto
    for spec, backend in ((["local"], AttnBackend.local), (None, AttnBackend.flash)):
        asked = of_device(device, attention_backend=backend, spec=spec)
        assert accept_backends(asked) == []
        assert asked.args.attention_backend is backend
    strict = of_device(device, deterministic_mode=True, use_flash_attn=True)
    assert len(accept_backends(strict)) == (device == "cpu")
    assert strict.args.use_flash_attn == (device != "cpu")


def test_transformer_engines_layers_have_no_local_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.transformer.enums import AttnBackend

    monkeypatch.setattr(fused_attention, "te_installed", lambda: True)
    for device, impl, backend in (
        ("cuda", "transformer_engine", AttnBackend.local),
        ("cuda", "inference_optimized", AttnBackend.local),
        ("cuda", "local", AttnBackend.auto),
        ("cpu", "transformer_engine", AttnBackend.auto),
    ):
        asked = of_device(device, attention_backend=AttnBackend.local, transformer_impl=impl)
        accept_backends(asked)
        assert asked.args.attention_backend is backend


def check_local_backend() -> None:
    """Megatron's own validator takes the flag on a GPU once accel has seen it, and not before."""
    import os

    import megatron.core
    from megatron.core.transformer.enums import AttnBackend

    accel.enable(preset="off", device="cpu")  # CUDA's calls of the validator have somewhere to go
    from megatron.training.arguments import add_megatron_arguments, validate_args

    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --train-iters 1 "
        "--max-position-embeddings 16 --micro-batch-size 1 --lr 1e-3 --mock-data --vocab-size 99 "
        "--tokenizer-type NullTokenizer --transformer-impl local --attention-backend local"
    )
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    validate = getattr(validate_args, "__wrapped__", validate_args)

    def parsed() -> argparse.Namespace:
        parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
        args = parser.parse_args(flags.split())
        args.rank, args.world_size = 0, 1
        return args

    try:
        with pytest.raises(TypeError, match="NoneType"):
            validate(parsed(), {})
        args = parsed()
        accept_backends(Context("cuda", megatron.core.__version__, args))
        validate(args, {})
        assert args.attention_backend is AttnBackend.auto
    finally:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        accel.disable()


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_a_gpu_takes_the_local_backend(version: str) -> None:
    run_on(version, check_local_backend)


def test_unfused_shows_in_the_table() -> None:
    from megatron.core.transformer.enums import AttnBackend

    args = argparse.Namespace(attention_backend=AttnBackend.unfused)
    assert "unfused" in (fused_attention.FEATURE.idle(Context("cpu", "0.19.2", args)) or "")
    args.attention_backend = AttnBackend.flash
    assert fused_attention.FEATURE.idle(Context("cpu", "0.19.2", args)) is None
    assert fused_attention.FEATURE.unavailable(Context("cuda", "0.19.2", args)) is None


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """With cuDNN, PyTorch's FlashAttention-2 and no package."""
    monkeypatch.delenv("ACCEL_ATTENTION_BACKEND", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    absent = dict.fromkeys(("flash4", "flash3", "flash2"), "no")
    monkeypatch.setattr(_attention_backends, "_missing", absent.get)


LLAMA = {
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "kv_channels": None,
    "group_query_attention": True,
    "num_query_groups": 8,
    "attention_dropout": 0.0,
    "seq_length": 8192,
    "bf16": True,
}
NO_PACKAGE = "not flash4: no; not flash3: no"


def notes(**args: Any) -> list[str]:
    begin = "attention on CUDA, "
    found = choose_backend(Context("cuda", "0.19.2", argparse.Namespace(**args)))
    assert all(note.startswith(begin) for note in found)
    return [note.removeprefix(begin) for note in found]


def test_the_table_names_an_example_where_there_is_no_model(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = "an example, causal, bfloat16, 32 heads over 8 of 128, no dropout: "
    assert notes() == [f"{example}cudnn ({NO_PACKAGE})"]
    (note,) = choose_backend(Context("cuda", "0.19.2"))
    assert note == f"attention on CUDA, {example}cudnn ({NO_PACKAGE})"
    assert notes(accel_preset="off") == []
    monkeypatch.setenv("ACCEL_ATTENTION_BACKEND", "fastest")
    assert notes(accel_preset="off") == []
    with pytest.raises(
        ValueError, match="ACCEL_ATTENTION_BACKEND='fastest': use one of auto, flash4"
    ):
        notes()


PLANNED: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "causal, bfloat16, 32 heads over 8 of 128, no dropout: cudnn ({no})"),
    "Megatron's default dropout": (
        {"attention_dropout": 0.1},
        "causal, bfloat16, 32 heads over 8 of 128, dropout 0.1 while training: triton (not flash4: dropout "
        "(its mask is not the op's); not flash3: dropout (its mask is not the op's); not cudnn: dropout "
        "(its mask is not the op's))",
    ),
    "fp16, ranks": (
        {"bf16": False, "fp16": True, "tensor_model_parallel_size": 4},
        "causal, float16, 8 heads over 2 of 128, no dropout: cudnn ({no})",
    ),
    "more ranks than groups, and no groups": (
        {"group_query_attention": False, "num_query_groups": 1, "tensor_model_parallel_size": 8},
        "causal, bfloat16, 4 heads over 4 of 128, no dropout: cudnn ({no})",
    ),
    "fp32": (
        {"bf16": False},
        "causal, float32, 32 heads over 8 of 128, no dropout: triton (not flash4: torch.float32 (it takes "
        "bfloat16 and float16); not flash3: torch.float32 (it takes bfloat16 and float16); not cudnn: "
        "torch.float32 (it takes bfloat16 and float16))",
    ),
    "wide heads": (
        {"kv_channels": 256},
        "causal, bfloat16, 32 heads over 8 of 256, no dropout: triton ({no}; not cudnn: rows of 256 and 256)",
    ),
    "MLA": (
        {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128},
        "causal, bfloat16, 32 heads over 32 of 192 and 128, no dropout: cudnn ({no})",
    ),
    "MLA of other sizes": (
        {"multi_latent_attention": True, "qk_head_dim": 64, "v_head_dim": 64},
        "causal, bfloat16, 32 heads over 32 of 128 and 64, no dropout: "
        "cudnn (not flash4: no; not flash3: rows of 128 and 64)",
    ),
    "a window": (
        {"window_size": (1024, 0)},
        "a window of 1024 and 0 keys (-1 for all), bfloat16, 32 heads over 8 of 128, no dropout: "
        "triton (not flash4: a window on sm_90; not flash3: no; not cudnn: a window)",
    ),
    "a window that hides nothing more": (
        {"window_size": (8192, 0)},
        "causal, bfloat16, 32 heads over 8 of 128, no dropout: cudnn ({no})",
    ),
    "packs": (
        {"sft": True},
        "causal, bfloat16, 32 heads over 8 of 128, no dropout, packs of up to 16 sequences: "
        "triton (not flash4: a pack of sequences on sm_90; not flash3: no; not cudnn: a pack of sequences)",
    ),
    "documents": (
        {"dataloader_inter_document_masking": True},
        "causal, bfloat16, 32 heads over 8 of 128, no dropout, packs of up to 16 sequences: "
        "triton (not flash4: a pack of sequences on sm_90; not flash3: no; not cudnn: a pack of sequences)",
    ),
    "deterministic": (
        {"deterministic_mode": True},
        "causal, bfloat16, 32 heads over 8 of 128, no dropout, deterministic: triton (not flash4: "
        "torch.use_deterministic_algorithms on sm_90; not flash3: no; not cudnn: "
        "torch.use_deterministic_algorithms)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANNED)
def test_the_table_names_the_kernel_of_the_model(case: str, hopper: None) -> None:
    args, line = PLANNED[case]
    assert notes(**{**LLAMA, **args}) == [line.format(no=NO_PACKAGE)]


@pytest.mark.parametrize(
    ("every", "kinds"),
    [
        (None, ["a window"]),
        (2, ["a window", "causal"]),
        (1, ["causal"]),
        ([1, 1], ["a window"]),
        ([1, 0, 1], ["a window", "causal"]),
    ],
)
def test_layers_with_a_window_and_those_without_have_a_line_each(
    every: Any, kinds: list[str], hopper: None
) -> None:
    found = notes(**LLAMA, window_size=(1024, 0), window_attn_skip_freq=every)
    assert len(found) == len(kinds)
    assert all(note.startswith(kind) for note, kind in zip(found, kinds, strict=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"window_size": (128,)},
        {"attention_dropout": "1e-1"},
        {"tensor_model_parallel_size": 0},
        {"num_attention_heads": "32"},
    ],
    ids=str,
)
def test_what_upstream_has_still_to_refuse_is_an_example(
    changes: dict[str, Any], hopper: None
) -> None:
    (note,) = notes(**{**LLAMA, **changes})
    assert note.startswith("an example, causal, bfloat16, 32 heads over 8 of 128")


def test_a_model_of_a_yaml_file_is_found_before_it_is_validated(hopper: None) -> None:
    of_model = {name: value for name, value in LLAMA.items() if name != "group_query_attention"}
    args = {
        "language_model": SimpleNamespace(**{**of_model, "bf16": None, "seq_length": None}),
        "model_parallel": SimpleNamespace(bf16=True, tensor_model_parallel_size=2),
        "seq_length": 4096,
    }
    assert notes(**args) == [
        f"causal, bfloat16, 16 heads over 4 of 128, no dropout: cudnn ({NO_PACKAGE})"
    ]


def test_the_table_names_no_kernel_of_what_others_compute(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.enums import AttnBackend

    assert notes(**LLAMA, attention_backend=AttnBackend.unfused) == []
    assert notes(**LLAMA, context_parallel_size=2) == [], "calls of parts of sequences"
    assert len(notes(**LLAMA, context_parallel_size=1, softmax_type="learnable")) == 1
    te = {**LLAMA, "transformer_impl": "transformer_engine"}
    assert len(notes(**te)) == 1, "by accel's layers"
    monkeypatch.setattr(fused_attention, "te_installed", lambda: True)
    assert notes(**te) == []
    assert len(notes(**{**te, "transformer_impl": "local"})) == 1
