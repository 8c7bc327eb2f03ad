"""The rotary embedding's Triton kernel: the contract, layouts, packed sequences, ends of blocks."""

import itertools

import pytest
import torch
from torch import Tensor

from accel._triton import rope as kernels
from accel.ops import rope
from accel.ops.rope import _OneAngle
from tests.ops import test_rope
from tests.ops.contract import Inputs
from tests.ops.test_rope import LAYOUTS, angles, draw
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched, on_device

OP = torch.ops.accel.rope.default
rotate = on_device(rope)


def cumulative(lengths: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def on_test_device(*tensors: Tensor) -> list[Tensor]:
    return [t.to(DEVICE) for t in tensors]


class TestRope(OnTriton, test_rope.TestRope):
    @pytest.fixture(autouse=True)
    def few_programs(self, monkeypatch) -> None:
        """Several tokens to each: the interpreter takes milliseconds for a program."""
        monkeypatch.setattr(kernels, "PROGRAMS_PER_PROCESSOR", 1)

    @pytest.fixture
    def small_blocks(self, monkeypatch) -> None:
        """Several blocks of heads and of tokens, with ragged ends."""
        monkeypatch.setattr(kernels, "TILE", 64)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize(("width", "kept"), [(16, 0), (2, 5), (14, 1), (0, 3), (66, 2)])
    def test_widths(self, width, kept, layout, small_blocks):
        q, k = draw(3, 2, 4, width + kept).split([3, 1], dim=2)
        for own_angles, batch in ((False, 1), (True, 2)):
            freqs = angles(5, width, layout, batch)
            if own_angles:
                freqs[..., : width // 2] += 1
            self.check(Inputs([q, freqs, k], {"layout": layout, "mscale": 1.5}, [1]))

    @pytest.mark.parametrize("num_heads", [1, 3, 5])
    def test_ends_of_blocks(self, num_heads, small_blocks):
        for num_positions, batch in ((1, 1), (3, 2), (13, 1)):
            q = draw(num_positions, batch, num_heads, 16)
            k = draw(num_positions, batch, 1, 20)
            for tensors in ([q, angles(13, 8), k], [k, angles(13, 8), None]):
                self.check(Inputs(tensors, {}, [1]))

    @pytest.mark.parametrize(("cp_size", "cp_ranks"), [(1, [0]), (2, [0, 1]), (3, [1])])
    @pytest.mark.parametrize("own_rows", [False, True])
    @pytest.mark.parametrize("lengths", [[5], [1, 4, 2], [0, 3, 0, 0, 1, 0], [1] * 17], ids=len)
    def test_packed_sequences(self, lengths, own_rows, cp_size, cp_ranks):
        whole = [2 * cp_size * n if cp_size > 1 else n for n in lengths]
        q, k = draw(sum(whole) // cp_size, 4, 24).split([3, 1], dim=1)
        num_rows = sum(whole) if own_rows else sum(whole) + 3
        for cp_rank in cp_ranks:
            options = {
                "cu_seqlens": cumulative(whole, (torch.int32, torch.int64)[cp_rank % 2]),
                "cp_size": cp_size,
                "cp_rank": cp_rank,
                "layout": LAYOUTS[cp_rank],
            }
            freqs = angles(num_rows, 16, options["layout"])
            self.check(Inputs([q, freqs, k], options, [1]))

    def test_half_types_packed(self):
        q, k = draw(6, 3, 8, dtype=torch.bfloat16), draw(6, 1, 8, dtype=torch.bfloat16)
        options = {"cu_seqlens": cumulative([8, 4]), "cp_size": 2, "cp_rank": 1}
        self.check(Inputs([q, angles(12, 8), k], options, [1]))

    @pytest.mark.parametrize("shape", [(0, 2, 3, 8), (4, 0, 3, 8), (4, 2, 0, 8), (4, 2, 3, 0)])
    def test_empty(self, shape):
        q = torch.randn(shape)
        inputs = Inputs([q, angles(5, min(4, shape[3])), None], {}, [1])
        self.check(inputs)
        assert not kernels_launched(lambda: rope(*on_test_device(q, inputs.tensors[1])))

    def test_one_of_two_is_empty(self):
        self.check(Inputs([draw(4, 2, 0, 8), angles(4, 8), draw(4, 2, 3, 8)], {}, [1]))
        self.check(Inputs([draw(4, 2, 3, 8), angles(4, 8), draw(4, 2, 0, 8)], {}, [1]))


@pytest.mark.usefixtures("triton_kernels")
class TestLayouts:
    def test_any_memory_order_gives_the_same_bits(self):
        q, freqs = draw(6, 2, 4, 64, dtype=torch.bfloat16), angles(6, 64)
        want, _ = rotate(q, freqs)
        fused = torch.cat([q, q], dim=-1)
        views = [fused[..., 64:], q.permute(3, 1, 2, 0).contiguous().permute(3, 1, 2, 0)]
        views += [q.transpose(0, 1).contiguous().transpose(0, 1), q.expand(6, 2, 4, 64)]
        for view in (*views, torch.cat([q.new_zeros(1), q.flatten()])[1:].view(q.shape)):
            assert torch.equal(rotate(view, freqs)[0], want)

    def test_rotates_back(self):
        q, freqs = draw(9, 2, 3, 32).requires_grad_(), angles(9, 32)
        y, _ = rotate(q, freqs)
        (back,) = torch.autograd.grad(y, q, y.detach())
        torch.testing.assert_close(back, q.detach())

    def test_second_derivative(self):
        x, freqs = draw(3, 1, 2, 8).requires_grad_(), angles(3, 8)

        def norm_of_gradient(op):
            (dx,) = torch.autograd.grad(op(x, freqs)[0].pow(3).sum(), x, create_graph=True)
            return torch.autograd.grad(dx.pow(2).sum(), x)[0]

        torch.testing.assert_close(norm_of_gradient(rotate), norm_of_gradient(test_rope.rope_ref))

    def test_one_launch_for_two_tensors(self):
        q, k, freqs = on_test_device(draw(4, 2, 3, 8), draw(4, 2, 1, 8), angles(4, 8))
        rope(q, freqs, k)  # the tables, asked for
        assert kernels_launched(lambda: rope(q, freqs, k)) == ["_rotate"]
        packed, cu_seqlens = q[:, 0], cumulative([3, 1]).to(DEVICE)
        launched = kernels_launched(lambda: rope(packed, freqs, k[:, 0], cu_seqlens=cu_seqlens))
        assert launched == ["_rotate"]

    def test_three_tensors(self):
        xs = on_test_device(*(draw(4, 2, heads, 8, seed=heads) for heads in (1, 2, 3)))
        cos, sin = on_test_device(draw(4, 1, 4), draw(4, 1, 4))
        options = (None, 1, 0, 8, False, False, False)
        for x, y in zip(xs, OP(xs, cos, sin, *options), strict=True):
            assert torch.equal(y, OP([x], cos, sin, *options)[0])


@pytest.mark.usefixtures("triton_kernels")
class TestLengthsThatDoNotFit:
    """The host never reads them: tokens without a position are NaN, all others are right."""

    def rows_of(self, **options) -> list[bool]:
        """Which tokens are numbers; those must be what they are by their own angles."""
        y, _ = rotate(draw(4, 3, 8), angles(6, 8), **options)
        assert torch.equal(y.isnan().any(-1), y.isnan().all(-1))
        return (~y.isnan()).all(-1).all(-1).tolist()

    def test_fewer_than_tokens(self):
        assert self.rows_of(cu_seqlens=torch.tensor([0, 3])) == [True, True, True, False]
        assert self.rows_of(cu_seqlens=torch.tensor([0])) == [False] * 4

    def test_beyond_the_tables(self):
        y, _ = rotate(draw(8, 3, 8), angles(6, 8), cu_seqlens=torch.tensor([0, 8]))
        assert y[:6].isfinite().all()
        assert y[6:].isnan().all()

    def test_falling(self):
        assert self.rows_of(cu_seqlens=torch.tensor([0, 3, 2])) == [True] * 3 + [False]

    def test_a_sequence_that_does_not_split(self):
        options = {"cp_size": 2, "cp_rank": 1}
        got = self.rows_of(cu_seqlens=torch.tensor([0, 6, 10]), **options)
        assert got == [False, False, False, True]  # of the second sequence, [6, 10)

    def test_a_start_other_than_zero(self):
        x, freqs = draw(4, 3, 8), angles(6, 8)
        want, _ = rotate(x, freqs, cu_seqlens=torch.tensor([0, 3, 4]))
        got, _ = rotate(x, freqs, cu_seqlens=torch.tensor([5, 8, 9]))
        assert torch.equal(got, want)


@pytest.mark.usefixtures("triton_kernels")
def test_the_kernel_reads_past_no_table():
    (x, cos, sin) = on_test_device(draw(4, 2, 3, 8), draw(4, 1, 4), draw(4, 1, 4))
    for tables, rotary_dim in (((cos[:3], sin[:3]), 8), ((cos, sin), 10), ((cos, sin[:3]), 8)):
        with pytest.raises(ValueError, match="rope:"):
            OP([x], *tables, None, 1, 0, rotary_dim, False, False, False)
    with pytest.raises(ValueError, match="cp_rank must be in"):
        OP([x], cos, sin, None, 2, 2, 8, False, False, False)
    with pytest.raises(ValueError, match="cu_seqlens must be int32 or int64"):
        OP([x], cos, sin, torch.tensor([0.0, 4.0]), 1, 0, 8, False, False, False)


def test_more_tokens_than_32_bits_count():
    x = torch.empty(2**16, 2**15, 1, 8, device="meta")
    table = torch.empty(2**16, 1, 4, device="meta")
    with pytest.raises(ValueError, match=r"takes up to 2147479552 tokens, got 65536 x 32768"):
        kernels.forward([x], table, table, None, 1, 0, 8, False, False, False)


@pytest.mark.usefixtures("triton_kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_before_it_is_known_that_pairs_have_one_angle(layout, monkeypatch):
    q, freqs = draw(6, 1, 2, 16, dtype=torch.bfloat16).requires_grad_(), angles(6, 16, layout)
    dy = draw(6, 1, 2, 16, dtype=torch.bfloat16, seed=1)

    def y_dx() -> tuple[int, Tensor, Tensor]:
        x, f = q.to(DEVICE), freqs_on_device
        y, _ = rope(x, f, layout=layout)
        (dx,) = torch.autograd.grad(y, q, dy.to(DEVICE))
        return test_rope._TABLES.get(f, layout, 1.0).cos.shape[-1], y, dx

    freqs_on_device = freqs.to(DEVICE)
    with monkeypatch.context() as patch:
        patch.setattr(_OneAngle, "answer", lambda self, wait: None)
        for _ in range(2):
            width, y, dx = y_dx()
            assert width == 16
    if HAS_GPU:
        torch.cuda.synchronize()
    width, same_y, same_dx = y_dx()
    assert width == 8
    assert torch.equal(same_y, y)
    assert torch.equal(same_dx, dx)


def test_blocks_of_real_models():
    """[heads, width] -> heads at a time: a full tile, or half of one where that wastes less."""
    assert kernels._heads_at_a_time(32, 128) == 32
    assert kernels._heads_at_a_time(40, 128) == 16
    assert kernels._heads_at_a_time(8, 128) == 8
    assert kernels._heads_at_a_time(128, 64) == 64
    assert kernels._heads_at_a_time(1, 8192) == 1
