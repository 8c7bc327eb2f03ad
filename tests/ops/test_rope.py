"""Rotary embedding: see `OpContract`."""

import gc
import logging
import sys
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from accel.log import log_once
from accel.ops import rope, rope_ref
from accel.ops.rope import _TABLES, _OneAngle, unsupported_reason
from tests.ops.contract import Inputs, OpContract, assert_matches, needs_native

rope_module = sys.modules["accel.ops.rope"]  # its package hides it by a function

LAYOUTS = ["half", "interleaved", "interleaved_to_half"]


def angles(num_rows: int, width: int, layout: str = "half", batch: int = 1) -> Tensor:
    """[num_rows, batch, 1, width] as Megatron's RotaryEmbedding makes them; batches start elsewhere."""
    steps = 10000 ** (-torch.arange(0, width, 2) / max(1, width))
    rows = torch.arange(num_rows)[:, None] + 7 * torch.arange(batch)
    freqs = rows[..., None] * steps
    twice = (freqs, freqs)
    freqs = torch.stack(twice, -1).flatten(-2) if layout == "interleaved" else torch.cat(twice, -1)
    return freqs[:, :, None]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class TestRope(OpContract):
    op = staticmethod(rope)
    ref = staticmethod(rope_ref)
    # cos and sin, times mscale, two products and a sum
    roundings = {torch.float32: 4}

    def inputs(self, dtype, seed=0):
        layout = LAYOUTS[seed % 3]
        q = draw(5, 2, 6, 38, dtype=dtype, seed=seed)
        k = draw(5, 2, 3, 40, dtype=dtype, seed=seed + 1)
        return Inputs([q, angles(7, 38, layout), k], {"layout": layout, "mscale": 1.25}, [1])

    def magnitudes(self, inputs):
        """A pair that turns has the rounding of its larger member; one alone may turn to nearly 0."""
        options = inputs.options
        sizes = [t.abs().max().item() for t in inputs.tensors[::2] if t is not None and t.numel()]
        if not sizes:
            return {}
        size = max(sizes) * options.get("mscale", 1.0)
        dy = 4 * options.get("mscale", 1.0)  # of a few normal numbers
        return {"output 0": size, "output 1": size, "gradient 0": dy, "gradient 2": dy}

    def large_inputs(self):
        q, k = draw(512, 2, 8, 128), draw(512, 2, 2, 128)
        return Inputs([q.bfloat16(), angles(512, 128), k.bfloat16()], constants=[1])

    def opchecks(self):
        xs = [draw(4, 2, 3, 24).requires_grad_(), draw(4, 2, 1, 20).requires_grad_()]
        tables = draw(4, 1, 8), draw(4, 1, 8)
        op = torch.ops.accel.rope.default
        yield op, (xs, *tables, None, 1, 0, 16, False, False, False)
        yield op, (xs, *tables, None, 1, 0, 16, True, False, True)
        packed = [xs[0].detach()[:, :1]]
        yield op, (packed, *tables, torch.tensor([0, 3, 4]), 1, 0, 8, True, True, False)


@st.composite
def calls(draw_from) -> Inputs:
    size = st.sampled_from([0, 1, 2, 3, 5, 13])
    width = 2 * draw_from(st.sampled_from([0, 1, 7, 8, 15, 16, 31, 32, 33, 64]))
    kept = draw_from(st.sampled_from([0, 0, 1, 8]))
    layout = draw_from(st.sampled_from(LAYOUTS))
    num_rows, batch, heads_q, heads_k = (draw_from(size) for _ in range(4))
    # as slices of a fused qkv, or with the batch first in memory
    qkv = draw(num_rows, batch, heads_q + heads_k, width + kept)
    if draw_from(st.booleans()):
        qkv = qkv.transpose(0, 1).contiguous().transpose(0, 1)
    if draw_from(st.booleans()):
        qkv = torch.stack([qkv, qkv], dim=-1)[..., 0]  # last dimension not dense: copied
    q, k = qkv.split([heads_q, heads_k], dim=2)
    batch_of_freqs = batch if draw_from(st.booleans()) and batch else 1
    freqs = angles(num_rows + 2, width, layout, batch_of_freqs)
    if draw_from(st.booleans()):
        freqs[..., : width // 2] += 1  # the members of a pair have an angle of their own
    mscale = draw_from(st.sampled_from([1.0, 1.5]))
    return Inputs(
        [q, freqs, draw_from(st.sampled_from([k, None]))],
        {"layout": layout, "mscale": mscale},
        [1],
    )


@needs_native
@settings(deadline=None, max_examples=150)
@given(inputs=calls(), dtype=st.sampled_from(TestRope.dtypes))
def test_matches_reference_for_any_layout(inputs, dtype):
    q, freqs, k = inputs.tensors
    tensors = [q.to(dtype), freqs, None if k is None else k.to(dtype)]
    TestRope().check(inputs._replace(tensors=tensors))


@st.composite
def packed_calls(draw_from) -> Inputs:
    cp_size = draw_from(st.sampled_from([1, 2, 3]))
    lengths = draw_from(st.lists(st.sampled_from([0, 1, 2, 5]), max_size=4))
    lengths = [2 * cp_size * n if cp_size > 1 else n for n in lengths]
    num_tokens = sum(lengths) // cp_size
    own_rows = draw_from(st.booleans())
    dtype = draw_from(st.sampled_from([torch.int32, torch.int64]))
    options = {
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=dtype),
        "cp_size": cp_size,
        "cp_rank": draw_from(st.integers(0, cp_size - 1)),
        "layout": draw_from(st.sampled_from(LAYOUTS)),
    }
    num_rows = sum(lengths) if own_rows else 31
    q, k = draw(num_tokens, 7, 24).split([4, 3], dim=1)
    return Inputs([q, angles(num_rows, 16, options["layout"]), k], options, [1])


