"""Part ops: every op beside eager PyTorch and, where they are, Liger, QuACK and others.

Each line is written as soon as it is measured, so that a run which is cut short goes on after the last.
Times and peers: `timing.py`; checks: `work.py`. bf16 unless said otherwise.

Bytes and operations, for T rows of N columns of 2 bytes:

    rms_norm, layer_norm   forward 2 T N elements; backward 3 T N
    add_rms_norm           forward 4 T N; backward 4 T N
    swiglu, geglu          forward 3 T F elements; backward 5 T F, for F columns of the result
    bias_gelu, squared_relu    forward 2 T F elements; backward 3 T F
    masked_softmax         of scores of S x S for each head: forward 2 elements; backward 3
    rope, qkv_rope         2 elements for each of q and k, and of v; ours with tables made once
    cross_entropy          logits read twice, their gradient written over them: 3 T V elements
    linear_cross_entropy   8 T H V operations: the logits forward and once more backward, two products for
                           the gradients (whole logits would need 6, and their memory)
    adamw                  28 bytes for each parameter with a 16-bit remainder
    l2_norm, scale         4 bytes for each element; 8
    attention              causal: 2 Q K D B H forward, 5 Q K D B H backward
    grouped_gemm           2 T K N operations; so its weight gradients into fp32 main_grad
    gemm_accumulate        2 M N K operations
    permute, unpermute     T + P rows of N elements
    topk_router            of fp32 logits, T x E: forward 9 bytes; backward 13
    moe_aux_scores         forward 9 bytes; backward 12

linear_cross_entropy gives each token's loss; Liger's gives their mean, which has a row of its own.

Not swept: fp16, other heads' widths than 128.
"""

import importlib
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accel.ops import (
    _launchers,
    _triton,
    adamw,
    add_rms_norm,
    attention,
    bias_gelu,
    cross_entropy,
    geglu,
    gemm_accumulate,
    grouped_gemm,
    l2_norm,
    layer_norm,
    linear_cross_entropy,
    masked_softmax,
    moe_aux_scores,
    moe_permute,
    moe_row_map,
    moe_unpermute,
    qkv_rope,
    rms_norm,
    scale,
    split_remainder,
    squared_relu,
    swiglu,
    topk_router,
)
from accel.ops._dispatch import missing_kernel
from accel.ops.grouped_gemm import accumulate_wgrad
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.timing import on_stream
from benchmarks.gpu.work import EAGER, LATE, OURS, Work, as_row, run

LIGER = "liger_kernel.transformers.functional"
RESERVE_SECONDS = 20.0
"""A case is not begun with less left: compilers alone may take that."""


def peer(module: str, make: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any] | str:
    """`make(module)`, or in words why the module is not there."""
    try:
        return make(importlib.import_module(module))
    except Exception as error:  # some raise RuntimeError without a GPU of their kind
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


