"""Attention's Triton kernels: the contract; blocks, widths, packs, dropout and layouts beside it."""

import itertools
import math

import pytest
import torch
import triton.language as tl

from accel._triton import attention as kernels
from accel.ops import _attention_backends, attention, attention_ref
from accel.ops.attention import WIDEST_ROW, attention_gradients, attention_gradients_ref
from tests.ops import test_attention
from tests.ops.contract import Inputs, assert_matches, change_layout, run
from tests.ops.test_attention import SEED, add_offset, finite, qkv, starts, with_offset
from tests.triton.harness import HAS_GPU, OnTriton, kernels_launched, on_device

OP = staticmethod(on_device(finite(attention)))
FORWARD = ["_forward"]
BACKWARD = ["_delta", "_backward_keys", "_backward_queries"]


@pytest.fixture(autouse=True)
def own_kernels(triton_kernels, monkeypatch):
    """accel's own kernel, on a GPU too, and few blocks of fp32, each of which costs the interpreter time."""
    monkeypatch.setenv(_attention_backends.VARIABLE, "triton")
    _attention_backends._chosen.cache_clear()
    if not HAS_GPU:
        monkeypatch.setattr(kernels, "FP32", kernels._Blocks(64, 64, 4, 1))
    yield
    _attention_backends._chosen.cache_clear()