@needs_native
@settings(deadline=None, max_examples=100)
@given(inputs=packed_calls(), dtype=st.sampled_from(TestRope.dtypes))
def test_packed_sequences(inputs, dtype):
    q, freqs, k = inputs.tensors
    TestRope().check(inputs._replace(tensors=[q.to(dtype), freqs, k.to(dtype)]))


@needs_native
def test_positions_restart_and_zigzag_as_spelled_out():
    """Two sequences of 8 on rank 1 of 2: the middle half of each."""
    x, freqs = draw(8, 1, 4), angles(8, 4)
    cu_seqlens = torch.tensor([0, 8, 16])
    got, _ = rope(x, freqs, cu_seqlens=cu_seqlens, cp_size=2, cp_rank=1)
    rows = torch.tensor([2, 3, 4, 5])
    want, _ = rope(x.view(2, 4, 1, 4).transpose(0, 1), freqs[rows])
    assert torch.equal(got, want.transpose(0, 1).reshape(8, 1, 4))


@needs_native
def test_any_memory_order_gives_the_same_bits():
    q, freqs = draw(6, 2, 4, 64, dtype=torch.bfloat16), angles(6, 64)
    want, _ = rope(q, freqs)
    fused = torch.cat([q, q], dim=-1)
    views = [fused[..., 64:], q.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)]
    for view in (*views, torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)):
        assert torch.equal(rope(view, freqs)[0], want)


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS)
def test_past_the_caches_is_the_same(layout):
    q, freqs = draw(2048, 1, 64, 128, dtype=torch.float32), angles(2048, 128, layout)
    whole, _ = rope(q, freqs, layout=layout)  # 64 MiB
    for rows in torch.arange(2048).chunk(8):
        part, _ = rope(q[rows], freqs[rows], layout=layout)
        assert torch.equal(whole[rows], part)


@needs_native
def test_rotates_back():
    q, freqs = draw(9, 2, 3, 32).requires_grad_(), angles(9, 32)
    y, _ = rope(q, freqs)
    (back,) = torch.autograd.grad(y, q, y.detach())
    torch.testing.assert_close(back, q.detach())


