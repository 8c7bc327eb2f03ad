"""Which attention kernel runs on CUDA: the fastest that is installed and takes the call.

`BACKENDS` is the table of them, `PREFERENCE` the order for each generation of GPUs, `plan` the choice with
the reasons of those passed over, which is logged once for each choice. `ACCEL_ATTENTION_BACKEND`, a name of
`BACKENDS` or "auto", puts one first; where that cannot take a call, the order goes on behind it.

All results are in the convention of `accel/ops/attention.py`: out contiguous, lse the natural logarithm,
`[B, H, Q]` or `[H, T]` fp32. So any back end may compute the gradients of another's forward. Dropout is
accel's own Triton kernel alone: its mask is part of the op's definition, and what others save of theirs
has no place in the op.

Nothing is imported before it is found and chosen. A package's functions, which are its own business and
change from release to release, compute a small call first: one that is wrong, or that raises, is told and
not used. The Triton kernel takes every call: wider rows than its blocks hold are refused before, by
`unsupported_reason` of `accel/ops/attention.py`.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel.log import log_once
from accel.ops._capture import is_capturing
from accel.ops._trial import mistake

__all__ = [
    "BACKENDS",
    "PREFERENCE",
    "VARIABLE",
    "Backend",
    "Call",
    "Plan",
    "backward",
    "describe",
    "forward",
    "plan",
    "preference",
]

VARIABLE = "ACCEL_ATTENTION_BACKEND"
AUTO = "auto"
NO_LIMIT = -1
FLASH_2_WIDE = ((8, 0), (9, 0), (10, 0))
"""With enough shared memory for FlashAttention-2's gradient of rows of 193 to 224."""
SEQUENCES_OF_A_GRID = 16
"""FlashAttention-2 starts blocks for (sequences x the longest one), which only the device knows: taken as
the whole pack, all but 1 in so many blocks find nothing to do."""

TOKENS_OF_A_TRIAL = 320
"""Some tiles of any library, and no whole number of them."""
ERROR_OF_A_TRIAL = 0.03
"""Norm of the error over that of the result. bf16 has some 0.005; another mask or layout has 0.1 and more."""


class Call(NamedTuple):
    """What a choice depends on: no tensor, nothing that waits for the device."""

    capability: tuple[int, int]
    dtype: torch.dtype
    num_queries: int
    num_keys: int
    batch: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    sequences: int | None = None
    """Of a pack, whose tokens are num_queries and num_keys; None if there is none."""
    same_starts: bool = False
    """The sequences of a pack have as many keys as queries, as far as can be seen."""
    left: int = NO_LIMIT
    right: int = NO_LIMIT
    dropout: bool = False
    aligned: bool = True
    """Rows of q, k and v are contiguous and begin at multiples of 16 bytes."""
    deterministic: bool = False

    @property
    def causal(self) -> bool:
        return self.left == NO_LIMIT and self.right == 0

    @property
    def full(self) -> bool:
        return self.left == self.right == NO_LIMIT

    @property
    def blind_queries(self) -> bool:
        """Whether some query may see no key at all."""
        if self.num_keys == 0 or (self.sequences is not None and not self.same_starts):
            return True
        return self.right != NO_LIMIT and self.num_queries > self.num_keys + self.right


class Arguments(NamedTuple):
    """The op's arguments but for the tensors of queries, keys and values."""

    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seed: Tensor | None
    scale: float
    left: int
    right: int
    dropout: float

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def is_causal(self) -> bool:
        return self.left == NO_LIMIT and self.right == 0

    def starts(self, q: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """cu_seqlens as int32 on the device of q."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return None, None
        starts_q = self.cu_seqlens_q.to(device=q.device, dtype=torch.int32)
        return starts_q, self.cu_seqlens_k.to(device=q.device, dtype=torch.int32)


Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Backend:
    """One library's attention."""

    name: str
    missing: Callable[[], str | None]
    """Why it cannot be imported; asked once."""
    unsupported_reason: Callable[[Call], str | None]
    forward: Callable[[Tensor, Tensor, Tensor, Arguments], tuple[Tensor, Tensor]]
    """q, k, v in the op's layout -> out, lse in the op's."""
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Arguments], Gradients]
    """dout, q, k, v, out, lse -> dq, dk, dv."""
    is_package: bool = False
    """Another's than PyTorch's and ours: used after a trial."""

    def on(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """To be called in: packages may launch on the current device's stream, wherever their tensors are."""
        current = device.type != "cuda" or device.index == torch.cuda.current_device()
        if self.is_package and not current:
            return torch.cuda.device(device)
        return contextlib.nullcontext()


class Plan(NamedTuple):
    """A choice, and why not those before it."""

    backend: str
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in self.skipped)
        return self.backend + (f" ({reasons})" if reasons else "")


