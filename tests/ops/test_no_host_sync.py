"""No op waits for a GPU: each runs on tensors that have no data.

They answer every question but those about their values: `.item()`, `.tolist()` and a branch on a number
raise. On a GPU each of these would empty the queue of launches. Forward the tensors are CUDA's, fake ones;
backward they are "meta", for autograd's engine wants a driver where it sees a CUDA tensor. The ops' fakes
stand in for their kernels; what launchers do is held by `compile_cases`, whose tensors have no data either.
"""

from collections.abc import Callable
from contextvars import ContextVar

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from accel import ops
from accel.ops._dispatch import missing_kernel

T, N, E = 24, 64, 8
DEVICE = ContextVar("DEVICE", default="meta")


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE.get(), dtype=torch.bfloat16).requires_grad_()


def labels(num: int) -> Tensor:
    return torch.zeros(num, dtype=torch.int64, device=DEVICE.get())


def packed_rope() -> Tensor:
    freqs = torch.zeros(T, 1, 1, 16, device=DEVICE.get())
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE.get())
    return ops.rope(bf16(T, 4, 16), freqs, bf16(T, 2, 16), cu_seqlens=starts)[0]


def packed_attention() -> Tensor:
    starts = torch.zeros(3, dtype=torch.int32, device=DEVICE.get())
    q, k, v = bf16(T, 4, 16), bf16(T, 2, 16), bf16(T, 2, 16)
    return ops.attention(q, k, v, causal=True, cu_seqlens_q=starts, cu_seqlens_k=starts)[0]


def cross_entropy() -> Tensor:
    logits = bf16(T, N) * 1
    return ops.cross_entropy(logits, labels(T), check_target=False, inplace=True)


def linear_cross_entropy() -> Tensor:
    return ops.linear_cross_entropy(bf16(T, N), bf16(100, N), labels(T), check_target=False)


def grouped_gemm() -> Tensor:
    counts = torch.zeros(E, dtype=torch.int64, device=DEVICE.get())
    return ops.grouped_gemm(bf16(T, N), bf16(E, N, 32), counts)


def permuted() -> Tensor:
    routing_map = torch.zeros(T, E, dtype=torch.bool, device=DEVICE.get())
    row_map = ops.moe_row_map(routing_map, 2 * T)
    rows, _ = ops.moe_permute(bf16(T, N), row_map, torch.rand(T, E, device=DEVICE.get()))
    return ops.moe_unpermute(rows, row_map, T)


def adamw() -> Tensor:
    params = [torch.zeros(N, device=DEVICE.get()) for _ in range(3)]
    steps = [torch.zeros((), device=DEVICE.get()) for _ in params]
    ops.adamw(
        params, [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params],
        [torch.zeros_like(p) for p in params], steps,
        lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1,
    )  # fmt: skip
    return params[0]


CALLS: dict[str, Callable[[], Tensor]] = {
    "rms_norm_fwd": lambda: ops.rms_norm(bf16(T, N), bf16(N)),
    "layer_norm_fwd": lambda: ops.layer_norm(bf16(T, N), bf16(N), bf16(N)),
    "add_rms_norm_fwd": lambda: ops.add_rms_norm(bf16(T, N), bf16(T, N), bf16(N))[0],
    "activation_fwd": lambda: ops.swiglu(
        bf16(T, 2 * N), bf16(2 * N), torch.rand(T, device=DEVICE.get())
    ),
    "rope": packed_rope,
    "attention_fwd": packed_attention,
    "masked_softmax_fwd": lambda: ops.masked_softmax(bf16(1, 2, T, T), causal=True),
    "cross_entropy_stats": cross_entropy,
    "cross_entropy_bwd": linear_cross_entropy,
    "grouped_gemm": grouped_gemm,
    "moe_row_map": permuted,
    "topk_router_fwd": lambda: ops.topk_router(bf16(T, E), 2)[0],
    "moe_aux_scores_fwd": lambda: ops.moe_aux_scores(bf16(T, E), 2)[1],
    "adamw_": adamw,
    "l2_norm": lambda: ops.l2_norm(
        [torch.zeros(N, device=DEVICE.get()), torch.zeros(3, device=DEVICE.get())]
    ),
}


@pytest.mark.parametrize("op", CALLS)
def test_forward_asks_for_no_value(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing_kernel(f"accel::{op}", "cuda") is None
    # Asked by rope, whose tables of a capture would not be kept: here they are not kept anyway.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    token = DEVICE.set("cuda")
    try:
        with FakeTensorMode(), torch.no_grad():
            assert CALLS[op]().device.type == "cuda"
    finally:
        DEVICE.reset(token)


@pytest.mark.parametrize("op", [op for op in CALLS if op not in ("adamw_", "l2_norm")])
def test_backward_asks_for_no_value(op: str) -> None:
    result = CALLS[op]()
    assert result.requires_grad
    result.backward(torch.empty_like(result))
