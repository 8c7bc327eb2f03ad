"""Attention: see `OpContract`. Here: masks, packs, dropout, layouts, bad input."""

import logging
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accel.log import log_once
from accel.ops import attention, attention_ref
from accel.ops.attention import (
    QUERIES_AT_ONCE,
    attention_gradients,
    dropout_mask_ref,
    largest_scores,
    unsupported_reason,
)
from tests.ops.contract import Inputs, OpContract, change_layout, needs_native, run

SEED = torch.tensor(-(2**62) - 12345)


def finite(op):
    """The op, with the lse of queries that see no key set to 0: minus infinity has no error."""

    def call(*tensors: Tensor, **options) -> tuple[Tensor, Tensor]:
        out, lse = op(*tensors, **options)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return call


def qkv(
    queries: int,
    keys: int,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    width: int = 24,
    value_width: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (queries, batch, heads, width),
        (keys, batch, kv_heads, width),
        (keys, batch, kv_heads, width if value_width is None else value_width),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


class TestAttention(OpContract):
    op = staticmethod(finite(attention))
    ref = staticmethod(finite(attention_ref))
    # fp32 computes in the dtype of its result, and a rounding of a score s is s roundings of e^s: where
    # rows are narrow, scores here are as large as 14; a key's gradient adds up as many as 256 terms, whose
    # random roundings make some 16 more. bf16 and fp16: delta is the product with an output that was rounded.
    roundings = {torch.float32: 24, torch.bfloat16: 2, torch.float16: 2}

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """Ragged ends of queries, keys, heads; a causal mask; dropout in one of three."""
        options: dict = {"causal": True}
        if seed == 1:
            options = {"window": (30, 7), "softmax_scale": 0.3}
        if seed == 2:
            options |= {"dropout": 0.2, "seed": SEED}
        return Inputs(qkv(101, 147, dtype=dtype, value_width=40, seed=seed), options)

    def large_inputs(self) -> Inputs:
        tensors = qkv(700, 1300, heads=6, width=64, dtype=torch.bfloat16)
        return Inputs(tensors, {"causal": True, "dropout": 0.1, "seed": SEED})

    def magnitudes(self, inputs: Inputs) -> dict[str, float]:
        """ds = p (dp - delta): what cancels in dq and dk is as large as delta times k or q.

        Of delta, a sum of E products of random signs, the root of the sum of squares. The sum of the values
        has the rounding of the largest of them, and the logarithm of a sum that of a score: for few queries
        either may happen to be small itself.
        """
        q, k, v = (t.float() for t in inputs.tensors[:3])
        if not q.numel() or not k.numel():
            return {}
        scale = inputs.options.get("softmax_scale") or 1 / math.sqrt(q.shape[-1])
        delta = scale * math.sqrt(v.shape[-1]) * v.abs().max().item()
        scores = scale * q.norm(dim=-1).max().item() * k.norm(dim=-1).max().item()
        return {
            "output 1": max(1.0, scores),
            **({"output 0": v.abs().max().item()} if q.numel() <= 256 else {}),
            "gradient 0": delta * k.abs().max().item(),
            "gradient 1": delta * q.abs().max().item(),
        }

    def opchecks(self):
        q, k, v = (t.requires_grad_() for t in qkv(9, 11, dtype=torch.bfloat16))
        fwd, bwd = torch.ops.accel.attention_fwd.default, torch.ops.accel.attention_bwd.default
        yield fwd, (q, k, v, None, None, SEED, 0.2, 3, 0, 0.1)
        pack = [t.detach()[:, 0].clone().requires_grad_() for t in (q, k, v)]
        cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 11, 11])
        yield fwd, (*pack, cu_q, cu_k, None, 0.2, -1, -1, 0.0)
        q, k, v = (t.detach() for t in (q, k, v))
        out, lse = fwd(q, k, v, None, None, None, 0.2, -1, 0, 0.0)
        yield bwd, (torch.randn_like(out), q, k, v, out, lse, None, None, None, 0.2, -1, 0, 0.0)


def with_offset(op):
    def call(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, **options) -> tuple[Tensor, Tensor]:
        return op(q, k, v, offset=offset, **options)

    return call


def add_offset(inputs: Inputs) -> Inputs:
    """As a model has it: in the dtype of q, of which the kernels know nothing."""
    q = inputs.tensors[0]
    return inputs._replace(tensors=[*inputs.tensors, torch.linspace(-1, 2, q.shape[-2]).to(q)])


