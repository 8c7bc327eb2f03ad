"""`DotProductAttention`: each mask and layout against the same sums written out in fp64."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from accel import ops
from accel.layers import attention as layers
from accel.layers.attention import HIDDEN, DotProductAttention, mask_kind
from accel.parallel.context import ContextGroups
from accel.testing.tolerance import assert_close_to_baseline
from tests.ops.contract import needs_native

S, B, H, G, D = 9, 2, 4, 2, 16


def qkv(num_queries: int = S, num_keys: int = S) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((num_queries, B, H, D), (num_keys, B, G, D), (num_keys, B, G, D))
    return [torch.randn(size, generator=generator) for size in sizes]


def layer(**options: object) -> DotProductAttention:
    return DotProductAttention(H, D, num_gqa_groups=G, **options)


def written_out(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    k, v = (t.repeat_interleave(H // G, dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q, k) / D**0.5
    if bias is not None:
        scores = scores + bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, HIDDEN)
    return torch.einsum("bhqk,kbhd->qbhd", scores.softmax(-1), v).flatten(-2)


def upper(num_queries: int, num_keys: int, shift: int = 0) -> Tensor:
    return torch.arange(num_keys) > torch.arange(num_queries)[:, None] + shift


PADDING = torch.zeros(B, 1, 1, S, dtype=torch.bool)
PADDING[1, ..., 6:] = True
OWN = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(1)) < 0.3
OWN[..., 0] = False

CASES = {
    "causal": ({"attn_mask_type": "causal"}, None, upper(S, S)),
    "no_mask": ({"attn_mask_type": "no_mask"}, None, None),
    "no_mask_ignores_one": ({"attn_mask_type": "no_mask"}, OWN, None),
    "padding": ({"attn_mask_type": "padding"}, PADDING, PADDING),
    "padding_causal": ({"attn_mask_type": "padding_causal"}, PADDING, PADDING | upper(S, S)),
    "padding_of_both": ({"attn_mask_type": "padding"}, (PADDING, PADDING), PADDING),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, OWN, OWN),
    "arbitrary_that_is_causal": ({"attn_mask_type": "arbitrary"}, upper(S, S), upper(S, S)),
    "window": (
        {"attn_mask_type": "causal", "window_size": (3, 0)},
        None,
        upper(S, S) | (torch.arange(S) < torch.arange(S)[:, None] - 3),
    ),
    "window_and_own": (
        {"attn_mask_type": "arbitrary", "window_size": (3, -1)},
        OWN,
        OWN | (torch.arange(S) < torch.arange(S)[:, None] - 3),
    ),
}


@pytest.mark.parametrize("kernel", [False, True], ids=["plain", "op"])
@pytest.mark.parametrize("case", CASES)
def test_masks(case: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "attention", ops.attention if kernel else None)
    options, mask, hidden = CASES[case]
    tensors = [t.requires_grad_() for t in qkv()]
    out = layer(**options)(*tensors, mask)
    grads = torch.autograd.grad(out.square().sum(), tensors)
    for dtype in (torch.float32, torch.float64):
        plain = [t.detach().to(dtype).requires_grad_() for t in tensors]
        y = written_out(*plain, hidden)
        same = [y, *torch.autograd.grad(y.square().sum(), plain)]
        if dtype == torch.float32:
            baseline = same
    for name, ours, base, exact in zip("oqkv", (out, *grads), baseline, same, strict=True):
        assert_close_to_baseline(
            ours.detach(), base.detach(), exact.detach(), name=name, roundings=8
        )


@pytest.mark.parametrize(
    ("kind", "num_queries", "shift"),
    [
        ("causal", 4, 0),
        ("causal_bottom_right", 4, S - 4),
        ("padding_causal_bottom_right", 4, S - 4),
    ],
)
def test_causal_masks_of_fewer_queries(kind: str, num_queries: int, shift: int) -> None:
    q, k, v = qkv(num_queries)
    out = layer(attn_mask_type=kind)(q, k, v)
    torch.testing.assert_close(out, written_out(q, k, v, upper(num_queries, S, shift)))


def test_bias_is_added_after_the_scale() -> None:
    q, k, v = qkv()
    bias = torch.randn(1, H, S, S)
    out = layer()(q, k, v, core_attention_bias_type="post_scale_bias", core_attention_bias=bias)
    torch.testing.assert_close(out, written_out(q, k, v, upper(S, S), bias))


@pytest.mark.parametrize("kind", ["alibi", "pre_scale_bias"])
def test_biases_of_other_kinds_are_refused(kind: str) -> None:
    bias = torch.randn(1, H, S, S)
    with pytest.raises(NotImplementedError, match=f"core_attention_bias_type='{kind}'"):
        layer()(*qkv(), core_attention_bias_type=kind, core_attention_bias=bias)


def test_a_bias_that_is_not_there_or_of_a_pack_is_an_error() -> None:
    with pytest.raises(ValueError, match="give core_attention_bias"):
        layer()(*qkv(), core_attention_bias_type="post_scale_bias")
    starts = torch.tensor([0, 4, S], dtype=torch.int32)
    with pytest.raises(ValueError, match="packed sequences have none"):
        layer()(
            *(t[:, 0] for t in qkv()),
            qkv_format="thd",
            cu_seqlens_q=starts,
            cu_seqlens_kv=starts,
            core_attention_bias_type="post_scale_bias",
            core_attention_bias=torch.randn(1, H, S, S),
        )


def test_bshd_is_sbhd_transposed() -> None:
    q, k, v = qkv()
    out = layer()(*(t.transpose(0, 1) for t in (q, k, v)), qkv_format="bshd")
    assert torch.equal(out.transpose(0, 1), layer()(q, k, v))


def test_a_pack_is_its_sequences() -> None:
    q, k, v = (t[:, 0] for t in qkv())
    starts = torch.tensor([0, 4, S], dtype=torch.int32)
    out = layer()(
        *(q, k, v),
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        attn_mask_type="padding_causal",
    )
    parts = [layer()(*(t[a:b, None] for t in (q, k, v))) for a, b in ((0, 4), (4, S))]
    torch.testing.assert_close(out, torch.cat(parts)[:, 0])


def test_dropout_is_off_in_eval_and_repeats_with_the_random_state() -> None:
    tensors = qkv()
    module = layer(attention_dropout=0.5)
    torch.manual_seed(3)
    first = module(*tensors)
    torch.manual_seed(3)
    assert torch.equal(module(*tensors), first)
    assert not torch.equal(module.eval()(*tensors), first)
    assert torch.equal(module(*tensors), layer()(*tensors))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"attn_mask_type": "diagonal"}, ValueError, "diagonal"),
        ({"tp_size": 3}, ValueError, "no multiple of tp_size=3"),
        ({"softmax_type": "sink"}, ValueError, "softmax_type='sink': use one of vanilla"),
        ({"cp_group": [], "cp_comm_type": "p2p"}, ValueError, "0 context-parallel groups"),
        ({"num_splits": 2}, NotImplementedError, "num_splits"),
        ({"window_size": 16}, ValueError, "window_size=16: give"),
    ],
)
def test_what_it_cannot_do_is_named(options: dict, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        layer(**options)


def test_arbitrary_without_a_mask_is_an_error() -> None:
    one = layer(attn_mask_type="arbitrary")
    with pytest.raises(ValueError, match="needs an attention_mask"):
        one(*qkv())
    starts = torch.tensor([0, S], dtype=torch.int32)
    for mask in (None, OWN):
        with pytest.raises(
            ValueError, match="with packed sequences, which have no mask of their own"
        ):
            one(
                *(t[:, 0] for t in qkv()),
                mask,
                qkv_format="thd",
                cu_seqlens_q=starts,
                cu_seqlens_kv=starts,
            )
    one.context_groups = ContextGroups(heads=None, keys=None, ring=True)
    with pytest.raises(ValueError, match=r"context parallelism: .*'arbitrary'.*'causal' or 'no_"):
        one(*qkv())


def test_masks_of_inference_mode() -> None:
    with torch.inference_mode():
        mask = upper(5, 5).clone()
    assert mask.is_inference()
    assert mask_kind(mask, 5, 5) == "causal"
    assert not layers._KINDS.knows(mask, about=(5, 5))


def test_masks_are_looked_at_once_and_again_when_they_change() -> None:
    mask = upper(600, 600)[None, None]
    assert mask_kind(mask, 600, 600) == "causal"
    assert layers._KINDS.knows(mask, about=(600, 600))
    mask[0, 0, 599, 0] = True
    assert not layers._KINDS.knows(mask, about=(600, 600))
    assert mask_kind(mask, 600, 600) == "other"
    assert mask_kind(mask.fill_(False), 600, 600) == "none"
    assert mask_kind(upper(5, 5), 3, 5) == "other"
    before = len(layers._KINDS)
    del mask
    assert len(layers._KINDS) < before


def test_a_mask_in_a_cuda_graph_is_taken_for_none_in_particular(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mask = upper(6, 6)
    assert mask_kind(mask, 6, 6) == "causal"
    monkeypatch.setattr(layers, "is_capturing", lambda device: True)
    assert mask_kind(mask, 6, 6) == "causal"
    mask.copy_(upper(6, 6))  # as a loader does that fills one buffer again and again
    assert mask_kind(mask, 6, 6) == "other"
    assert "a CUDA graph holds an attention mask" in caplog.text


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_softmax_with_an_offset_has_one_more_key_of_value_0(softmax_type: str) -> None:
    q, k, v = qkv()
    attend = layer(softmax_type=softmax_type)
    offset = torch.linspace(-1, 2, H)
    if softmax_type == "learnable":
        assert list(attend.state_dict()) == ["softmax_offset", "_extra_state"]
        with torch.no_grad():
            attend.softmax_offset.copy_(offset)
    else:
        assert list(attend.state_dict()) == ["_extra_state"]
        offset = torch.zeros(H)
    keys, values = (t.double().repeat_interleave(H // G, dim=2) for t in (k, v))
    scores = torch.einsum("qbhd,kbhd->bhqk", q.double(), keys) / D**0.5
    weights = scores.masked_fill(upper(S, S), -torch.inf).exp()
    probs = weights / (weights.sum(-1, keepdim=True) + offset.double().exp().view(-1, 1, 1))
    expected = torch.einsum("bhqk,kbhd->qbhd", probs, values).flatten(-2)
    out = attend(q, k, v, None)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    if softmax_type == "learnable":
        out.sum().backward()
        assert attend.softmax_offset.grad.abs().min() > 0


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_learnable_offset_is_drawn_in_the_ranks_own_stream(sequence_parallel: bool) -> None:
    forks = 0

    class Tracker:
        @contextlib.contextmanager
        def fork(self) -> Iterator[None]:
            nonlocal forks
            forks += 1
            yield

    torch.manual_seed(0)
    options = {"get_rng_state_tracker": Tracker, "sequence_parallel": sequence_parallel}
    offset = layer(softmax_type="learnable", **options).softmax_offset
    torch.manual_seed(0)
    assert torch.equal(offset, torch.empty(H).normal_(0, 0.023))
    assert forks == 1


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_an_offset_of_a_layer_that_was_made_without_memory(softmax_type: str) -> None:
    with torch.device("meta"):
        attend = layer(softmax_type=softmax_type)
    attend.to_empty(device="cpu")
    torch.manual_seed(0)
    attend.reset_parameters()
    torch.manual_seed(0)
    expected = layer(softmax_type=softmax_type)
    assert torch.equal(attend(*qkv(), None), expected(*qkv(), None))


def test_the_largest_logit_of_each_head() -> None:
    q, k, v = qkv()
    out, largest = layer(return_max_logit=True)(q, k, v, None)
    keys = k.repeat_interleave(H // G, dim=2)
    scores = (torch.einsum("qbhd,kbhd->bhqk", q, keys) / D**0.5).masked_fill(upper(S, S), HIDDEN)
    torch.testing.assert_close(largest, scores.amax((0, 2, 3)))
    torch.testing.assert_close(out, written_out(q, k, v, upper(S, S)))


def test_a_learnable_offset_is_made_on_the_gpu_that_the_tracker_forks(monkeypatch) -> None:
    assert layers._device().type == "cpu"
    with torch.device("meta"):
        assert layers._device().type == "meta"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert layers._device() == torch.device("cuda", 1)
    with torch.device("meta"):
        assert layers._device().type == "meta"


PACK = (slice(0, 3), slice(3, S))


def test_the_largest_logit_of_a_pack_is_that_of_its_sequences() -> None:
    starts = torch.tensor([0, 3, S], dtype=torch.int32)
    q, k, v = (t[:, 0] for t in qkv())
    attend = layer(qkv_format="thd", return_max_logit=True)
    out, largest = attend(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    alone = [layer(return_max_logit=True)(*(t[at, None] for t in (q, k, v)), None) for at in PACK]
    torch.testing.assert_close(out, torch.cat([each[:, 0] for each, _ in alone]))
    torch.testing.assert_close(largest, torch.stack([of_head for _, of_head in alone]).amax(0))


@needs_native
@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("window", [None, (3, 0)])
def test_offset_and_largest_logit_are_the_kernels_too(
    softmax_type: str, window: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = layer(softmax_type=softmax_type, return_max_logit=True, window_size=window)
    plain = [t.detach() for t in attend(*qkv(), None)]
    monkeypatch.setattr(layers, "attention", ops.attention)
    monkeypatch.setattr(attend, "_plain", None)
    for found, expected in zip(attend(*qkv(), None), plain, strict=True):
        torch.testing.assert_close(found, expected)


@needs_native
@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
@pytest.mark.parametrize("fused", [False, True])
def test_packs_with_an_offset_are_their_sequences(
    softmax_type: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "attention", ops.attention if fused else None)
    starts = torch.tensor([0, 3, S], dtype=torch.int32)
    q, k, v = (t[:, :1] for t in qkv())
    attend = layer(softmax_type=softmax_type)
    out = attend(
        *(t[:, 0] for t in (q, k, v)),
        qkv_format="thd",
        attn_mask_type="padding_causal",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
    )
    for place in (slice(0, 3), slice(3, S)):
        alone = attend(*(t[place] for t in (q, k, v)), None)[:, 0]
        torch.testing.assert_close(out[place], alone)


def test_lengths_of_padded_sequences_are_a_mask() -> None:
    q, k, v = qkv()
    tokens, batch = q.shape[:2]
    lengths = [tokens - 2 - i for i in range(batch)]
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    mask = torch.arange(tokens) >= torch.tensor(lengths)[:, None, None, None]
    one = layer(attn_mask_type="padding")
    by_mask = one(q, k, v, mask)
    assert torch.equal(one(q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts), by_mask)
    with pytest.raises(ValueError, match="'padding' needs an attention_mask, or cu_seqlens"):
        one(q, k, v)


def test_a_window_of_earlier_keys_alone_is_for_causal_masks() -> None:
    q, k, v = qkv()
    assert torch.equal(
        layer(attn_mask_type="no_mask", window_size=(-1, 0))(q, k, v),
        layer(attn_mask_type="no_mask")(q, k, v),
    )


def test_packs_with_more_keys_than_queries_are_no_causal_ones_from_the_top_left() -> None:
    q, k = torch.randn(2, 4, 8), torch.randn(5, 4, 8)
    starts = {
        "cu_seqlens_q": torch.tensor([0, 2], dtype=torch.int32),
        "cu_seqlens_kv": torch.tensor([0, 5], dtype=torch.int32),
    }
    one = DotProductAttention(4, 8, qkv_format="thd", attn_mask_type="padding_causal")
    with pytest.raises(NotImplementedError, match="from the top left for 2 queries and 5 keys"):
        one(q, k, k, **starts)
    one(q, k, k, **starts, attn_mask_type="padding_causal_bottom_right")


def test_scores_of_fp16_are_scaled_before_they_are_rounded() -> None:
    x = torch.full((3, 1, 4, 64), 36.0, dtype=torch.float16)
    mask = torch.tensor([False, False, True]).view(1, 1, 1, 3)
    out = DotProductAttention(4, 64, attn_mask_type="arbitrary")(x, x, x, mask)
    assert torch.equal(out, torch.full_like(out, 36.0))