# What every library but ours refuses.


def _never_elsewhere(call: Call) -> str | None:
    if call.capability < (8, 0):
        return f"sm_{call.capability[0]}{call.capability[1]}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"{call.dtype} (it takes bfloat16 and float16)"
    if call.dropout:
        return "dropout (its mask is not the op's)"
    if call.blind_queries:
        return "queries that may see no key"
    if not call.aligned or call.width % 8 or call.value_width % 8:
        return "rows that are not whole multiples of 16 bytes"
    return None


# Layouts. [S, B, H, D] is [B, S, H, D] with other strides; a pack is [T, H, D] everywhere.


def _batch_first(t: Tensor, packed: bool) -> Tensor:
    return t if packed else t.transpose(0, 1)


def _heads_first(t: Tensor) -> Tensor:
    """[S, B, H, D] as [B, H, S, D]."""
    return t.permute(1, 2, 0, 3)


def _own_layout(t: Tensor, packed: bool) -> Tensor:
    """[B, S, H, D] as [S, B, H, D], contiguous; no copy where the library kept the layout of q."""
    return (t if packed else t.transpose(0, 1)).contiguous()


def _own_lse(lse: Tensor, q: Tensor) -> Tensor:
    """[B, H, Q], perhaps with a last 1, or [H, T], as the op has it. No query is blind here."""
    shape = (*q.shape[1:-1], q.shape[0])
    if lse.dtype != torch.float32 or lse.numel() != q.numel() // q.shape[-1]:
        raise RuntimeError(
            f"attention: a back end returned an lse {list(lse.shape)} {lse.dtype} for q {list(q.shape)}; "
            f"set {VARIABLE}=triton and report it"
        )
    return lse.reshape(shape).contiguous()


def _blank_padding(starts: Tensor | None, *tensors: tuple[Tensor, int, float]) -> None:
    """Fill (tensor, dimension of tokens, value) after the last sequence, where a library wrote nothing."""
    if starts is None:
        return
    for t, dim, value in tensors:
        after = torch.arange(t.shape[dim], device=t.device) >= starts[-1]
        t.masked_fill_(after.view([-1 if d == dim else 1 for d in range(t.ndim)]), value)


# PyTorch's own: cuDNN, and the FlashAttention-2 that it carries.


def _missing_aten(*names: str) -> Callable[[], str | None]:
    def missing() -> str | None:
        absent = [n for n in names if not hasattr(torch.ops.aten, n)]
        return f"this PyTorch has no aten::{absent[0]}" if absent else None

    return missing


def _cudnn_missing() -> str | None:
    names = (
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    )
    if reason := _missing_aten(*names)():
        return reason
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if version and version >= 90100 else f"cuDNN {version} (it takes 9.1 or later)"


def _cudnn_unsupported(call: Call) -> str | None:
    if reason := _never_elsewhere(call):
        return reason
    if call.sequences is not None:
        return "a pack of sequences"
    if not (call.full or call.causal):
        return "a window"
    if call.causal and call.num_queries != call.num_keys:
        return "a causal mask from the top left, for more keys than queries"
    if call.deterministic:
        return "torch.use_deterministic_algorithms"
    if call.num_keys == 1:
        return "a single key"
    latent = call.capability[0] in (9, 10) and (call.width, call.value_width) == (192, 128)
    if not latent and max(call.width, call.value_width) > 128:
        return f"rows of {call.width} and {call.value_width}"
    return None


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        _heads_first(q), _heads_first(k), _heads_first(v), None, True, 0.0, a.is_causal(), False,
        scale=a.scale,
    )  # fmt: skip
    return out.permute(2, 0, 1, 3).contiguous(), _own_lse(lse, q)