class TestAttentionWithAnOffset(TestAttention):
    op = staticmethod(with_offset(TestAttention.op))
    ref = staticmethod(with_offset(TestAttention.ref))

    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        return add_offset(super().inputs(dtype, seed))

    def large_inputs(self) -> Inputs:
        return add_offset(super().large_inputs())


CASE, CASE_WITH_OFFSET = TestAttention(), TestAttentionWithAnOffset()
SIZES = st.sampled_from([0, 1, 2, 13, 31, 32, 64, 67, 131, 200])


@st.composite
def masks(draw) -> dict:
    options: dict = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        sides = st.sampled_from([-1, 0, 1, 20, 500])
        options["window"] = (draw(sides), draw(sides))
    if draw(st.booleans()):
        options |= {"dropout": draw(st.sampled_from([0.1, 0.5])), "seed": SEED}
    return options


@needs_native
@settings(deadline=None, max_examples=100)
@given(
    queries=SIZES,
    keys=SIZES,
    batch=st.sampled_from([1, 2]),
    heads=st.sampled_from([(1, 1), (4, 1), (6, 3), (2, 2)]),
    widths=st.sampled_from([(1, 1), (16, 16), (31, 40), (64, 64), (96, 32)]),
    dtype=st.sampled_from(CASE.dtypes),
    layout=st.sampled_from(["contiguous", "transposed", "strided", "offset"]),
    options=masks(),
)
def test_any_shape_mask_and_layout(queries, keys, batch, heads, widths, dtype, layout, options):
    tensors = qkv(queries, keys, batch, *heads, *widths, dtype=dtype)
    CASE.check(Inputs([change_layout(t, layout) for t in tensors], options))


@needs_native
def test_each_sequence_has_its_own_seed():
    tensors = qkv(6, 8, batch=2)
    seed = torch.tensor([[1, 0, 0, 0, 0], [2, 0, 0, 0, 0]])
    (out, _), grads = run(attention, Inputs(tensors, {"dropout": 0.5, "seed": seed}))
    (expected, _), wanted = run(attention_ref, Inputs(tensors, {"dropout": 0.5, "seed": seed}))
    torch.testing.assert_close(out, expected)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, wanted[name])
    one = attention(*tensors, dropout=0.5, seed=seed[:1, :1].flatten())[0]
    assert torch.equal(one[:, 0], out[:, 0])
    assert not torch.equal(one[:, 1], out[:, 1])


@needs_native
def test_seeds_of_no_sequence():
    none = torch.empty(0, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="for each of the 1 sequences"):
        attention(*qkv(6, 8, batch=1), dropout=0.1, seed=none)
    pack = [t[:, 0] for t in qkv(6, 8, batch=1)]
    starts = torch.zeros(1, dtype=torch.int32)
    out, _ = attention(*pack, cu_seqlens_q=starts, cu_seqlens_k=starts, dropout=0.1, seed=none)
    assert not out.any()


@needs_native
def test_gradients_of_nothing_are_0():
    q, k, v = qkv(5, 7)
    _, grads = run(attention, Inputs([q, k, v[..., :0]]))
    assert [g.any().item() for g in grads.values()] == [False] * 3


@needs_native
def test_no_batch():
    (out, lse), grads = run(attention, Inputs(qkv(5, 7, batch=0)))
    assert (out.shape, lse.shape) == ((5, 0, 4, 24), (0, 4, 5))
    assert [g.shape for g in grads.values()] == [t.shape for t in qkv(5, 7, batch=0)]


@st.composite
def packs(draw) -> tuple[list[int], list[int]]:
    sizes = st.sampled_from([0, 1, 5, 32, 70, 150])
    queries = draw(st.lists(sizes, min_size=1, max_size=4))
    same = draw(st.booleans())
    return queries, queries if same else [draw(sizes) for _ in queries]