class TestAttention(OnTriton, test_attention.TestAttention):
    def inputs(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """As the op's own, with less of everything: the interpreter takes a millisecond for each line."""
        options: dict = {"causal": True}
        if seed == 1:
            options = {"window": (30, 7), "softmax_scale": 0.3}
        if seed == 2:
            options |= {"dropout": 0.2, "seed": SEED}
        tensors = qkv(67, 81, 1, 2, 1, dtype=dtype, value_width=40, seed=seed)
        return Inputs(tensors, options)

    def opchecks(self):
        """As the op's own, with fewer heads."""
        forward, backward = (
            torch.ops.accel.attention_fwd.default,
            torch.ops.accel.attention_bwd.default,
        )
        leaves = [t.requires_grad_() for t in qkv(9, 11, 1, 2, 1, dtype=torch.bfloat16)]
        yield forward, (*leaves, None, None, SEED, 0.2, 3, 0, 0.1)
        pack = [t.detach()[:, 0].clone().requires_grad_() for t in leaves]
        cu_q, cu_k = torch.tensor([0, 4, 9]), torch.tensor([0, 11, 11])
        yield forward, (*pack, cu_q, cu_k, None, 0.2, -1, -1, 0.0)
        q, k, v = (t.detach() for t in leaves)
        out, lse = forward(q, k, v, None, None, None, 0.2, -1, 0, 0.0)
        yield (
            backward,
            (torch.randn_like(out), q, k, v, out, lse, None, None, None, 0.2, -1, 0, 0.0),
        )


CASE = TestAttention()
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (9, 5)},
    "past": {"window": (20, 0)},
    "left": {"window": (9, -1)},
    "right": {"window": (-1, 3)},
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("sizes", [(32, 32), (33, 47), (16, 50), (50, 16)], ids=str)
def test_masks_at_the_ends_of_blocks(sizes, mask, monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(kernels, "FP32", kernels._Blocks(16, 16, 4, 1))
    CASE.check(Inputs(qkv(*sizes, 1, 1, 1), mask))


@pytest.mark.parametrize("mask", ["full", "causal", "window"])
def test_blocks_wider_than_high(mask, monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(kernels, "FP32", kernels._Blocks(16, 64, 4, 1))
    CASE.check(Inputs(qkv(70, 130, 1, 1, 1), MASKS[mask]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "widths", [(1, 1), (31, 40), (64, 64), (80, 16), (96, 96), (192, 128)], ids=str
)
def test_widths(widths, dtype):
    CASE.check(Inputs(qkv(20, 35, 1, 2, 1, *widths, dtype=dtype), {"causal": True}))


def test_rows_are_cut_into_powers_of_two():
    widths = (1, 16, 24, 64, 80, 96, 128, 160, 192, 224, 256)
    want = [
        (16, 0),
        (16, 0),
        (32, 0),
        (64, 0),
        (64, 16),
        (64, 32),
        (128, 0),
        (128, 32),
        (128, 64),
        (256, 0),
    ]
    assert [kernels._parts_of(w) for w in widths] == [*want, (256, 0)]
    for width in range(1, 300):
        first, second = kernels._parts_of(width)
        assert first + second >= width
        assert all(n == 0 or (n >= 16 and n & n - 1 == 0) for n in (first, second))


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "expanded"])
def test_layouts(layout):
    tensors = [change_layout(t, layout) for t in qkv(20, 20, 2, 2, 1, dtype=torch.bfloat16)]
    CASE.check(Inputs(tensors, {"causal": True}))


def test_reads_in_place_where_rows_are_contiguous():
    q, k, v = (t.transpose(0, 1).contiguous().transpose(0, 1) for t in qkv(9, 9))
    assert all(kernels._with_contiguous_rows(t) is t for t in (q, k, v))
    assert kernels._strides(q) == q.stride()[:3]
    assert kernels._strides(q[:, 0]) == (q.stride(0), 0, q.stride(2))


@pytest.mark.parametrize("dtype", TestAttention.dtypes, ids=str)
def test_an_offset_is_joined_to_the_result(dtype):
    inputs = add_offset(CASE.inputs(dtype, 2))
    assert_matches(
        on_device(with_offset(attention)),
        with_offset(attention_ref),
        inputs,
        roundings=CASE.roundings,
        magnitudes=CASE.magnitudes(inputs),
    )


PACKS = {
    "empty ones": ([20, 0, 7], [0, 11, 7], torch.int32),
    "first is empty": ([0, 40], [0, 70], torch.int64),
    "longer than a block": ([70, 5], [70, 5], torch.int32),
}


@pytest.mark.parametrize("options", [{"causal": True}, {"window": (9, 5)}, {}], ids=str)
@pytest.mark.parametrize("pack", PACKS.values(), ids=PACKS)
def test_pack_is_its_sequences_one_by_one(pack, options):
    """To the bit; and what belongs to no sequence is 0."""
    *lengths, dtype = pack
    padding = 3
    pack = [
        t[:, 0] for t in qkv(sum(lengths[0]) + padding, sum(lengths[1]) + padding, 1, 1, 1, seed=3)
    ]
    cu = [starts(part, dtype) for part in lengths]
    whole = Inputs(pack, options | {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]})
    (out, lse), grads = run(on_device(attention), whole)
    assert not out[sum(lengths[0]) :].any()
    assert (lse[:, sum(lengths[0]) :] == -torch.inf).all()
    for i, part in enumerate((*lengths, lengths[1])):
        assert not grads[i][sum(part) :].any()
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7)).to(out.dtype)
    at_q = at_k = 0
    for num_q, num_k in zip(*lengths, strict=True):
        rows = [slice(at_q, at_q + num_q), *[slice(at_k, at_k + num_k)] * 2]
        at_q, at_k = at_q + num_q, at_k + num_k
        leaves = [pack[i][rows[i]][:, None].clone().requires_grad_() for i in range(3)]
        alone, alone_lse = on_device(attention)(*leaves, **options)
        assert torch.equal(alone[:, 0], out[rows[0]])
        assert torch.equal(alone_lse[0], lse[:, rows[0]])
        for i, g in enumerate(torch.autograd.grad(alone, leaves, dout[rows[0]][:, None])):
            assert torch.equal(g[:, 0], grads[i][rows[i]])


def test_pack_of_no_sequence_reads_no_seed():
    tensors = [t[:, 0] for t in qkv(5, 5, 1, 1, 1)]
    none = torch.zeros(1, dtype=torch.int32)
    options = {"cu_seqlens_q": none, "cu_seqlens_k": none, "dropout": 0.4}
    options["seed"] = torch.empty(0, 5, dtype=torch.int64)
    (out, lse), grads = run(on_device(attention), Inputs(tensors, options))
    assert not any(t.any() for t in (out, *grads.values()))
    assert (lse == -torch.inf).all()


