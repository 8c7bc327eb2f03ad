"""The norm and scaling of many tensors in Triton: the contract, chunk boundaries, alignments, tables."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from accel._triton import multi_tensor as kernels
from accel.ops import l2_norm, l2_norm_ref, scale, scale_ref
from tests.ops import test_multi_tensor
from tests.ops.contract import Inputs, OpContract
from tests.triton.harness import DEVICE, HAS_GPU, OnTriton, kernels_launched

DTYPES = OpContract.dtypes
drawn = test_multi_tensor.drawn
BLOCK = kernels.BLOCK
RAGGED = [(7,), (0,), (), (BLOCK,), (2, 0), (BLOCK + 1,), (2 * BLOCK - 1,), (31, 33)]
"""Within a block, at its ends, across; and nothing."""


def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
    """On the device, each where an allocation starts."""
    return [t.to(DEVICE) for t in tensors]


class TestL2Norm(OnTriton, test_multi_tensor.TestL2Norm):
    large_inputs = None

    def opchecks(self):
        yield torch.ops.accel.l2_norm.default, (moved(drawn([(5,), (3, 2)], torch.float32)),)

    @settings(max_examples=15, deadline=None)
    @given(shapes=test_multi_tensor.SHAPES, dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
    def test_any_shapes(self, shapes, dtype, seed):
        if tensors := drawn(shapes, dtype, seed):
            self.check(Inputs(tensors, constants=range(len(tensors))))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_boundaries_of_blocks_and_chunks(self, dtype, monkeypatch):
        tensors = drawn(RAGGED, dtype)
        for max_chunk in (BLOCK, 2 * BLOCK):
            monkeypatch.setattr(kernels, "MAX_CHUNK", max_chunk)
            monkeypatch.setattr(kernels, "PROGRAMS_PER_PROCESSOR", 1)
            self.check(Inputs(tensors, constants=range(len(tensors))))

    def test_more_chunks_than_the_last_program_adds_at_a_time(self, monkeypatch):
        monkeypatch.setattr(kernels, "NORM_BLOCK", 4)
        tensors = drawn([(n,) for n in range(1, 12)], torch.float32)
        self.check(Inputs(tensors, constants=range(len(tensors))))


class TestScale(OnTriton, test_multi_tensor.TestScale):
    large_inputs = None
    inputs = test_multi_tensor.TestL2Norm.inputs

    def opchecks(self):
        lists = (moved(drawn([(5,)], torch.float32)) for _ in range(2))
        yield torch.ops.accel.scale_.default, (*lists, 0.5)


@pytest.mark.usefixtures("triton_kernels")
class TestLists:
    @pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_one_bad_element_shows_in_the_norm(self, bad, dtype):
        for where in (0, BLOCK - 1, BLOCK, BLOCK + 2):
            tensors = [torch.ones(7, dtype=dtype), torch.ones(BLOCK + 3, dtype=dtype)]
            tensors[1][where] = bad
            assert not l2_norm(moved(tensors)).isfinite()

    def test_no_overflow_where_fp32_has_none(self):
        tensors = moved([torch.full((3,), 1e19), torch.full((BLOCK + 5,), 1e-3)])
        torch.testing.assert_close(l2_norm(tensors).cpu(), torch.tensor(1e19 * 3**0.5))

    @pytest.mark.parametrize("source", DTYPES, ids=str)
    @pytest.mark.parametrize("target", DTYPES, ids=str)
    def test_scale_is_torchs_bit_for_bit(self, source, target):
        sources = drawn(RAGGED, source)
        for factor in (0.37, 0.0, 1e10):
            want = [torch.empty(s.shape, dtype=target) for s in sources]
            scale_ref([s.float() for s in sources], want, factor)
            targets = moved(want)
            for t in targets:
                t.fill_(-1)
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
    def test_views_at_any_address_leave_their_neighbours_alone(self, dtype):
        """As a shard of a flat buffer: some aligned, some not, in two launches."""
        flat = torch.randn(4 * BLOCK, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)
        cuts = [(0, 5), (5, BLOCK + 5), (BLOCK + 8, BLOCK + 9), (2 * BLOCK, 3 * BLOCK + 3)]
        views = [flat[first:last] for first, last in cuts]
        torch.testing.assert_close(
            l2_norm(views).cpu(), l2_norm_ref([v.cpu() for v in views]), rtol=1e-6, atol=0.0
        )
        out = torch.full_like(flat, 7.0)
        targets = [out[first:last] for first, last in cuts]
        scale(views, targets, 0.5)
        want = torch.full_like(flat, 7.0)
        for first, last in cuts:
            want[first:last] = flat[first:last] * 0.5
        assert torch.equal(out, want)
        names = kernels_launched(lambda: (l2_norm(views), scale(views, targets, 0.5)))
        assert names == ["_squares", "_squares", "_norm", "_scale", "_scale"]

    def test_few_launches_and_none_for_nothing(self):
        many = moved(drawn([(3, n) for n in range(300)], torch.bfloat16))
        assert kernels_launched(lambda: l2_norm(many)) == ["_squares", "_norm"]
        assert kernels_launched(lambda: scale(many, many, 0.5)) == ["_scale"]
        empty = moved([torch.empty(0), torch.empty(3, 0)])
        assert kernels_launched(lambda: scale(empty, empty, 0.5)) == []
        assert kernels_launched(lambda: l2_norm(empty)) == []
        assert l2_norm(empty) == 0
        assert l2_norm([]) == 0

    def test_other_tensors_at_the_same_addresses(self):
        """A table that was kept for some addresses says nothing of sizes or values that changed."""
        memory = torch.ones(2 * BLOCK, device=DEVICE)
        for count in (10, BLOCK + 1, 10):
            for value in (1.0, 2.0):
                memory.fill_(value)
                assert l2_norm([memory[:count]]) == (torch.tensor(float(count)).sqrt() * value)

    @pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
    def test_in_a_cuda_graph(self):
        tensors = moved(drawn(RAGGED, torch.float32))
        graph = torch.cuda.CUDAGraph()
        l2_norm(tensors)
        scale(tensors, tensors, 0.5)
        with torch.cuda.graph(graph):
            norm = l2_norm(tensors)
            scale(tensors, tensors, 0.5)
        for t in tensors:
            t.fill_(2.0)
        for _ in range(3):
            want = l2_norm_ref(tensors)
            for _ in range(40):  # other lists, other tables
                l2_norm([torch.ones(5, device=DEVICE) for _ in range(3)])
            graph.replay()
            torch.testing.assert_close(norm, want)
            torch.testing.assert_close(l2_norm(tensors), want * 0.5)

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
