"""The norm's and scaling's CUDA kernels: the contract, chunks, tensors not aligned, many tensors."""

import pytest
import torch

from accel.ops import l2_norm, l2_norm_ref, scale, scale_ref
from tests.cuda.harness import DEVICE, HAS_GPU, OnCuda, cuda_kernels, needs_kernels
from tests.ops import test_multi_tensor
from tests.ops.contract import Inputs, OpContract
from tests.ops.test_multi_tensor import drawn
from tests.triton.test_multi_tensor import moved

__all__ = ["cuda_kernels"]

DTYPES = OpContract.dtypes
CHUNK = 1 << 16
"""Elements of a block, which takes 4096 at a time, or 8192 of 16 bits."""
RAGGED = [(7,), (0,), (), (4096,), (2, 0), (8193,), (CHUNK - 1,), (CHUNK + 1,), (31, 33)]


class TestL2Norm(OnCuda, test_multi_tensor.TestL2Norm):
    large_inputs = None

    def opchecks(self):
        yield torch.ops.accel.l2_norm.default, (moved(drawn([(5,), (3, 2)], torch.float32)),)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_ends_of_turns_and_chunks(self, dtype):
        tensors = drawn(RAGGED, dtype)
        self.check(Inputs(tensors, constants=range(len(tensors))))


class TestScale(OnCuda, test_multi_tensor.TestScale):
    large_inputs = None
    inputs = test_multi_tensor.TestL2Norm.inputs

    def opchecks(self):
        lists = (moved(drawn([(5,)], torch.float32)) for _ in range(2))
        yield torch.ops.accel.scale_.default, (*lists, 0.5)


@needs_kernels
@pytest.mark.usefixtures("cuda_kernels")
class TestLists:
    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
    def test_one_bad_element_shows_in_the_norm(self, bad):
        for where in (0, 4095, 4096, CHUNK + 2):
            tensors = [torch.ones(7), torch.ones(CHUNK + 3)]
            tensors[1][where] = bad
            assert not l2_norm(moved(tensors)).isfinite()

    def test_no_overflow_where_fp32_has_none(self):
        tensors = moved([torch.full((3,), 1e19), torch.full((CHUNK + 5,), 1e-3)])
        torch.testing.assert_close(l2_norm(tensors).cpu(), torch.tensor(1e19 * 3**0.5))

    @pytest.mark.parametrize("source", DTYPES, ids=str)
    @pytest.mark.parametrize("target", DTYPES, ids=str)
    def test_scale_is_torchs_bit_for_bit(self, source, target):
        sources = drawn(RAGGED, source)
        for factor in (0.37, 1e10):
            want = [torch.empty(s.shape, dtype=target) for s in sources]
            scale_ref([s.float() for s in sources], want, factor)
            targets = [t.fill_(-1) for t in moved([w.clone() for w in want])]
            versions = [t._version for t in targets]
            scale(moved(sources), targets, factor)
            for got, expected in zip(targets, want, strict=True):
                assert torch.equal(got.cpu(), expected)
            assert [t._version for t in targets] == [v + 1 for v in versions]

    def test_scale_in_place(self):
        tensors = moved(drawn(RAGGED, torch.float32))
        want = [t * 0.37 for t in tensors]
        scale(tensors, tensors, 0.37)
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_views_at_any_address_have_the_same_bits_and_spare_their_neighbours(self, dtype):
        flat = torch.randn(40_000, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        cuts = [(0, 5), (5, 9000), (9008, 9009), (16_384, 30_003)]
        views = [flat[first:last] for first, last in cuts]
        assert l2_norm(views) == l2_norm([v.clone() for v in views])
        out = torch.full_like(flat, 7.0)
        want = out.clone()
        scale(views, [out[first:last] for first, last in cuts], 0.5)
        for first, last in cuts:
            want[first:last] = flat[first:last] * 0.5
        assert torch.equal(out, want)

    @pytest.mark.parametrize("count", [145, 146, 203, 204, 500])
    def test_more_tensors_than_a_launch_is_told_of(self, count):
        tensors = moved(
            drawn([(1 + i % 3,) if i % 11 else (0,) for i in range(count)], torch.float32)
        )
        torch.testing.assert_close(l2_norm(tensors), l2_norm_ref(tensors))
        want = [t * 0.5 for t in tensors]
        scale(tensors, tensors, 0.5)
        assert all(torch.equal(a, b) for a, b in zip(tensors, want, strict=True))

    def test_nothing(self):
        empty = moved([torch.empty(0), torch.empty(3, 0)])
        scale(empty, empty, 0.5)
        assert l2_norm(empty) == 0
        assert l2_norm([]) == 0

    def test_the_kernels_check_again(self):
        ops, ones = torch.ops.accel, torch.ones(2, device=DEVICE)
        for call in (
            lambda: ops.l2_norm([ones, ones.bfloat16()]),
            lambda: ops.l2_norm([torch.ones(4, device=DEVICE)[::2]]),
            lambda: ops.l2_norm([ones.double()]),
            lambda: ops.scale_([ones], [torch.ones(3, device=DEVICE)], 1.0),
            lambda: ops.scale_([ones], [], 1.0),
            lambda: ops.scale_([ones], [ones.int()], 1.0),
        ):
            with pytest.raises(ValueError):
                call()

    @pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
    def test_in_a_cuda_graph(self):
        tensors = moved(drawn(RAGGED, torch.float32))
        graph = torch.cuda.CUDAGraph()
        l2_norm(tensors)
        with torch.cuda.graph(graph):
            norm = l2_norm(tensors)
            scale(tensors, tensors, 0.5)
        for t in tensors:
            t.fill_(2.0)
        for _ in range(3):
            want = l2_norm_ref(tensors)
            graph.replay()
            torch.testing.assert_close(norm, want)
            torch.testing.assert_close(l2_norm(tensors), want * 0.5)