def test_pack_of_more_sequences_than_are_counted_at_once(monkeypatch):
    if not HAS_GPU:  # a kernel that is compiled has it for good
        monkeypatch.setattr(kernels, "SEQUENCES_AT_ONCE", tl.constexpr(8))
    lengths = [1, 0, 2] * (7 if not HAS_GPU else 50)
    assert len(lengths) > kernels.SEQUENCES_AT_ONCE.value
    cu = starts(lengths)
    tensors = [t[:, 0] for t in qkv(sum(lengths), sum(lengths), 1, 1, 1, width=8)]
    CASE.check(Inputs(tensors, {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "causal": True}))


def test_starts_outside_of_the_tensors_are_cut_to_them():
    """They cannot be refused without waiting for the device, but nothing is read out of bounds."""
    tensors = [t[:, 0] for t in qkv(20, 20, 1, 2, 1)]
    wrong, cut = (torch.tensor([0, 9, end], dtype=torch.int32) for end in (1 << 30, 20))
    got = on_device(attention)(*tensors, cu_seqlens_q=wrong, cu_seqlens_k=wrong)
    want = on_device(attention)(*tensors, cu_seqlens_q=cut, cu_seqlens_k=cut)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "places", [[5, 1, 2, 64, 9], [[5, 1, 2, 64, 9], [-7, 3, 1, 128, 0]]], ids=["one", "each"]
)
def test_dropout_of_a_part_is_that_of_the_whole(places):
    options = {"dropout": 0.4, "seed": torch.tensor(places), "causal": True}
    CASE.check(Inputs(qkv(70, 81, 2, 1, 1), options))


def test_pack_with_dropout_matches_reference():
    tensors = [t[:, 0] for t in qkv(103, 103, 1, 2, 1, dtype=torch.bfloat16)]
    cu = starts([70, 0, 33], torch.int64)
    options = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "dropout": 0.3, "seed": SEED, "causal": True}
    CASE.check(Inputs(tensors, options))


def test_dropout_of_nearly_all_does_not_wrap_to_none():
    inputs = Inputs(qkv(40, 40, 1, 1, 1), {"dropout": 1 - 2**-40, "seed": SEED})
    assert not run(on_device(attention), inputs)[0][0].any()


@pytest.mark.parametrize("processors", [1, 2, 1000])
def test_groups_are_split_where_there_are_few_blocks_of_keys(processors, monkeypatch):
    monkeypatch.setattr(kernels, "num_processors", lambda device: processors)
    CASE.check(Inputs(qkv(20, 20, 1, 6, 1, dtype=torch.bfloat16), {"causal": True}))


def test_gradients_of_a_part_of_the_keys_add_up():
    q, k, v = qkv(33, 40, 1, 2, 1)
    out, lse = attention_ref(q, k, v)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    parts = [
        on_device(attention_gradients)(dout, q, k[rows], v[rows], out, lse)
        for rows in (slice(0, 17), slice(17, 40))
    ]
    dq = parts[0][0] + parts[1][0]
    dk, dv = (torch.cat([p[i] for p in parts]) for i in (1, 2))
    want = attention_gradients_ref(dout, q, k, v, out, lse)
    for got, expected in zip((dq, dk, dv), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-5)


def test_lse_is_as_exact_as_fp32_sums():
    q, k, v = qkv(30, 100, 1, width=64, dtype=torch.bfloat16)
    _, lse = on_device(attention)(q, k, v, causal=True)
    _, exact = attention_ref(q.double(), k.double(), v.double(), causal=True)
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=16 * 2**-24 * exact.abs().max())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_stay_visible(bad):
    q, k, v = qkv(40, 40, 1, dtype=torch.bfloat16)
    k[17, 0, 0, 3] = bad
    got = on_device(attention)(q, k, v, causal=True)[0]
    # In fp64: bf16 products of some CPUs make NaN of an infinity.
    want = attention_ref(*(t.double() for t in (q, k, v)), causal=True)[0]
    assert want.isnan().any()
    assert torch.equal(got.isnan(), want.isnan())


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
def test_empty(sizes):
    inputs = Inputs(qkv(*sizes, 1, 2, 1), {"causal": True})
    (out, lse), grads = run(on_device(attention), inputs)
    assert not out.any()
    assert (lse == -torch.inf).all()
    assert not any(g.any() for g in grads.values())
    rest = (None, None, None, 1.0, -1, 0, 0.0)
    arguments = (out, *inputs.tensors, out, lse, *rest)
    assert kernels_launched(lambda: kernels.backward(*arguments)) == []


