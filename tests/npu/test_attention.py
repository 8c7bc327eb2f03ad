"""Attention on Ascend: every mask, packs, parts of a larger attention, and what falls back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accel.ops import attention, attention_ref
from accel.ops.attention import attention_gradients
from tests.npu import conformance
from tests.npu.harness import OnNpu, calls_of, npu_kernels
from tests.ops import test_attention
from tests.ops.contract import Inputs, change_layout

__all__ = ["npu_kernels"]

BOTH = {"npu_fusion_attention", "npu_fusion_attention_grad"}
MASKS = [
    {},
    {"causal": True},
    {"causal": True, "window": (3, 0)},
    {"window": (30, 7)},
    {"window": (-1, 4)},
    {"window": (5, -1)},
    {"window": (500, 500)},
]


def modes(monkeypatch) -> list[int]:
    """The sparse_mode of each call of the forward from now on."""
    seen: list[int] = []
    kernel = torch.ops.npu.npu_fusion_attention

    def recorded(*args, **options):
        seen.append(options["sparse_mode"])
        return kernel(*args, **options)

    monkeypatch.setattr(torch.ops.npu, "npu_fusion_attention", recorded)
    return seen


class TestAttention(OnNpu, test_attention.TestAttention):
    uses = tuple(BOTH)

    @pytest.mark.parametrize("options", MASKS, ids=str)
    @pytest.mark.parametrize("sizes", [(33, 33), (20, 45), (45, 20), (1, 70), (70, 1), (5, 0)])
    def test_every_mask(self, sizes, options):
        tensors = test_attention.qkv(*sizes, dtype=torch.bfloat16, value_width=16)
        self.check(Inputs(tensors, options))

    @settings(deadline=None, max_examples=12)
    @given(
        heads=st.sampled_from([(1, 1), (4, 1), (6, 3)]),
        widths=st.sampled_from([(1, 1), (16, 16), (31, 40), (96, 32)]),
        dtype=st.sampled_from(test_attention.TestAttention.dtypes),
        layout=st.sampled_from(["contiguous", "transposed", "strided", "offset"]),
    )
    def test_any_layout(self, heads, widths, dtype, layout):
        tensors = test_attention.qkv(13, 31, 2, *heads, *widths, dtype=dtype)
        laid = [change_layout(t, layout) for t in tensors]
        self.check(Inputs(laid, {"causal": True}))

    @settings(deadline=None, max_examples=15)
    @given(
        lengths=test_attention.packs(),
        padding=st.sampled_from([0, 3]),
        options=st.sampled_from(MASKS),
        dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    )
    def test_packs(self, lengths, padding, options, dtype):
        tokens = sum(lengths[0]) + padding, sum(lengths[1])
        pack = [t[:, 0] for t in test_attention.qkv(*tokens, 1, dtype=dtype, seed=3)]
        starts = {"cu_seqlens_q": lengths[0], "cu_seqlens_k": lengths[1]}
        starts = {name: test_attention.starts(sizes) for name, sizes in starts.items()}
        self.check(Inputs(pack, options | starts))

    @pytest.mark.parametrize("dtype", test_attention.TestAttention.dtypes, ids=str)
    def test_an_offset_is_joined_to_the_result(self, dtype):
        tensors = test_attention.qkv(33, 33, dtype=dtype)
        inputs = test_attention.add_offset(Inputs(tensors, {"causal": True}))
        assert calls_of(test_attention.TestAttentionWithAnOffset.op, inputs) == BOTH
        test_attention.CASE_WITH_OFFSET.check(inputs)

    def test_a_token_alone_in_a_pack_takes_no_band(self, monkeypatch):
        """The gradient's kernel refuses bands of width 0 there."""
        seen = modes(monkeypatch)
        pack = [t[:, 0] for t in test_attention.qkv(9, 9, 1)]
        starts = {f"cu_seqlens_{name}": torch.tensor([0, 4, 9]) for name in "qk"}
        out = attention(*pack, window=(0, 0), **starts)[0]
        assert seen == []
        groups = out.shape[1] // pack[2].shape[1]
        torch.testing.assert_close(out, pack[2].repeat_interleave(groups, dim=1))

    def test_sparse_modes(self, monkeypatch):
        """Causal among the same tokens is mode 2, after a cache mode 3, a window mode 4."""
        seen = modes(monkeypatch)
        for sizes, options in (
            ((9, 9), {"causal": True}),
            ((9, 12), {"causal": True}),
            ((12, 9), {"causal": True}),  # what is left of the queries is as many as the keys
            ((9, 9), {"window": (2, 1)}),
            ((9, 9), {"window": (100, 100)}),
        ):
            attention(*test_attention.qkv(*sizes), **options)
        assert seen == [2, 3, 2, 4, 0]

    def test_lse_is_as_exact_as_fp32_sums(self):
        for dtype in self.dtypes:
            q, k, v = test_attention.qkv(67, 300, width=64, dtype=dtype)
            _, lse = attention(q, k, v, causal=True)
            _, exact = attention_ref(q.double(), k.double(), v.double(), causal=True)
            limit = 16 * 2**-24 * exact.abs().max()
            torch.testing.assert_close(lse.double(), exact, rtol=0, atol=limit)

    def test_parts_with_the_lse_of_the_whole(self):
        """Context parallel: the gradients of two halves of the keys add up to the whole's."""
        q, k, v = test_attention.qkv(20, 40, dtype=torch.float32)
        out, lse = attention(q, k, v, softmax_scale=0.3)
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        whole = attention_gradients(dout, q, k, v, out, lse, softmax_scale=0.3)
        halves = [
            attention_gradients(dout, q, k[at], v[at], out, lse, softmax_scale=0.3)
            for at in (slice(0, 20), slice(20, 40))
        ]
        torch.testing.assert_close(whole[0], halves[0][0] + halves[1][0], rtol=1e-4, atol=1e-5)
        for i in (1, 2):
            torch.testing.assert_close(whole[i], torch.cat([h[i] for h in halves]))

    @pytest.mark.parametrize(
        ("tensors", "options"),
        [
            (test_attention.qkv(5, 6), {"dropout": 0.2, "seed": test_attention.SEED}),
            (test_attention.qkv(5, 6, width=800), {}),
            (test_attention.qkv(5, 6, heads=257, kv_heads=257, width=2), {}),
        ],
        ids=["dropout", "width", "heads"],
    )
    def test_falls_back_to_the_references(self, tensors, options):
        inputs = Inputs(tensors, options)
        self.check(inputs)
        assert not calls_of(self.op, inputs)

    def test_lengths_are_read_once(self, monkeypatch):
        """For as long as cu_seqlens lives unchanged: the host does not wait in every layer."""
        reads = []
        monkeypatch.setattr(
            torch.Tensor, "tolist", lambda self: reads.append(1) or self.numpy().tolist()
        )
        pack = [t[:, 0] for t in test_attention.qkv(12, 12, 1)]
        cu = torch.tensor([0, 5, 12])
        conformance.called.clear()
        for _ in range(3):
            attention(*pack, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        assert len(conformance.called) == 3
        before = len(reads)
        attention(*pack, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        assert len(reads) == before
        cu[1] = 4
        attention(*pack, cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)
        assert len(reads) > before

    def test_a_pack_outside_its_tensors(self):
        pack = [t[:, 0] for t in test_attention.qkv(12, 12, 1)]
        for bad in ([1, 12], [0, 13], [0, 9, 7]):
            cu = torch.tensor(bad)
            with pytest.raises(ValueError, match="cu_seqlens_q must start at 0"):
                attention(*pack, cu_seqlens_q=cu, cu_seqlens_k=cu)