class _Result(torch.autograd.Function):
    """What a layer before would hand on: no leaf and no view, and yet the memory of the input set."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(0).set_(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def norms(toy: bool) -> Iterator[Work]:
    for num_rows, num_cols in [(8, 64)] if toy else [(16384, 4096), (8192, 8192), (4096, 16384)]:
        shape, elements = f"{num_rows} x {num_cols}", num_rows * num_cols

        def xw(device: str, t: int = num_rows, n: int = num_cols, vectors: int = 1) -> tuple:
            return normal(t, n, device=device), *(normal(n, device=device) for _ in range(vectors))

        rms = {
            OURS: rms_norm,
            EAGER: lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
            "liger": peer(LIGER, lambda m: lambda x, w: m.liger_rms_norm(x, w, 1e-5)),
            "quack": peer("quack", lambda m: lambda x, w: m.rmsnorm(x, w, eps=1e-5)),
        }
        made = {"op": "rms_norm", "shape": shape, "make": xw, "sides": rms, "leaves": (0, 1)}
        yield Work(mode="forward", num_bytes=4 * elements, target_of_limit=4.0 / 4.3, **made)
        yield Work(mode="backward", num_bytes=6 * elements, target_of_limit=3.8 / 4.3, **made)
        if num_cols > 8192:
            continue
        layer = {
            OURS: layer_norm,
            EAGER: lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
            "liger": peer(LIGER, lambda m: lambda x, w, b: m.liger_layer_norm(x, w, b, 1e-5)),
        }
        made = {"op": "layer_norm", "shape": shape, "make": partial(xw, vectors=2), "sides": layer}
        yield Work(mode="forward", num_bytes=4 * elements, **made)
        yield Work(mode="backward", num_bytes=6 * elements, leaves=(0, 1, 2), **made)

        def xrw(device: str, t: int = num_rows, n: int = num_cols) -> tuple:
            return (
                normal(t, n, device=device),
                normal(t, n, device=device),
                normal(n, device=device),
            )

        def eager_add(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            total = x + residual
            return F.rms_norm(total, w.shape, w, 1e-5), total

        added = {
            OURS: add_rms_norm,
            EAGER: eager_add,
            "liger": peer(
                LIGER, lambda m: lambda x, r, w: m.liger_fused_add_rms_norm(x, r, w, 1e-5)
            ),
            "quack": peer(
                "quack",
                lambda m: lambda x, r, w: m.rmsnorm(x, w, residual=r, eps=1e-5, prenorm=True),
            ),
        }
        made = {"op": "add_rms_norm", "shape": shape, "make": xrw, "sides": added}
        yield Work(mode="forward", num_bytes=8 * elements, target_of_limit=4.0 / 4.3, **made)
        made |= {
            "leaves": (0, 1, 2),
            "outputs": 2,
        }  # the sum has a gradient of its own, as in a layer
        yield Work(mode="backward", num_bytes=8 * elements, **made)


def activations(toy: bool) -> Iterator[Work]:
    for num_rows, width in [(8, 32)] if toy else [(8192, 14336)]:
        shape, elements = f"{num_rows} x {width}", num_rows * width

        def x(device: str, t: int = num_rows, f: int = width) -> tuple:
            return (normal(t, 2 * f, device=device),)

        def halves(function: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: function(*x.chunk(2, dim=-1))

        gated = {
            "swiglu": (swiglu, lambda a, b: F.silu(a) * b, "liger_swiglu"),
            "geglu": (geglu, lambda a, b: F.gelu(a, approximate="tanh") * b, "liger_geglu"),
        }
        for op, (ours, plain, name) in gated.items():
            sides = {
                OURS: ours,
                EAGER: halves(plain),
                "liger": peer(LIGER, lambda m, n=name: halves(getattr(m, n))),
            }
            made = {"op": op, "shape": shape, "make": x, "sides": sides}
            yield Work(mode="forward", num_bytes=6 * elements, target_of_limit=4.0 / 4.3, **made)
            yield Work(mode="backward", num_bytes=10 * elements, target_of_limit=3.8 / 4.3, **made)

        def xb(device: str, t: int = num_rows, f: int = width, vectors: int = 1) -> tuple:
            return normal(t, f, device=device), *(normal(f, device=device) for _ in range(vectors))

        ungated = {
            "bias_gelu": (1, bias_gelu, lambda x, b: F.gelu(x + b, approximate="tanh")),
            "squared_relu": (0, squared_relu, lambda x: F.relu(x).square()),
        }
        for op, (vectors, ours, plain) in ungated.items():
            made = {"op": op, "shape": shape, "make": partial(xb, vectors=vectors), "last": True}
            made |= {"sides": {OURS: ours, EAGER: plain}, "leaves": range(1 + vectors)}
            yield Work(mode="forward", num_bytes=4 * elements, **made)
            yield Work(mode="backward", num_bytes=6 * elements, **made)


def softmaxes(toy: bool) -> Iterator[Work]:
    """Attention's scores under a mask of three documents, as of --reset-attention-mask."""
    heads, s = (2, 32) if toy else (8, 4096)

    def scores(device: str) -> tuple:
        document = torch.arange(s, device=device) * 3 // s
        later = torch.ones(s, s, dtype=torch.bool, device=device).triu(1)
        return normal(1, heads, s, s, device=device), later | (document[:, None] != document)

    def eager(x: Tensor, mask: Tensor) -> Tensor:
        return x.float().masked_fill(mask, -10000.0).softmax(-1).to(x.dtype)

    made = {"op": "masked_softmax", "shape": f"{heads} heads, S={s}", "make": scores}
    made |= {"sides": {OURS: masked_softmax, EAGER: eager}, "compiled": False, "last": True}
    elements = heads * s * s
    yield Work(mode="forward", num_bytes=4 * elements, **made)
    yield Work(mode="backward", num_bytes=6 * elements, **made)