def test_no_batch():
    (out, lse), grads = run(on_device(attention), Inputs(qkv(5, 7, batch=0)))
    assert (out.shape, lse.shape) == ((5, 0, 4, 24), (0, 4, 5))
    assert [g.shape for g in grads.values()] == [t.shape for t in qkv(5, 7, batch=0)]


def test_few_launches():
    q, k, v = (t.to("meta") for t in qkv(300, 300, dtype=torch.bfloat16))
    rest = (None, None, None, 0.1, -1, 0, 0.0)
    assert kernels_launched(lambda: kernels.forward(q, k, v, *rest)) == FORWARD
    out, lse = q.new_empty(300, 2, 4, 24), q.new_empty(2, 4, 300, dtype=torch.float32)
    assert kernels_launched(lambda: kernels.backward(out, q, k, v, out, lse, *rest)) == BACKWARD


def test_offsets_in_a_block_are_wide_where_they_must_be():
    near, far = (
        torch.empty_strided(
            (300, 1, 1, 64), (stride, 64, 64, 1), dtype=torch.bfloat16, device="meta"
        )
        for stride in (64, 1 << 25)
    )
    problem = kernels._Problem(near, near, near, None, None, None, 1.0, -1, 0, 0.0)
    blocks = kernels._Blocks(128, 64, 8, 3)
    assert problem.constants(blocks, False, near)["INDEX"] == tl.int32
    assert problem.constants(blocks, False, near, far)["INDEX"] == tl.int64


def test_limits_that_hide_nothing_cost_nothing():
    q, k, v = qkv(20, 30)
    problem = kernels._Problem(q, k, v, None, None, None, 1.0, 30, 20, 0.0)
    assert (problem.left, problem.right) == (-1, -1)
    problem = kernels._Problem(q, k, v, None, None, None, 1.0, 29, 19, 0.0)
    assert (problem.left, problem.right) == (29, 19)


def test_heads_run_together_while_their_keys_fit_the_cache():
    q, k, v = (
        torch.empty(8192, 1, h, 128, dtype=torch.bfloat16, device="meta") for h in (32, 8, 8)
    )
    problem = kernels._Problem(q, k, v, None, None, None, 1.0, -1, 0, 0.0)
    assert problem.heads_at_once(4) == 4 * (kernels.BYTES_IN_CACHE // (8192 * 256 * 2))


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "message"),
    [([0, 6], [0, 4, 8], "as long, got 2 and 3"), ([], [], r"must have shape \[sequences \+ 1\]")],
)
def test_rejects_a_pack_of_the_wrong_shape(cu_q, cu_k, message):
    q, k, v = (t[:, 0] for t in qkv(6, 8))
    cu = [torch.tensor(c, dtype=torch.int64) for c in (cu_q, cu_k)]
    with pytest.raises(ValueError, match=message):
        on_device(attention)(q, k, v, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"left": -2}, "window must be >= -1"),
        ({"scale": 0.0}, "scale must be positive"),
        ({"dropout": 0.1}, "needs a seed"),
        ({"dropout": 0.1, "seed": torch.zeros(3, dtype=torch.int64)}, "seed of 1 number, or of 5"),
        ({"k": torch.ones(8, 2, 3, 24)}, "do not fit together"),
        ({"v": torch.ones(8, 2, 2, 24).half()}, "one dtype"),
    ],
)
def test_kernel_rejects(change, message):
    q, k, v = qkv(6, 8)
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": None, "cu_seqlens_k": None, "seed": None}
    call |= {"scale": 1.0, "left": -1, "right": -1, "dropout": 0.0}
    with pytest.raises(ValueError, match=message):
        kernels.forward(**(call | change))