def _cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # state of dropout
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(_heads_first(t) for t in (dout, q, k, v, out)), lse.unsqueeze(-1), unused, unused,
        None, None, None, q.shape[0], k.shape[0], 0.0, a.is_causal(), scale=a.scale,
    )  # fmt: skip
    dq, dk, dv = (g.permute(2, 0, 1, 3).contiguous() for g in grads)
    return dq, dk, dv


def _flash2_unsupported(call: Call) -> str | None:
    if reason := _never_elsewhere(call):
        return reason
    if call.width != call.value_width or call.width > 256:
        return f"rows of {call.width} and {call.value_width} (it takes one width of up to 256)"
    if 192 < call.width <= 224 and call.capability not in FLASH_2_WIDE:
        major, minor = call.capability
        return f"rows of {call.width} on sm_{major}{minor}, whose gradient it has not"
    if call.sequences is not None and call.sequences > SEQUENCES_OF_A_GRID:
        return f"more than {SEQUENCES_OF_A_GRID} sequences: each would start the blocks of the whole pack"
    return None


def _window(a: Arguments) -> dict[str, int | None]:
    """The window of aten, where None is no limit and a causal mask is one of its own."""
    if a.is_causal() or a.left == a.right == NO_LIMIT:
        return {"window_size_left": None, "window_size_right": None}
    return {"window_size_left": a.left, "window_size_right": a.right}


def _aten_flash_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    starts = a.starts(q)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *(_batch_first(t, a.packed) for t in (q, k, v)), *starts, q.shape[0], k.shape[0],
        0.0, a.is_causal(), False, scale=a.scale, **_window(a),
    )  # fmt: skip
    out, lse = _own_layout(out, a.packed), _own_lse(lse, q)
    _blank_padding(starts[0], (out, 0, 0.0), (lse, 1, -torch.inf))
    return out, lse


def _aten_flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    starts = a.starts(q)
    state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout
    grads = torch.ops.aten._flash_attention_backward(
        *(_batch_first(t, a.packed) for t in (dout, q, k, v, out)), lse, *starts,
        q.shape[0], k.shape[0], 0.0, a.is_causal(), state, state, scale=a.scale, **_window(a),
    )  # fmt: skip
    dq, dk, dv = (_own_layout(g, a.packed) for g in grads)
    _blank_padding(starts[0], (dq, 0, 0.0))
    _blank_padding(starts[1], (dk, 0, 0.0), (dv, 0, 0.0))
    return dq, dk, dv


# Packages of FlashAttention.


@functools.cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


def _missing_package(
    module: str, pip: str, functions: dict[str, Sequence[str]]
) -> Callable[[], str | None]:
    """Why `functions`, name -> parameters that are given by name, cannot be had of a module."""

    def missing() -> str | None:
        if not _found(module):
            return f"not installed (`pip install {pip}`)"
        try:
            imported = _module(module)
        except (ImportError, OSError) as error:  # built for another PyTorch, say
            return f"{module} cannot be imported: {error}"
        for name, wanted in functions.items():
            function = getattr(imported, name, None)
            if function is None:
                return f"{module} has no {name}"
            known = inspect.signature(function).parameters
            if lacking := [p for p in wanted if p not in known]:
                return f"{module}.{name} has no {lacking[0]}: another version than accel knows"
        return None

    return missing


FLASH_2 = "flash_attn.flash_attn_interface"
FLASH_3 = "flash_attn_interface"
FLASH_4 = "flash_attn.cute.interface"
_SHARED = ("softmax_scale", "window_size_left", "window_size_right")
_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
_GRADIENTS = ("dq", "dk", "dv", "deterministic", *_SHARED)
_FLASH_2_ONLY = ("dropout_p", "causal", "softcap", "alibi_slopes")
FLASH_2_FUNCTIONS: dict[str, Sequence[str]] = {
    "_flash_attn_forward": (*_FLASH_2_ONLY, *_SHARED, "return_softmax"),
    "_flash_attn_varlen_forward": (*_FLASH_2_ONLY, *_SHARED, *_LENGTHS, "return_softmax"),
    "_flash_attn_backward": (*_FLASH_2_ONLY, *_GRADIENTS, "softmax_lse"),
    "_flash_attn_varlen_backward": (*_FLASH_2_ONLY, *_GRADIENTS, *_LENGTHS, "softmax_lse"),
}
FLASH_3_FUNCTIONS: dict[str, Sequence[str]] = {
    "_flash_attn_forward": ("out_", "causal", *_SHARED, *_LENGTHS),
    "_flash_attn_backward": ("softmax_lse", "is_causal", *_GRADIENTS, *_LENGTHS),
}
FLASH_4_FUNCTIONS: dict[str, Sequence[str]] = {
    "_flash_attn_fwd": ("out", "causal", *_SHARED, *_LENGTHS, "return_lse"),
    "_flash_attn_bwd": ("lse", "causal", *_GRADIENTS, *_LENGTHS),
}