def ropes(toy: bool) -> Iterator[Work]:
    s, heads, groups, d = (16, 2, 1, 32) if toy else (8192, 32, 8, 128)

    def qk(device: str) -> tuple:
        angles = torch.outer(
            torch.arange(s, device=device, dtype=torch.float32),
            1e4 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d),
        )
        freqs = torch.cat([angles, angles], -1)[:, None, None]
        tables = tuple(f(angles)[:, None].contiguous() for f in (torch.cos, torch.sin))
        q, k = (normal(s, 1, n, d, device=device) for n in (heads, groups))
        return q, k, freqs, tables

    def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def eager(q: Tensor, k: Tensor, freqs: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
        cos, sin = freqs.cos().to(q.dtype), freqs.sin().to(q.dtype)
        return rotated(q, cos, sin), rotated(k, cos, sin)

    def ours(q: Tensor, k: Tensor, freqs: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
        """As `rope` does with the tables that it keeps for all layers, but not for a captured graph."""
        return torch.ops.accel.rope([q, k], *tables, None, 1, 0, d, False, False, False)

    sides = {OURS: ours, EAGER: eager}
    num_bytes = 2 * 2 * s * (heads + groups) * d
    made = {"op": "rope", "shape": f"S={s}, {heads}+{groups} heads of {d}", "make": qk}
    made["outputs"] = 2
    made |= {"sides": sides, "num_bytes": num_bytes, "target_of_limit": 3.8 / 4.3}
    yield Work(mode="forward", **made)
    yield Work(mode="backward", leaves=(0, 1), compiled=False, last=True, **made)

    def product(device: str) -> tuple:
        *_, freqs, tables = qk(device)
        return normal(s, 1, groups, (heads // groups + 2) * d, device=device), freqs, tables

    def apart(qkv: Tensor, freqs: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
        if missing_kernel("accel::qkv_rope_fwd", qkv.device.type):
            return qkv_rope(qkv, freqs, d)
        return torch.ops.accel.qkv_rope_fwd(qkv, *tables, d, False)  # as `ours` above

    def eager_apart(qkv: Tensor, freqs: Tensor, tables: tuple[Tensor, Tensor]) -> Any:
        cos, sin = freqs.cos().to(qkv.dtype), freqs.sin().to(qkv.dtype)
        q, k, v = qkv.split([heads // groups * d, d, d], dim=-1)
        q = rotated(q.reshape(s, 1, heads, d), cos, sin)
        return q, rotated(k, cos, sin), v.contiguous()

    shape = f"S={s}, {groups} groups of {heads // groups}+2 heads of {d}"
    made = {"op": "qkv_rope", "shape": shape, "make": product, "outputs": 3}
    made |= {"sides": {OURS: apart, EAGER: eager_apart}, "target_of_limit": 3.8 / 4.3}
    made["num_bytes"] = 2 * 2 * s * (heads + 2 * groups) * d
    yield Work(mode="forward", **made)
    yield Work(mode="backward", compiled=False, last=True, **made)


def losses(toy: bool) -> Iterator[Work]:
    t, v, h = (8, 100, 16) if toy else (8192, 131072, 4096)

    def logits(device: str) -> tuple:
        return normal(t, v, device=device), torch.randint(v, (t,), device=device)

    # The gradient is written over the logits: a call after the first finds gradients there, which
    # take as long. Liger's is written in its forward.
    def ours(x: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(_Result.apply(x), target, check_target=False, inplace=True)

    def eager(x: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(x.float(), target, reduction="none")

    sides = {
        OURS: ours,
        EAGER: eager,
        "liger": peer(LIGER, lambda m: lambda x, y: m.liger_cross_entropy(x, y, reduction="none")),
        "quack": peer(
            "quack",
            lambda m: (
                lambda x, y: m.cross_entropy(
                    _Result.apply(x), y, reduction="none", inplace_backward=True
                )
            ),
        ),
    }
    yield Work(
        op="cross_entropy",
        shape=f"T={t}, V={v}",
        mode="both",
        make=logits,
        sides=sides,
        num_bytes=3 * 2 * t * v,
        target_us={"h200": 1700.0},
    )

    def hidden(device: str) -> tuple:
        weight = normal(v, h, device=device) * h**-0.5
        return normal(t, h, device=device), weight, torch.randint(v, (t,), device=device)

    def fused(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return linear_cross_entropy(x, w, y, check_target=False)

    sides = {
        OURS: fused,
        EAGER: lambda x, w, y: F.cross_entropy((x @ w.t()).float(), y, reduction="none"),
        "cut_cross_entropy": peer(
            "cut_cross_entropy",
            lambda m: lambda x, w, y: m.linear_cross_entropy(x, w, y, reduction="none"),
        ),
    }
    made = {"op": "linear_cross_entropy", "mode": "both", "make": hidden, "leaves": (0, 1)}
    made |= {"num_flops": 8 * t * h * v, "sustained": True, "compiled": False}
    shape = f"T={t}, H={h}, V={v}"
    yield Work(shape=shape, sides=sides, target_of_limit=0.9, **made)
    means = {
        OURS: lambda x, w, y: fused(x, w, y).mean(),
        EAGER: lambda x, w, y: F.cross_entropy((x @ w.t()).float(), y),
        "liger": peer(LIGER, lambda m: lambda x, w, y: m.liger_fused_linear_cross_entropy(x, w, y)),
    }
    yield Work(shape=f"{shape}, mean", sides=means, last=True, **made)


def optimizers(toy: bool) -> Iterator[Work]:
    sizes = [100, 64] if toy else [4096 * 4096] * 24

    def state(device: str) -> tuple:
        masters = [torch.randn(n, device=device) for n in sizes]
        halves, remainders = zip(*(split_remainder(m.clone()) for m in masters), strict=True)
        return (
            list(halves),
            [torch.randn(n, device=device) for n in sizes],
            [torch.zeros(n, device=device) for n in sizes],
            [torch.zeros(n, device=device) for n in sizes],
            [torch.zeros((), device=device) for _ in sizes],
            list(remainders),
            masters,
        )

    # A rate at which a step that is wrong or left out cannot pass the check: a tenth of the weights.
    knobs = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

    def ours(p: list, g: list, m: list, v: list, steps: list, low: list, masters: list) -> Tensor:
        adamw(p, g, m, v, steps, (), low, **knobs)
        return p[0]

    def fused(p: list, g: list, m: list, v: list, steps: list, low: list, masters: list) -> Tensor:
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            masters, g, m, v, [], steps, amsgrad=False, lr=0.1, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, maximize=False,
        )  # fmt: skip
        torch._foreach_copy_(p, masters)
        return p[0]

    yield Work(
        op="adamw",
        shape=f"{sum(sizes) / 1e6:.4g} M parameters in {len(sizes)} tensors",
        mode="forward",
        make=state,
        sides={OURS: ours, "torch fused and copy": fused},
        reference=fused,
        num_bytes=28 * sum(sizes),
        target_of_limit=0.95,
        compiled=False,
    )


def many_tensors(toy: bool) -> Iterator[Work]:
    """What clipping by itself needs: the norm of a model's gradients, and all of them times a number."""
    sizes = [100, 64] if toy else [4096 * 4096] * 64

    def gradients(device: str) -> tuple:
        return ([torch.randn(n, device=device) for n in sizes],)

    def scaled(tensors: list[Tensor]) -> list[Tensor]:
        scale(tensors, tensors, 0.9999)
        return tensors

    def foreach_scaled(tensors: list[Tensor]) -> list[Tensor]:
        torch._foreach_mul_(tensors, 0.9999)
        return tensors

    def foreach_norm(tensors: list[Tensor]) -> Tensor:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors)))

    made = {
        "shape": f"{sum(sizes) / 1e6:.4g} M fp32 elements in {len(sizes)} tensors",
        **{"mode": "forward", "make": gradients, "compiled": False},
    }
    n = sum(sizes)
    yield Work(op="l2_norm", sides={OURS: l2_norm, EAGER: foreach_norm}, num_bytes=4 * n, **made)
    yield Work(op="scale", sides={OURS: scaled, EAGER: foreach_scaled}, num_bytes=8 * n, **made)


def attentions(toy: bool) -> Iterator[Work]:
    shapes = [(32, 1, 2, 1, 32)] if toy else [(8192, 1, 32, 8, 128), (4096, 2, 32, 32, 128)]
    for s, b, h, g, d in shapes:

        def qkv(device: str, s: int = s, b: int = b, h: int = h, g: int = g, d: int = d) -> tuple:
            return tuple(normal(s, b, n, d, device=device) for n in (h, g, g))

        def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, causal=True)[0]

        def own_triton(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            """Also where another library's would be chosen."""
            from accel._triton.attention import forward

            return forward(q, k, v, None, None, None, q.shape[-1] ** -0.5, -1, 0, 0.0)[0]

        def sdpa(q: Tensor, k: Tensor, v: Tensor, backend: Any = None) -> Tensor:
            q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
            options = {"is_causal": True, "enable_gqa": q.shape[1] != k.shape[1]}
            if backend is None:
                return F.scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)
            with torch.nn.attention.sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, **options).permute(2, 0, 1, 3)

        kinds = torch.nn.attention.SDPBackend
        sides: dict[str, Callable[..., Any] | str] = {OURS: ours, EAGER: sdpa}
        if not toy:
            sides |= {
                "cudnn": partial(sdpa, backend=kinds.CUDNN_ATTENTION),
                "flash": partial(sdpa, backend=kinds.FLASH_ATTENTION),
                "flash-attn 3": peer(
                    "flash_attn_interface",
                    lambda m: (
                        lambda q, k, v: m.flash_attn_func(
                            *(t.transpose(0, 1) for t in (q, k, v)), causal=True
                        ).transpose(0, 1)
                    ),
                ),
                "flash-attn 4": peer(
                    "flash_attn.cute",
                    lambda m: (
                        lambda q, k, v: m.flash_attn_func(
                            *(t.transpose(0, 1) for t in (q, k, v)), causal=True
                        )[0].transpose(0, 1)
                    ),
                ),
            }
        made = {"op": "attention", "shape": f"S={s}, B={b}, {h}+{g} heads of {d}", "make": qkv}
        flops = 2 * s * s * d * b * h
        common = {"sides": sides, "leaves": (0, 1, 2), "compiled": False, **made}
        over = 0.98  # ours is one of them, in the op's layout
        yield Work(mode="forward", num_flops=flops, target_over_best=over, **common)
        yield Work(mode="backward", num_flops=5 * flops // 2, target_over_best=over, **common)
        alone = {OURS: own_triton, EAGER: sdpa}
        yield Work(
            **{**common, **made, "op": "attention by Triton", "sides": alone},
            mode="forward",
            num_flops=flops,
            target_us={"h200": 1e6 * flops / 450e12} if s == 8192 else {},
        )


def experts(toy: bool) -> Iterator[Work]:
    t, e, k, n, topk, h = (32, 4, 16, 24, 2, 16) if toy else (65536, 64, 4096, 2048, 8, 4096)

    def routed(device: str) -> tuple:
        weights = torch.rand(e).pow(2) + 0.1
        counts = torch.multinomial(weights, t, replacement=True).bincount(minlength=e)
        w = normal(e, k, n, device=device) * k**-0.5
        return normal(t, k, device=device), w, counts.to(device)

    def stock(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        parts = x.split(counts.tolist())
        return torch.cat([p @ w[i] for i, p in enumerate(parts)])

    def library(x: Tensor, w: Tensor, counts: Tensor) -> Tensor:
        return torch._grouped_mm(x, w, offs=counts.cumsum(0).to(torch.int32))

    sides = {OURS: grouped_gemm, EAGER: stock}
    sides |= {} if toy else {"torch._grouped_mm": library}
    made = {"op": "grouped_gemm", "shape": f"{e} experts, {t} x {k} x {n}", "make": routed}
    made |= {"sides": sides, "leaves": (0, 1), "compiled": False, "target_over_best": 1.0}
    yield Work(mode="forward", num_flops=2 * t * k * n, **made)
    yield Work(mode="backward", num_flops=4 * t * k * n, **made)

    def gradients(device: str) -> tuple:
        x, _, counts = routed(device)
        main_grad = normal(e, k, n, dtype=torch.float32, device=device)
        return normal(t, n, device=device), x, main_grad, counts

    def added(dy: Tensor, x: Tensor, main_grad: Tensor, counts: Tensor) -> Tensor:
        accumulate_wgrad(dy, x, counts, main_grad)
        return main_grad

    def added_by_stock(dy: Tensor, x: Tensor, main_grad: Tensor, counts: Tensor) -> Tensor:
        parts = (tensor.split(counts.tolist()) for tensor in (x, dy))
        for grad, rows, of_rows in zip(main_grad, *parts, strict=True):
            grad.add_(rows.t() @ of_rows)
        return main_grad

    def added_by_library(dy: Tensor, x: Tensor, main_grad: Tensor, counts: Tensor) -> Tensor:
        offsets = counts.cumsum(0).to(torch.int32)
        return main_grad.add_(torch._grouped_mm(x.t(), dy, offs=offsets))

    yield Work(
        op="grouped_gemm_wgrad", mode="forward", make=gradients, num_flops=2 * t * k * n, last=True,
        sides={OURS: added, EAGER: added_by_stock}
        | ({} if toy else {"torch._grouped_mm": added_by_library}),
        shape=f"{e} experts, {k} x {n} += {t} rows", compiled=False,
    )  # fmt: skip

    tokens = t // topk

    def map_of(device: str) -> Tensor:
        chosen = torch.rand(tokens, e, device=device).topk(topk, dim=1).indices
        routing_map = torch.zeros(tokens, e, dtype=torch.bool, device=device)
        return routing_map.scatter_(1, chosen, True)

    def permuted(device: str) -> tuple:
        return normal(tokens, h, device=device), moe_row_map(map_of(device), tokens * topk)

    def eager_permute(x: Tensor, row_map: Tensor) -> Tensor:
        return x.index_select(0, row_map % tokens)

    both = {"shape": f"{tokens} tokens to {topk} of {e} experts, H={h}", "target_of_limit": 0.75}
    both["num_bytes"] = 2 * h * (tokens + tokens * topk)
    made = {"op": "moe_permute", "make": permuted, **both}
    made["sides"] = {OURS: moe_permute, EAGER: eager_permute}
    yield Work(mode="forward", **made)
    yield Work(mode="backward", compiled=False, last=True, **made)

    def rows(device: str) -> tuple:
        return normal(tokens * topk, h, device=device), moe_row_map(map_of(device), tokens * topk)

    def eager_unpermute(y: Tensor, row_map: Tensor) -> Tensor:
        out = torch.zeros(tokens, h, dtype=y.dtype, device=y.device)
        return out.index_add_(0, row_map % tokens, y)

    def reference(y: Tensor, row_map: Tensor) -> Tensor:
        return eager_unpermute(y.float(), row_map)

    made = {"op": "moe_unpermute", "make": rows, "reference": reference, **both}
    made["sides"] = {OURS: lambda y, m: moe_unpermute(y, m, tokens), EAGER: eager_unpermute}
    yield Work(mode="forward", **made)
    yield Work(mode="backward", compiled=False, last=True, **made)

    def router_logits(device: str) -> tuple:
        return (normal(tokens, e, dtype=torch.float32, device=device),)

    def eager_router(x: Tensor) -> Tensor:
        values, chosen = x.topk(topk, dim=1)
        return torch.zeros_like(x).scatter(1, chosen, values.softmax(-1))

    made = {"shape": f"{tokens} tokens, {topk} of {e} experts", "make": router_logits}
    sides = {OURS: lambda x: topk_router(x, topk)[0], EAGER: eager_router}
    router = {"op": "topk_router", "sides": sides, **made}
    yield Work(mode="forward", num_bytes=tokens * e * (4 + 4 + 1), **router)
    late = {"compiled": False, "last": True}
    yield Work(mode="backward", num_bytes=tokens * e * (4 + 1 + 4 + 4), **router, **late)

    def eager_scores(x: Tensor) -> tuple[Tensor, Tensor]:
        scores = x.softmax(-1)
        routing_map = torch.zeros_like(x, dtype=torch.bool)
        return scores, routing_map.scatter(1, scores.topk(topk, dim=1).indices, True)

    sides = {OURS: lambda x: moe_aux_scores(x, topk)[::-1], EAGER: eager_scores}
    aux = {"op": "moe_aux_scores", "sides": sides, **made, **late}
    yield Work(mode="forward", num_bytes=tokens * e * (4 + 4 + 1), **aux)
    yield Work(mode="backward", num_bytes=tokens * e * (4 + 4 + 4), **aux)


def weight_gradients(toy: bool) -> Iterator[Work]:
    """Of a linear layer, added to fp32 main_grad."""
    m, n, k = (24, 16, 32) if toy else (14336, 4096, 8192)

    def tensors(device: str) -> tuple:
        out = normal(m, n, dtype=torch.float32, device=device)
        return out, normal(k, m, device=device), normal(k, n, device=device)

    def ours(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        gemm_accumulate(out, a, b)
        return out

    def in_fp32(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.ops.aten.addmm.dtype_out(out, a.t(), b, torch.float32, out=out)

    sides = {OURS: ours, EAGER: lambda out, a, b: out.add_(a.t() @ b)}
    sides |= {} if toy else {"torch.addmm": in_fp32}
    yield Work(
        op="gemm_accumulate", mode="forward", shape=f"{m} x {n} += {k} rows", make=tensors, sides=sides,
        num_flops=2 * m * n * k, compiled=False, last=True,
    )  # fmt: skip


def small(toy: bool) -> Iterator[Work]:
    """Host time: what launching costs where the work is next to nothing. Target: 80 us in all."""

    def xw(device: str) -> tuple:
        return normal(64, 256, device=device), normal(256, device=device)

    sides = {
        OURS: rms_norm,
        EAGER: lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        "liger": peer(LIGER, lambda m: lambda x, w: m.liger_rms_norm(x, w, 1e-5)),
    }
    yield Work(
        op="rms_norm", shape="64 x 256, host time", mode="both", make=xw, sides=sides,
        leaves=(0, 1), num_bytes=10 * 64 * 256, host_target_us=80.0, compiled=False,
    )  # fmt: skip


GROUPS = (
    *(norms, activations, ropes, losses, optimizers, many_tensors),
    *(attentions, experts, small, softmaxes, weight_gradients),
)


def works(toy: bool) -> Iterator[Work]:
    yield from sorted((work for group in GROUPS for work in group(toy)), key=lambda work: work.last)


def without_late(works: Iterator[Work]) -> Iterator[Work]:
    """Their sides but for those that part compiled_ops times."""
    for work in works:
        yield replace(work, sides={s: f for s, f in work.sides.items() if s not in LATE})


def sweep(
    setting: Setting, works: Iterator[Work], lines: Path, timed: Collection[str] | None = None
) -> int:
    """Measure what is not in `lines` yet, a line for each work; of the sides, those in `timed` or all.

    Returns the part's exit code.
    """
    torch.manual_seed(1)
    ceilings_file = setting.folder / "ceilings.json"
    if not ceilings_file.exists():
        print("no ceilings.json: part ceilings comes first")
        return 1
    limits = json.loads(ceilings_file.read_text())
    rows = [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []
    done = {(row["op"], row["mode"], row["shape"]) for row in rows}
    stream = None if setting.rehearse else on_stream()
    interpreted = torch.library.Library("accel", "IMPL")
    if setting.rehearse:
        _launchers.register(_triton.PACKAGE, interpreted, "CPU", override=True)
    else:
        _triton.reason()  # some sides call kernels that no op has asked for
    failed = False
    with torch.cuda.stream(stream):
        for work in works:
            if (work.op, work.mode, work.shape) in done:
                continue
            if setting.seconds_left < RESERVE_SECONDS:
                print(f"no time left for {work.name} and what follows; run the command again")
                return 1
            try:
                results = run(work, setting.device, stream, timed)
            except Exception as error:
                print(f"{work.name}: {type(error).__name__}: {error}", flush=True)
                failed = True
                continue
            row = as_row(work, results, limits, setting.machine)
            with lines.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{work.name}: {results}", flush=True)
            torch._dynamo.reset()
            if not setting.rehearse:
                torch.cuda.empty_cache()
    return 1 if failed else 0


def main() -> int:
    setting = Setting.from_argv()
    return sweep(setting, without_late(works(setting.rehearse)), setting.folder / "ops.jsonl")


if __name__ == "__main__":
    sys.exit(main())