def test_fp32_matches_fp64_without_a_mask_of_tensors():
    assert_matches(CASE.op, CASE.ref, Inputs(qkv(20, 20, 1, 1, 1)), roundings=CASE.roundings)


@pytest.mark.parametrize(
    ("widths", "dtype"), [((192, 128), torch.float32), ((256, 256), torch.bfloat16)], ids=str
)
def test_dropout_by_blocks_of_16_queries(widths, dtype, monkeypatch):
    """Of which each draws the bits of 64: those of a GPU of 99 KiB."""
    monkeypatch.setattr(kernels, "_shared_limit", lambda device: RTX)
    blocks, chosen = kernels._Problem.blocks, []

    def keep(*args, **options):
        chosen.append(blocks(*args, **options))
        return chosen[-1]

    monkeypatch.setattr(kernels._Problem, "blocks", keep)
    options = {"dropout": 0.4, "seed": torch.tensor([5, 1, 2, 64, 9]), "causal": True}
    CASE.check(Inputs(qkv(87, 90, 1, 1, 1, *widths, dtype=dtype), options))
    assert 16 in {b.queries for b in chosen}


RTX, A100, H100 = 99 << 10, 163 << 10, 227 << 10
TABLES = (
    (kernels.FORWARD, kernels.DROPOUT_FORWARD, True),
    (kernels.BACKWARD_KEYS, kernels.DROPOUT_BACKWARD_KEYS, False),
    (kernels.BACKWARD_QUERIES, kernels.DROPOUT_BACKWARD_QUERIES, True),
)


def problem_of(width, value_width, dtype, dropout=0.0):
    tensors = qkv(4, 4, 1, 1, 1, width, value_width, dtype=dtype)
    return kernels._Problem(*tensors, None, None, SEED, 1.0, -1, -1, dropout)


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("limit", [H100, A100, RTX], ids=["H100", "A100", "RTX"])
def test_blocks_fit_shared_memory(width, limit, monkeypatch):
    monkeypatch.setattr(kernels, "_shared_limit", lambda device: limit)
    widths = (width, min(width, 128) if width < 256 else 256)
    problem = problem_of(*widths, torch.bfloat16)
    for table, with_dropout, walks_keys in TABLES:
        blocks = problem.blocks(table, with_dropout, walks_keys)
        assert kernels._shared_bytes(blocks, *widths, 2, walks_keys) <= limit
        if limit == H100:
            assert blocks == table[width]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_row_that_is_not_refused_has_a_block_on_every_gpu(dtype, dropout, monkeypatch):
    monkeypatch.setattr(kernels, "_shared_limit", lambda device: RTX)
    widest = WIDEST_ROW // dtype.itemsize
    every = [*range(8, 257, 24), 192, 256, widest]
    for widths in itertools.product(every, every):
        problem = problem_of(*widths, dtype, dropout)
        for table, with_dropout, walks_keys in TABLES:
            blocks = problem.blocks(table, with_dropout, walks_keys)
            assert kernels._shared_bytes(blocks, *widths, dtype.itemsize, walks_keys) <= RTX
            assert not dropout or blocks.queries == 16 or blocks.queries % 64 == 0
    with pytest.raises(ValueError, match=f"rows of 2048 and 2048 {dtype} fits {RTX} bytes"):
        problem_of(2048, 2048, dtype, dropout).blocks(table, with_dropout)


@pytest.mark.parametrize(
    ("capability", "hoppers"),
    [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 3), True), ((12, 0), False)],
    ids=str,
)
def test_consumer_blackwell_gets_the_blocks_of_ampere(capability, hoppers):
    token = kernels.assumed_capability.set(capability)
    try:
        assert kernels._multiplies_from_shared(torch.device("meta")) == hoppers
    finally:
        kernels.assumed_capability.reset(token)