def starts(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


@needs_native
@settings(deadline=None, max_examples=50)
@given(lengths=packs(), padding=st.sampled_from([0, 3]), options=masks())
def test_pack_is_its_sequences_one_by_one(lengths, padding, options):
    options.pop("dropout", None)  # a sequence of its own is number 0, and drops what that drops
    pack = [
        t[:, 0]
        for t in qkv(sum(lengths[0]) + padding, sum(lengths[1]), 1, dtype=torch.bfloat16, seed=3)
    ]
    whole = Inputs(
        pack, options | {"cu_seqlens_q": starts(lengths[0]), "cu_seqlens_k": starts(lengths[1])}
    )
    (out, lse), grads = run(attention, whole)
    assert not out[sum(lengths[0]) :].any()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    at_q = at_k = 0
    for num_q, num_k in zip(*lengths, strict=True):
        queries, keys = slice(at_q, at_q + num_q), slice(at_k, at_k + num_k)
        at_q, at_k = at_q + num_q, at_k + num_k
        leaves = [
            pack[i][rows][:, None].clone().requires_grad_()
            for i, rows in enumerate((queries, keys, keys))
        ]
        alone, alone_lse = attention(*leaves, **options)
        assert torch.equal(alone[:, 0], out[queries])
        assert torch.equal(alone_lse[0], lse[:, queries])
        alone_grads = torch.autograd.grad(alone, leaves, dout[queries][:, None])
        for i, rows in enumerate((queries, keys, keys)):
            assert torch.equal(alone_grads[i][:, 0], grads[i][rows])


@needs_native
def test_pack_with_dropout_matches_reference():
    lengths = [70, 0, 33]
    tensors = [t[:, 0] for t in qkv(103, 103, 1, dtype=torch.bfloat16)]
    cu = starts(lengths, torch.int64)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "dropout": 0.3, "seed": SEED, "causal": True}
    CASE.check(Inputs(tensors, options))


@needs_native
@pytest.mark.parametrize("dtype", CASE.dtypes)
def test_lse_is_as_exact_as_fp32_sums(dtype):
    q, k, v = qkv(67, 300, width=64, dtype=dtype)
    _, lse = attention(q, k, v, causal=True)
    _, exact = attention_ref(q.double(), k.double(), v.double(), causal=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=16 * 2**-24 * exact.abs().max())


def test_reference_is_pytorchs():
    q, k, v = qkv(50, 50, heads=4, kv_heads=4)
    ours = attention_ref(q, k, v, causal=True)[0].permute(1, 2, 0, 3)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True
    )
    torch.testing.assert_close(ours, theirs)


@needs_native
def test_masks_are_aligned_with_the_last_key():
    """2 queries after a cache of 3 keys, by hand: uniform scores, so out counts the keys seen."""
    q, k = torch.zeros(2, 1, 1, 8), torch.zeros(5, 1, 1, 8)
    v = torch.eye(5).view(5, 1, 1, 5)

    def seen(**options) -> list[list[int]]:
        return (attention(q, k, v, **options)[0][:, 0, 0] > 0).int().tolist()

    assert seen() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert seen(causal=True) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen(causal=True, window=(2, 0)) == [[0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]
    assert seen(window=(0, 1)) == [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1]]


@needs_native
def test_a_query_that_sees_no_key_gives_zero():
    q, k, v = (t.requires_grad_() for t in qkv(5, 2, kv_heads=4))
    out, lse = attention(q, k, v, causal=True)
    assert not out[:3].any()
    assert out[3:].all()
    assert (lse[..., :3] == -torch.inf).all()
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert not dq[:3].any()
    assert dk.isfinite().all()
    assert dv.isfinite().all()


@needs_native
@pytest.mark.parametrize("op", [attention, attention_ref])
def test_a_query_that_sees_the_offset_alone(op):
    q, k, v = (t.requires_grad_() for t in qkv(5, 2, kv_heads=4))
    offset = torch.linspace(-1, 2, 4).requires_grad_()
    out, lse = op(q, k, v, causal=True, offset=offset)
    assert not out[:3].any()
    assert torch.equal(lse[..., :3], offset.detach()[:, None].expand(2, 4, 3))
    dq, dk, dv, of_offset = torch.autograd.grad(out.sum(), (q, k, v, offset))
    assert not dq[:3].any()
    for grad in (dq[3:], dk, dv, of_offset):
        assert grad.isfinite().all()
        assert grad.any()


@needs_native
@settings(deadline=None, max_examples=25)
@given(lengths=packs(), padding=st.sampled_from([0, 3]), options=masks())
def test_a_pack_with_an_offset_matches_reference(lengths, padding, options):
    tokens = sum(lengths[0]) + padding, sum(lengths[1])
    pack = [t[:, 0] for t in qkv(*tokens, 1, seed=3)]
    options |= {f"cu_seqlens_{name}": starts(n) for name, n in zip("qk", lengths, strict=True)}
    CASE_WITH_OFFSET.check(add_offset(Inputs(pack, options)))