@needs_native
def test_second_derivative():
    x, freqs = draw(3, 1, 2, 8).requires_grad_(), angles(3, 8)

    def norm_of_gradient(op, x):
        (dx,) = torch.autograd.grad(op(x, freqs)[0].pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(dx.pow(2).sum(), x)[0]

    torch.testing.assert_close(norm_of_gradient(rope, x), norm_of_gradient(rope_ref, x))


class Lagging:
    """The event of a GPU that is behind until somebody waits for it."""

    done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


class TestTables:
    """cos and sin are computed once for all layers and never too seldom."""

    def entries(self, freqs: Tensor) -> dict:
        return next(
            (t for s, t in _TABLES.by_storage.items() if s.cdata == freqs.untyped_storage()._cdata),
            {},
        )

    def test_one_for_all_views_and_detached_copies(self):
        q, freqs = draw(6, 1, 2, 16), angles(8, 16)
        for view in (freqs[:6], freqs.detach()[:6], freqs[:6].detach()):
            rope(q, view)
        assert len(self.entries(freqs)) == 1
        rope(q, freqs)
        rope(q, freqs, mscale=2.0)
        assert len(self.entries(freqs)) == 3

    def test_few_views_are_kept(self):
        """Generation without flash decode rotates one more key in each step."""
        freqs = angles(64, 16)
        for length in range(1, 65):
            rope(draw(length, 1, 2, 16), freqs[:length])
        assert len(self.entries(freqs)) == 16
        x = draw(1, 1, 2, 16)
        assert torch.equal(rope(x, freqs[:1])[0], rope(x, freqs[:1].clone())[0])

    def test_what_generation_has_made_serves_training(self):
        q, freqs = draw(6, 1, 2, 16).requires_grad_(), angles(6, 16)
        with torch.inference_mode():
            expected = [rope(q, freqs)[0] for _ in range(2)]
        (y, _), entries = rope(q, freqs), self.entries(freqs)
        assert all(torch.equal(y, each) for each in expected)
        y.sum().backward()
        assert len(entries) == 1

    def test_a_change_in_place_is_seen(self):
        q, freqs = draw(6, 1, 2, 16), angles(6, 16)
        rope(q, freqs)
        freqs.mul_(2)
        assert torch.equal(rope(q, freqs)[0], rope(q, freqs.clone())[0])
        assert len(self.entries(freqs)) == 1

    def test_gone_with_the_angles(self):
        q, freqs = draw(6, 1, 2, 16), angles(6, 16)
        rope(q, freqs)
        (tables,) = self.entries(freqs).values()
        gone = weakref.ref(tables.cos)
        del tables, freqs
        rope(q, angles(6, 16))
        gc.collect()
        assert gone() is None

    def test_a_checkpoint_without_reentry_finds_tables_of_the_same_width(self, monkeypatch):
        """Though the GPU, which lags in the forward pass, has said by then that the half is enough."""
        lagging = Lagging()
        init = _OneAngle.__init__

        def asked_of_a_gpu(self, tables):
            init(self, tables)
            self.when = lagging

        monkeypatch.setattr(_OneAngle, "__init__", asked_of_a_gpu)
        q, freqs = draw(6, 1, 2, 16).requires_grad_(), angles(6, 16)
        want = rope_ref(q, freqs)[0].sin()
        assert _TABLES.get(freqs, "half", 1.0).cos.shape[-1] == 16, "nobody waits without need"
        got = checkpoint(lambda q: rope(q, freqs)[0].sin(), q, use_reentrant=False)
        lagging.synchronize()
        gradients = [torch.autograd.grad(y.sum(), q)[0] for y in (got, want)]
        torch.testing.assert_close([got, gradients[0]], [want, gradients[1]])

    def test_inference_tensors(self):
        q = draw(6, 1, 2, 16)
        with torch.inference_mode():
            freqs = angles(6, 16)
            first, _ = rope(q, freqs)
            freqs.mul_(2)
            assert not torch.equal(rope(q, freqs)[0], first)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": draw(4, 8)}, r"q must have shape \[S, B, heads, D\], got \[4, 8\]"),
        ({"q": torch.ones(4, 2, 3, 8, dtype=torch.int64)}, "floating dtype .* got torch.int64"),
        ({"k": draw(4, 2, 3, 8).half()}, "k must be .* like q, torch.float32 .* got torch.float16"),
        (
            {"k": draw(5, 2, 3, 8)},
            r"k must have q's leading dimensions, \[4, 2\], got \[5, 2, 3, 8\]",
        ),
        ({"freqs": angles(4, 10)}, "as wide as q's heads, 8, got 10"),
        ({"k": draw(4, 2, 3, 6)}, "as wide as k's heads, 6, got 8"),
        ({"freqs": angles(3, 8)}, "a row for each of 4 positions, got 3"),
        ({"freqs": angles(4, 8, batch=3)}, r"\[positions, 1 or 2, 1, R\] .* got \[4, 3, 1, 8\]"),
        ({"freqs": draw(4, 1, 1, 7)}, r"R even, got \[4, 1, 1, 7\]"),
        ({"freqs": angles(4, 8).to("meta")}, "on cpu like q, got .* on meta"),
        ({"layout": "neox"}, "layout must be one of .*'half'.* got 'neox'"),
        ({"cp_size": 2}, "cp_size 2 needs cu_seqlens"),
        ({"cp_rank": 1}, r"cp_rank must be in \[0, cp_size = 1\), got 1"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"\[T, heads, D\] \(cu_seqlens are given\)"),
        (
            {"q": draw(4, 3, 8), "cu_seqlens": torch.tensor([0, 4], device="meta")},
            "cu_seqlens must be on the cpu like q, got meta",
        ),
    ],
)
def test_rejects(change, message):
    call = {"q": draw(4, 2, 3, 8), "freqs": angles(4, 8)} | change
    with pytest.raises(ValueError, match=message):
        rope(**call)


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "reference"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0.0, 4.0])}, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 3])}, "hold 3 tokens .* q has 4"),
        ({"cu_seqlens": torch.tensor([0, 5, 4])}, r"must not fall.* sequence 1 is \[5, 4\)"),
        ({"freqs": angles(3, 8)}, "position 3 is beyond the 3 rows"),
        ({"cu_seqlens": torch.tensor([0, 6, 8]), "cp_size": 2}, r"must split .* \[0, 6\)"),
        ({"cu_seqlens": torch.tensor([0, 9]), "cp_size": 2}, r"must split .* \[0, 9\)"),
        ({"cu_seqlens": torch.tensor([-1, 5])}, "hold 6 tokens .* q has 4"),
        ({"cu_seqlens": torch.tensor([-2, 2]), "freqs": angles(2, 8)}, "position -2 is beyond"),
        # what no memory has room for must be refused before anything is stored
        *(
            ({"cu_seqlens": torch.tensor(starts)}, message)
            for starts, message in (
                ([0, 10**15], "hold 1000000000000000 tokens .* q has 4"),
                ([0, 10**15, 4], r"must not fall.* sequence 1 is \[1000000000000000, 4\)"),
                ([-(2**63), 2**63 - 1], f"hold {2**64 - 1} tokens"),
            )
        ),
    ],
)
def test_rejects_packed(change, message, dtype):
    q = draw(4, 3, 8, dtype=dtype)
    call = {"q": q, "freqs": angles(6, 8), "cu_seqlens": torch.tensor([0, 4])} | change
    with pytest.raises(ValueError, match=message):
        rope(**call)