def _lengths(q: Tensor, k: Tensor, a: Arguments) -> dict[str, Any]:
    """The arguments of a pack. No sequence is longer than all of it: what the device need not be asked."""
    if not a.packed:
        return {}
    starts = a.starts(q)
    return {
        "cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1],
        "max_seqlen_q": q.shape[0], "max_seqlen_k": k.shape[0],
    }  # fmt: skip


def _flash_options(a: Arguments, causal: str = "causal") -> dict[str, Any]:
    sides = (NO_LIMIT, NO_LIMIT) if a.is_causal() else (a.left, a.right)
    return {
        "softmax_scale": a.scale,
        causal: a.is_causal(),
        "window_size_left": sides[0],
        "window_size_right": sides[1],
    }


def _results(t: Tensor, width: int, a: Arguments) -> Tensor:
    """An empty tensor like t in the op's layout, 0 in a pack, whose last tokens may be nobody's."""
    shape = (*t.shape[:-1], width)
    return t.new_zeros(shape) if a.packed else t.new_empty(shape)


def _forward_into(
    run: Callable, out: str, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, a: Arguments
) -> tuple[Tensor, Tensor]:
    """By a function that writes its result into the argument named `out`."""
    result = _results(q, v.shape[-1], a)
    _, lse, *_ = run(
        *(_batch_first(t, a.packed) for t in (q, k, v)), **{out: _batch_first(result, a.packed)},
        **_lengths(q, k, a), **options,
    )  # fmt: skip
    lse = _own_lse(lse, q)
    _blank_padding(a.starts(q)[0], (lse, 1, -torch.inf))
    return result, lse