@pytest.mark.parametrize(
    "mask", [{}, {"causal": True}, {"causal": True, "window": (3, 0)}, {"window": (0, 2)}], ids=str
)
@pytest.mark.parametrize("queries", [7, QUERIES_AT_ONCE + 5])
def test_the_largest_scores_of_each_head_are_of_the_keys_that_queries_see(queries, mask):
    """Each value is the number of a key, so that the probabilities' places say which were seen."""
    q, k, _ = qkv(queries, queries + 3, dtype=torch.float64)
    v = torch.eye(len(k), dtype=torch.float64)[:, None, None].repeat(1, *k.shape[1:3], 1)
    seen = attention_ref(q, k, v, **mask)[0] > 0
    heads = q.shape[2] // k.shape[2]
    scores = torch.einsum("qbhd,kbhd->qbhk", q, k.repeat_interleave(heads, 2)) / q.shape[-1] ** 0.5
    expected = scores.masked_fill(~seen, -torch.inf).amax((0, 1, 3))
    torch.testing.assert_close(largest_scores(q, k, **mask), expected.float())


@settings(deadline=None, max_examples=40)
@given(lengths=packs(), padding=st.sampled_from([0, 3]), mask=masks())
def test_the_largest_scores_of_a_pack_are_those_of_its_sequences(lengths, padding, mask):
    """Tokens behind the last sequence would have the largest of all."""
    mask = {name: mask[name] for name in ("causal", "window") if name in mask}
    q, k, _ = (
        t[:, 0] for t in qkv(sum(lengths[0]) + padding, sum(lengths[1]) + padding, 1, seed=3)
    )
    begin_q, begin_k = map(starts, lengths)
    for rows, begin in ((q, begin_q), (k, begin_k)):
        rows[begin[-1] :] = 100.0
    found = largest_scores(q, k, **mask, cu_seqlens_q=begin_q, cu_seqlens_k=begin_k)
    expected = torch.full_like(found, -torch.inf)
    for (of_q, until_q), (of_k, until_k) in zip(
        begin_q.unfold(0, 2, 1), begin_k.unfold(0, 2, 1), strict=True
    ):
        alone = largest_scores(q[of_q:until_q, None], k[of_k:until_k, None], **mask)
        expected = torch.maximum(expected, alone)
    torch.testing.assert_close(found, expected)


@needs_native
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_visible(bad):
    q, k, v = qkv(40, 40, dtype=torch.bfloat16)
    k[17, 1, 0, 3] = bad
    got, want = (op(q, k, v, causal=True)[0] for op in (attention, attention_ref))
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())


def test_dropout_drops_what_it_says():
    keep = dropout_mask_ref(SEED, 0.25, 0, 3, 100, 200)
    torch.testing.assert_close(keep.unique(), torch.tensor([0.0, 4 / 3]))
    sigma = math.sqrt(0.25 * 0.75 / keep.numel())
    assert abs((keep == 0).float().mean().item() - 0.25) < 5 * sigma
    for other in (
        dropout_mask_ref(SEED + 1, 0.25, 0, 3, 100, 200),
        dropout_mask_ref(SEED, 0.25, 1, 3, 100, 200),
        keep.roll(1, 0),
        keep.roll(1, 1),
        keep.roll(1, 2),
    ):
        agree = (other == keep).float().mean().item()  # 0.25^2 + 0.75^2 if independent
        assert abs(agree - 0.625) < 5 * math.sqrt(0.625 * 0.375 / keep.numel())


def test_random_bits_are_philox():
    """The known answers of Random123's kat_vectors for philox4x32-10 with a counter of zeros."""
    words = []
    for threshold_word in range(4):
        # The bits of a word by bisection on the dropout probability: one query for each word.
        low, high = 0, 2**32
        while high - low > 1:
            middle = (low + high) // 2
            keep = dropout_mask_ref(torch.tensor(0), middle / 2**32, 0, 1, 64, 1)
            low, high = (middle, high) if keep[0, 16 * threshold_word, 0] else (low, middle)
        words.append(low)
    assert words == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@needs_native
def test_dropout_of_nearly_all_does_not_wrap_to_none():
    """The threshold of 32 bits rounds to 2^32."""
    inputs = Inputs(qkv(70, 80), {"dropout": 1 - 2**-40, "seed": SEED})
    assert not attention(*inputs.tensors, **inputs.options)[0].any()
    CASE.check(inputs)