@needs_native
def test_the_kernel_reads_past_no_table():
    xs, (cos, sin) = [draw(4, 2, 3, 8)], (draw(4, 1, 4), draw(4, 1, 4))
    for tables, rotary_dim in (((cos[:3], sin[:3]), 8), ((cos, sin), 10), ((cos, sin[:3]), 8)):
        with pytest.raises(ValueError, match="rope:"):
            torch.ops.accel.rope(xs, *tables, None, 1, 0, rotary_dim, False, False, False)


def test_unsupported_dtype_falls_back_and_says_so_once(caplog):
    q, freqs = draw(4, 2, 3, 8).double(), angles(4, 8)
    reason = unsupported_reason(q, freqs)
    assert "float64" in reason
    log_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="accel"):
        for _ in range(2):
            assert torch.equal(rope(q, freqs)[0], rope_ref(q, freqs)[0])
    assert [r.message for r in caplog.records] == [f"rope: using plain PyTorch: {reason}"]


def test_angles_that_want_a_gradient_fall_back():
    inputs = Inputs([draw(4, 2, 3, 8), angles(4, 8).requires_grad_()])
    assert "gradient" in unsupported_reason(*inputs.tensors)
    assert_matches(rope, rope_ref, inputs)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reference_is_megatrons(layout):
    from megatron.core.models.common.embeddings import rope_utils

    q, freqs = draw(5, 2, 3, 20, dtype=torch.bfloat16), angles(5, 16, layout)
    # The fourth parameter, MLA's layout, has two names in the supported versions.
    want = rope_utils._apply_rotary_pos_emb_bshd(
        q, freqs, layout == "interleaved", layout == "interleaved_to_half", 1.25
    )
    assert torch.equal(rope_ref(q, freqs, layout=layout, mscale=1.25)[0], want)


def test_packed_reference_is_megatrons():
    from megatron.core.models.common.embeddings import rope_utils

    class Rank:
        def size(self) -> int:
            return 2

        def rank(self) -> int:
            return 1

    for num_rows in (12, 9):  # a row for each token, or positions that restart
        x, freqs = draw(6, 3, 8), angles(num_rows, 8)
        cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        want = rope_utils._apply_rotary_pos_emb_thd(x, cu_seqlens, freqs, cp_group=Rank())
        got, _ = rope_ref(x, freqs, cu_seqlens=cu_seqlens, cp_size=2, cp_rank=1)
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_tables_in_a_cuda_graph_are_as_wide_as_those_before_it(layout, monkeypatch):
    """New ones, of what the memory holds at the replay; half as wide where that is known to do."""
    freqs = angles(7, 32, layout)
    before = _TABLES.get(freqs, layout, 1.5)
    assert before.cos.shape[-1] == 16
    monkeypatch.setattr(rope_module, "is_capturing", lambda device: True)
    inside = _TABLES.get(freqs, layout, 1.5)
    assert inside.cos is not before.cos
    assert torch.equal(inside.cos, before.cos)
    assert torch.equal(inside.sin, before.sin)
    assert _TABLES.get(freqs.clone(), layout, 1.5).cos.shape[-1] == 32  # nobody has looked at these