def _backward_into(
    run: Callable,
    tensors: Sequence[Tensor],
    options: dict[str, Any],
    qkv: Sequence[Tensor],
    a: Arguments,
) -> Gradients:
    """By a function that takes `tensors` and writes the gradients of `qkv` into its dq, dk and dv."""
    q, k, _ = qkv
    dq, dk, dv = (_results(t, t.shape[-1], a) for t in qkv)
    run(
        *(_batch_first(t, a.packed) for t in tensors),
        dq=_batch_first(dq, a.packed), dk=_batch_first(dk, a.packed), dv=_batch_first(dv, a.packed),
        **_lengths(q, k, a), **options,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    return dq, dk, dv


FLASH_2_PLAIN = {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None}


def _flash2_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    module = _module(FLASH_2)
    run = module._flash_attn_varlen_forward if a.packed else module._flash_attn_forward
    out, lse, *_ = run(
        *(_batch_first(t, a.packed) for t in (q, k, v)), **_lengths(q, k, a), **_flash_options(a),
        **FLASH_2_PLAIN, return_softmax=False,
    )  # fmt: skip
    out, lse = _own_layout(out, a.packed), _own_lse(lse, q)
    _blank_padding(a.starts(q)[0], (out, 0, 0.0), (lse, 1, -torch.inf))
    return out, lse


def _flash2_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    module = _module(FLASH_2)
    run = module._flash_attn_varlen_backward if a.packed else module._flash_attn_backward
    options = {**_flash_options(a), **FLASH_2_PLAIN, "softmax_lse": lse}
    return _backward_into(run, (dout, q, k, v, out), options, (q, k, v), a)


def _flash3_unsupported(call: Call) -> str | None:
    if reason := _never_elsewhere(call):
        return reason
    if call.capability[0] != 9:
        return f"sm_{call.capability[0]}{call.capability[1]} (it is for sm_90)"
    mixed = call.width != call.value_width and (call.width, call.value_width) != (192, 128)
    if mixed or call.width > 256:
        return f"rows of {call.width} and {call.value_width}"
    if call.deterministic and call.width > 192:  # it computes these as 256
        return f"torch.use_deterministic_algorithms with rows of {call.width}"
    return None


def _flash3_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    run = _module(FLASH_3)._flash_attn_forward
    return _forward_into(run, "out_", _flash_options(a), q, k, v, a)


def _flash3_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    run = _module(FLASH_3)._flash_attn_backward
    options = {**_flash_options(a, "is_causal"), "softmax_lse": lse}
    return _backward_into(run, (dout, q, k, v, out), options, (q, k, v), a)


def _flash4_unsupported(call: Call) -> str | None:
    if reason := _never_elsewhere(call):
        return reason
    if call.capability[0] not in (9, 10):
        return f"sm_{call.capability[0]}{call.capability[1]} (it is for sm_90 and sm_100)"
    widths = (call.width, call.value_width)
    if max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        return f"rows of {call.width} and {call.value_width}"
    # its backward refuses these, in some of its releases
    hopper, widest = call.capability[0] == 9, widths == (256, 256)
    where = "with rows of 256" if widest else "on sm_90"
    if call.deterministic and (hopper or widest):
        return f"torch.use_deterministic_algorithms {where}"
    if not (call.full or call.causal) and (hopper or widest):
        return f"a window {where}"
    if call.sequences is not None and hopper:
        return f"a pack of sequences {where}"
    return None


def _flash4_options(a: Arguments) -> dict[str, Any]:
    options = _flash_options(a)
    for side in ("window_size_left", "window_size_right"):  # None is no limit
        options[side] = None if options[side] == NO_LIMIT else options[side]
    return options


def _flash4_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    run = _module(FLASH_4)._flash_attn_fwd
    return _forward_into(run, "out", {**_flash4_options(a), "return_lse": True}, q, k, v, a)


def _flash4_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    run = _module(FLASH_4)._flash_attn_bwd
    options = {**_flash4_options(a), "lse": lse}
    return _backward_into(run, (q, k, v, out, dout), options, (q, k, v), a)


# Ours.


def _triton_forward(q: Tensor, k: Tensor, v: Tensor, a: Arguments) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = _module("accel._triton.attention").forward(q, k, v, *a)
    return result


def _triton_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, a: Arguments
) -> Gradients:
    result: Gradients = _module("accel._triton.attention").backward(dout, q, k, v, out, lse, *a)
    return result


_ATEN_FLASH = ("_flash_attention_forward", "_flash_attention_backward")
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        Backend(
            "flash4", _missing_package(FLASH_4, "flash-attn-4", FLASH_4_FUNCTIONS),
            _flash4_unsupported, _flash4_forward, _flash4_backward, is_package=True,
        ),
        Backend(
            "flash3", _missing_package(FLASH_3, "flash-attn-3", FLASH_3_FUNCTIONS),
            _flash3_unsupported, _flash3_forward, _flash3_backward, is_package=True,
        ),
        Backend(
            "flash2", _missing_package(FLASH_2, "flash-attn", FLASH_2_FUNCTIONS),
            _flash2_unsupported, _flash2_forward, _flash2_backward, is_package=True,
        ),
        Backend("cudnn", _cudnn_missing, _cudnn_unsupported, _cudnn_forward, _cudnn_backward),
        Backend(
            "flash", _missing_aten(*_ATEN_FLASH), _flash2_unsupported,
            _aten_flash_forward, _aten_flash_backward,
        ),
        Backend("triton", lambda: None, lambda call: None, _triton_forward, _triton_backward),
    )
}  # fmt: skip

# TFLOP/s, bf16, rows of 128, causal. Measured on an H200 (8192 tokens, 32 heads over 8 groups, forward /
# backward): FlashAttention-4 (4.0.0b36) 702 / 545, cuDNN 572 / 490, our Triton kernel 453 forward,
# FlashAttention-2 291 / 264. Published for an H100 (16384 tokens, forward; figure 5 of FlashAttention-3,
# Shah et al. 2024, arXiv:2407.08608): FlashAttention-3 616, cuDNN 539, FlashAttention-2 335. On a B200
# FlashAttention-4 is 1.3 times as fast as cuDNN (its abstract). Before Hopper FlashAttention-2 is the best
# known.
PREFERENCE: dict[int, tuple[str, ...]] = {
    8: ("flash2", "flash", "cudnn", "triton"),
    9: ("flash4", "flash3", "cudnn", "triton", "flash2", "flash"),
    10: ("flash4", "cudnn", "triton", "flash2", "flash"),
}