@needs_native
@pytest.mark.parametrize("case", [CASE, CASE_WITH_OFFSET], ids=["plain", "offset"])
def test_needs_no_tensor_of_queries_by_keys(case):
    inputs = Inputs(qkv(4096, 4096, 1, 2, 2, 32, dtype=torch.bfloat16), {"causal": True})
    inputs = add_offset(inputs) if case is CASE_WITH_OFFSET else inputs
    torch.ops.accel._host_memory_install()
    try:
        torch.ops.accel._host_memory_reset_peak()
        before = torch.ops.accel._host_memory_stats()[0]
        run(case.op, inputs)
        peak = torch.ops.accel._host_memory_stats()[1] - before
    finally:
        torch.ops.accel._host_memory_uninstall()
    assert peak < 4096 * 4096  # bytes, for 2 heads of 4096 x 4096 scores


@needs_native
def test_second_derivative_is_an_error():
    q, k, v = (t.requires_grad_() for t in qkv(3, 3))
    (dq,) = torch.autograd.grad(attention(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="attention_bwd has no derivative"):
        dq.sum().backward()


def changed(**replaced: Tensor) -> list[Tensor]:
    named = dict(zip("qkv", qkv(6, 8), strict=True)) | replaced
    return [named[name] for name in "qkv"]


CU = torch.tensor([0, 3])


@pytest.mark.parametrize(
    ("tensors", "options", "message"),
    [
        (changed(q=torch.ones(6, 4, 24)), {}, r"q must have shape \[S, B, heads, D\], got"),
        (changed(k=torch.ones(8, 2, 2, 24).half()), {}, "k must be .*float32, got torch.float16"),
        (changed(q=torch.ones(6, 2, 4, 24).int()), {}, "q must be floating"),
        (changed(v=torch.ones(8, 2, 2, 24, device="meta")), {}, "v must be on cpu .* got meta"),
        (changed(k=torch.ones(8, 2, 2, 23)), {}, r"do not fit together: .*23"),
        (changed(v=torch.ones(7, 2, 2, 24)), {}, r"do not fit together: .*7"),
        (changed(q=torch.ones(6, 3, 4, 24)), {}, r"do not fit together: .*3"),
        (changed(q=torch.ones(6, 2, 3, 24)), {}, "multiple of those of k, got 3 and 2"),
        (changed(), {"window": (3, -2)}, r"window must be .* got \(3, -2\)"),
        (changed(), {"dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        (changed(), {"dropout": 0.1}, "dropout needs a seed, one int64 or 5, got None"),
        (changed(), {"cu_seqlens_q": CU}, "go together, got one"),
        (changed(), {"cu_seqlens_q": CU, "cu_seqlens_k": CU}, r"\[T, heads, D\] with cu_seqlens"),
        (
            changed(),
            {"dropout": 0.1, "seed": SEED.to("meta")},
            "seed must be on the cpu .* got meta",
        ),
        (changed(), {"offset": torch.ones(3)}, r"offset must be floating \[4\] on cpu .* \[3\]"),
        (changed(), {"offset": torch.ones(4).int()}, "offset must be floating .* torch.int32"),
        (changed(), {"offset": torch.ones(4, device="meta")}, "offset must be .* on meta"),
    ],
)
def test_rejects(tensors, options, message):
    with pytest.raises(ValueError, match=message):
        attention(*tensors, **options)


@needs_native
@pytest.mark.parametrize("change", [{}, {"dtype": torch.float64}, {"softmax_scale": -1.0}], ids=str)
@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [
        ([0, 7], [0, 8], "cu_seqlens_q must rise from 0 to at most 6"),
        ([0, 6], [0, 9], "cu_seqlens_k must rise from 0 to at most 8"),
        ([0, 4, 3], [0, 4, 8], "cu_seqlens_q must rise"),
        ([1, 6], [0, 8], "cu_seqlens_q must rise from 0"),
        ([0, 6], [0, -1], "cu_seqlens_k must rise"),
        ([0, 6], [0, 4, 8], "as long, got 2 and 3"),
        ([], [], r"must have shape \[sequences \+ 1\]"),
        ([[0, 6]], [[0, 8]], r"cu_seqlens_q must have shape \[sequences \+ 1\], got \[1, 2\]"),
        ([0, 6], [[0], [8]], r"cu_seqlens_k must have shape \[sequences \+ 1\], got \[2, 1\]"),
    ],
)
def test_rejects_a_pack_outside_its_tensors(cu_q, cu_k, message, change):
    """By the kernel and by the reference, forward and, of what is given for it, backward."""
    options = dict(change)
    q, k, v = (t[:, 0] for t in qkv(6, 8, dtype=options.pop("dtype", torch.float32)))
    for name, cu in (("cu_seqlens_q", cu_q), ("cu_seqlens_k", cu_k)):
        options[name] = torch.tensor(cu, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, **options)
    lse = torch.zeros(4, 6, dtype=torch.promote_types(q.dtype, torch.float32))
    with pytest.raises(ValueError, match=message):
        attention_gradients(q, q, k, v, q, lse, **options)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
def test_rejects_a_pack_told_elsewhere(name):
    q, k, v = (t[:, 0] for t in qkv(6, 8))
    options = {"cu_seqlens_q": torch.tensor([0, 6]), "cu_seqlens_k": torch.tensor([0, 8])}
    options[name] = options[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must be on the cpu like q, got meta"):
        attention(q, k, v, **options)


@needs_native
@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("out", [2, 6, 4, 24], torch.float32),  # as many numbers, of other rows
        ("out", [6, 2, 4, 24], torch.bfloat16),
        ("dout", [2, 6, 4, 24], torch.float32),
        ("dout", [6, 2, 4], torch.float32),
        ("lse", [6, 2, 4], torch.float32),
        ("lse", [2, 4, 6], torch.bfloat16),
    ],
)
def test_rejects_results_of_another_attention(name, shape, dtype):
    q, k, v = (torch.randn(6, 2, heads, 24) for heads in (4, 1, 1))
    given = {"dout": torch.randn_like(q), "out": torch.randn_like(q), "lse": torch.randn(2, 4, 6)}
    given[name] = torch.randn(shape).to(dtype)
    wanted = [2, 4, 6] if name == "lse" else [6, 2, 4, 24]
    message = rf"{name} must be torch.float32 {re.escape(str(wanted))} on cpu, got {dtype}"
    with pytest.raises(ValueError, match=message):
        attention_gradients(given["dout"], q, k, v, given["out"], given["lse"])
    dout, out, lse = given.values()
    with pytest.raises(ValueError, match="do not fit q"):
        torch.ops.accel.attention_bwd(dout, q, k, v, out, lse, None, None, None, 1.0, -1, -1, 0.0)


@needs_native
@pytest.mark.parametrize("window", [(-2, 0), (0, -2)])
def test_kernel_checks_the_window_again(window):
    with pytest.raises(
        ValueError, match=rf"window must be >= -1 .* got {window[0]} and {window[1]}"
    ):
        torch.ops.accel.attention_fwd(*qkv(6, 8), None, None, None, 1.0, *window, 0.0)


@pytest.mark.parametrize(
    ("dtype", "widest"),
    [(torch.float32, 256), (torch.bfloat16, 512), (torch.float16, 512)],
    ids=str,
)
def test_rows_that_fit_no_block_of_a_gpu_are_refused(dtype, widest):
    def reason(device, *widths):
        return unsupported_reason(
            *(torch.empty(1, 1, 1, w, dtype=dtype, device=device) for w in widths)
        )

    said = f"rows of 64 and {widest + 1} {dtype} (the CUDA kernels take up to {widest})"
    with FakeTensorMode():
        assert reason("cuda", 64, widest + 1) == said
        assert "rows of" in reason("cuda", widest + 1, 64)
        assert "rows of" not in (reason("cuda", widest, widest) or "")
        assert "rows of" not in (reason("cpu", widest + 1, widest + 1) or "")


def test_falls_back_and_says_so_once(caplog):
    q, k, v = (t.double() for t in qkv(5, 5))
    assert "float64" in unsupported_reason(q, v)
    assert "softmax_scale -1.0" in unsupported_reason(q.float(), v.float(), -1.0)
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            assert torch.equal(attention(q, k, v)[0], attention_ref(q, k, v)[0])
    assert len(caplog.records) == 1


def test_expanded_heads_and_batches_are_read_in_place():
    q, k, v = qkv(20, 20, batch=1, kv_heads=1)
    wide = [t.expand(-1, 3, -1, -1) for t in (q, k, v)]
    out, _ = attention(*wide, causal=True)
    assert torch.equal(out[:, 2], attention(q, k, v, causal=True)[0][:, 0])