def preference(capability: tuple[int, int]) -> tuple[str, ...]:
    """The names of back ends, best first, with what `VARIABLE` names before them.

    Raises:
        ValueError: it names none.
    """
    order = PREFERENCE.get(capability[0], PREFERENCE[8])
    wanted = os.environ.get(VARIABLE) or AUTO
    if wanted == AUTO:
        return order
    if wanted not in BACKENDS:
        raise ValueError(f"{VARIABLE}={wanted!r}: use one of {', '.join((AUTO, *BACKENDS))}")
    return (wanted, *(name for name in order if name != wanted))


@functools.cache
def _missing(name: str) -> str | None:
    return BACKENDS[name].missing()


def plan(call: Call, device: torch.device | None = None) -> Plan:
    """Who computes this call, and why not those before it. The gradient's may be another: it also asks how
    dout and out lie.

    Args:
        device: where packages are tried; without it they are taken at their word.
    """
    skipped: list[tuple[str, str]] = []
    for name in preference(call.capability):
        reason = BACKENDS[name].unsupported_reason(call) or _missing(name)
        if reason is None and device is not None and BACKENDS[name].is_package:
            reason = _mistake(name, trial_of(call), device)
        if reason is None:
            return Plan(name, tuple(skipped))
        skipped.append((name, reason))
    raise AssertionError("the Triton kernel takes every call")


def trial_of(call: Call) -> Call:
    """A small call of the same kind: the same mask, more or fewer keys than queries, heads in groups."""
    more_keys = call.num_keys - call.num_queries
    more_keys = 64 if more_keys > 0 else max(-64, more_keys)
    if call.sequences is not None:  # they begin where those of the queries do
        more_keys = max(0, more_keys)
    groups = min(call.kv_heads, 2)
    return call._replace(
        num_queries=TOKENS_OF_A_TRIAL,
        num_keys=TOKENS_OF_A_TRIAL + more_keys,
        batch=min(call.batch, 2),
        heads=call.heads // call.kv_heads * groups,
        kv_heads=groups,
        sequences=None if call.sequences is None else 3,
        left=min(call.left, 100),
        right=min(call.right, 100),
    )


@functools.lru_cache(maxsize=4096)
def _mistake(name: str, call: Call, device: torch.device) -> str | None:
    """What a library computes wrongly in this call, or raises; None if it is right."""
    reason = _tried(BACKENDS[name], call, device)
    if reason is not None:
        log_once("attention on CUDA", f"{name} is not used: {reason}")
    return reason


def _tried(backend: Backend, call: Call, device: torch.device) -> str | None:
    """The reference computes on the CPU: PyTorch's settings for CUDA are the user's."""
    from accel.ops.attention import attention_gradients_ref, attention_ref

    generator = torch.Generator().manual_seed(1)
    batch = () if call.sequences is not None else (call.batch,)
    q, k, v, dout = (
        torch.randn((tokens, *batch, heads, width), generator=generator).to(call.dtype)
        for tokens, heads, width in (
            (call.num_queries, call.heads, call.width),
            (call.num_keys, call.kv_heads, call.width),
            (call.num_keys, call.kv_heads, call.value_width),
            (call.num_queries, call.heads, call.value_width),
        )
    )
    starts = None
    if call.sequences is not None:  # of as many keys as queries, or the call was refused
        starts = torch.tensor([0, 100, 190, call.num_queries], dtype=torch.int32)
    there = None if starts is None else starts.to(device)
    arguments = Arguments(there, there, None, call.width**-0.5, call.left, call.right, 0.0)
    qkv = (q.to(device), k.to(device), v.to(device))
    window = (call.left, call.right)
    options: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "window": window}
    names = ("out", "lse", "dq", "dk", "dv")

    def results() -> Iterator[tuple[str, Tensor, Tensor]]:
        with backend.on(device):
            out, lse = backend.forward(*qkv, arguments)
            grads = backend.backward(dout.to(device), *qkv, out, lse, arguments)
        wide = (q.float(), k.float(), v.float())
        right = attention_ref(*wide, **options)
        right_grads = attention_gradients_ref(dout.float(), *wide, *right, **options)
        yield from zip(names, (out, lse, *grads), (*right, *right_grads), strict=True)

    return mistake(results, ERROR_OF_A_TRIAL)


@functools.lru_cache(maxsize=4096)
def _chosen(call: Call, device: torch.device) -> Backend:
    """Decided once for each kind of call, as long as the process lives."""
    if is_capturing(device):  # no trial could be waited for; what is not returned is not kept
        raise _Untried
    decision = plan(call, device)
    log_once("attention on CUDA", str(decision), logging.INFO)
    return BACKENDS[decision.backend]


class _Untried(Exception):
    """A CUDA graph is captured of a call of a kind that came never before."""


def _choose(call: Call, device: torch.device) -> Backend:
    """As tried; while a graph is captured, one of PyTorch's or ours where none has been chosen before."""
    try:
        return _chosen(call, device)
    except _Untried:
        names = (n for n in preference(call.capability) if not BACKENDS[n].is_package)
        return next(
            BACKENDS[n] for n in names if not (BACKENDS[n].unsupported_reason(call) or _missing(n))
        )


def describe(call: Call) -> str:
    """The choice for such calls, for a table at the start: packages are taken at their word there."""
    decision = plan(call)
    untried = BACKENDS[decision.backend].is_package
    return f"{decision}{', if a trial of it is right' if untried else ''}"


def _aligned(t: Tensor) -> bool:
    """Whether each row is contiguous and begins at a multiple of 16 bytes."""
    size = t.element_size()
    if t.stride(-1) != 1 or t.data_ptr() % 16:
        return False
    return all(
        stride * size % 16 == 0
        for stride, n in zip(t.stride()[:-1], t.shape, strict=False)
        if n > 1
    )


def _same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether both are the same elements, seen the same way."""
    if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
        return False
    return a.data_ptr() == b.data_ptr()


def _call(q: Tensor, k: Tensor, v: Tensor, a: Arguments, *others: Tensor) -> Call:
    capability = torch.cuda.get_device_capability(q.device)
    starts_q, starts_k = a.cu_seqlens_q, a.cu_seqlens_k
    same = (
        starts_q is not None
        and starts_k is not None
        and (starts_q is starts_k or _same_memory(starts_q, starts_k))
    )
    return Call(
        capability=(capability[0], capability[1]),
        dtype=q.dtype,
        num_queries=q.shape[0],
        num_keys=k.shape[0],
        batch=1 if a.packed else q.shape[1],
        heads=q.shape[-2],
        kv_heads=k.shape[-2],
        width=q.shape[-1],
        value_width=v.shape[-1],
        sequences=None if starts_q is None else starts_q.numel() - 1,
        same_starts=same,
        left=NO_LIMIT if a.left >= k.shape[0] else a.left,
        right=NO_LIMIT if a.right >= q.shape[0] else a.right,
        dropout=a.dropout > 0,
        aligned=all(_aligned(t) for t in (q, k, v, *others)),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )


def _empty(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return 0 in (q.numel(), k.numel(), v.numel())


def forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """`accel::attention_fwd` on CUDA."""
    a = Arguments(*arguments)
    if _empty(q, k, v):
        return _triton_forward(q, k, v, a)
    call = _call(q, k, v, a)
    a = a._replace(left=call.left, right=call.right)
    backend = _choose(call, q.device)
    with backend.on(q.device):
        return backend.forward(q, k, v, a)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *arguments: Any
) -> Gradients:
    """`accel::attention_bwd` on CUDA."""
    a = Arguments(*arguments)
    if _empty(q, k, v):
        return _triton_backward(dout, q, k, v, out, lse, a)
    call = _call(q, k, v, a, dout, out)
    a = a._replace(left=call.left, right=call.right)
    backend = _choose(call, q.device)
    with backend.on(q.device):
        return backend.backward(dout, q, k, v, out, lse.contiguous(), a)
