"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of queries and keys, in one call.

    pair j of a head        y1 = x1 cos a1 - x2 sin a1      y2 = x2 cos a2 + x1 sin a2
    backward                dx1 = dy1 cos a1 + dy2 sin a2   dx2 = dy2 cos a2 - dy1 sin a1

a1 and a2 are the two entries of `freqs` for the pair; every model makes them equal, and then this is
a rotation by the angle, and its backward the rotation back. Where the members of a pair lie:

    half                    j and j + R/2 (GPT-NeoX, Llama: "rotate half")
    interleaved             2 j and 2 j + 1 (GPT-J, RoFormer)
    interleaved_to_half     come in as 2 j and 2 j + 1 and go out as j and j + R/2 (DeepSeek's MLA)

Letters     S  positions; B  batch; T  tokens of packed sequences; D  the head's width; R  how much of
            it is rotated, freqs' width: the rest is copied
Dtypes      q, k: float32, bfloat16 or float16. freqs: fp32 angles. Cosines, sines and all arithmetic
            are fp32, rounded once on the way out (stock rounds cos, sin, both products and the sum).
Saved       cos and sin, which all layers share; not q, k or the result.
Moved       read and written once. q and k may be any views whose last dimension is dense, say slices
            of a fused qkv: they are read where they lie.
Tables      cos and sin are computed once per freqs tensor (storage, view and version) and kept as
            long as its storage lives: half as wide as freqs where a1 = a2, so as many bytes as freqs.
            Not within `torch.compile`, not while a CUDA graph is captured, and not for inference
            tensors, which have no version. The host does not wait for a GPU to learn whether
            a1 = a2: until it has heard, it takes the whole width, which gives the same bits. Where hooks
            take what autograd saves it waits, once for each tensor of angles: a checkpoint that computes
            again must find tables of the same width.
Lengths     On the CPU, and to the reference, `cu_seqlens` that do not fit are an error. A GPU's are read
            by the kernel alone, since the host would have to wait for them: there, a token in no sequence
            or with a position beyond `freqs`, and all of a sequence that does not split into its
            context-parallel chunks, come out as NaN.
Limits      `unsupported_reason`.
"""

import itertools
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from accel.ops._capture import is_capturing
from accel.ops._dispatch import log_fallback, missing_kernel, unsupported_dtype
from accel.ops._placement import check_at_hand
from accel.ops._saving import hooks_take_saved

__all__ = ["Layout", "packed_rows", "rope", "rope_ref", "tables_of", "unsupported_reason"]

Layout = Literal["half", "interleaved", "interleaved_to_half"]


def rope_ref(
    q: Tensor,
    freqs: Tensor,
    k: Tensor | None = None,
    *,
    layout: Layout = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """The definition of correct: Megatron's own chain of operations. Same contract as `rope`."""
    if cu_seqlens is not None:
        rows = packed_rows(cu_seqlens.tolist(), cp_size, cp_rank, len(q), len(freqs))
        freqs = freqs[rows.to(freqs.device)]

    def rotated(x: Tensor) -> Tensor:
        angles = freqs[: x.shape[0]] if x.ndim == 4 else freqs[:, 0]
        cos, sin = ((f(angles) * mscale).to(x.dtype) for f in (torch.cos, torch.sin))
        width = freqs.shape[-1]
        turning, kept = x[..., :width], x[..., width:]
        if layout == "interleaved_to_half":
            turning = torch.cat((turning[..., 0::2], turning[..., 1::2]), dim=-1)
        if layout == "interleaved":
            partner = torch.stack((-turning[..., 1::2], turning[..., 0::2]), dim=-1).flatten(-2)
        else:
            first, second = turning.chunk(2, dim=-1)
            partner = torch.cat((-second, first), dim=-1)
        return torch.cat((turning * cos + partner * sin, kept), dim=-1)

    return rotated(q), None if k is None else rotated(k)


def packed_rows(
    starts: list[int], cp_size: int, cp_rank: int, num_tokens: int, num_rows: int
) -> Tensor:
    """`[T]` the row of freqs for each token of this context-parallel rank.

    Raises:
        ValueError: sequences that do not fit, unless they are traced.
    """
    if not torch.compiler.is_compiling():
        _check_starts(starts, cp_size, num_tokens)
    rows = []
    for start, end in itertools.pairwise(starts):
        offset = start if starts[-1] == num_rows else 0  # a row for each token, else restart
        if cp_size == 1:
            rows.append(torch.arange(offset, offset + end - start))
            continue
        chunk = (end - start) // cp_size // 2
        for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
            rows.append(torch.arange(chunk) + offset + index * chunk)
    row_of_token = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    if not torch.compiler.is_compiling():
        beyond = row_of_token[(row_of_token < 0) | (row_of_token >= num_rows)]
        if len(beyond):
            raise ValueError(f"rope: position {beyond[0]} is beyond the {num_rows} rows of freqs")
    return row_of_token


def _check_starts(starts: list[int], cp_size: int, num_tokens: int) -> None:
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        if end < start or (cp_size > 1 and (end - start) % (2 * cp_size)):
            raise ValueError(
                f"rope: cu_seqlens must not fall, and over {cp_size} context-parallel ranks each length "
                f"must split in 2 chunks for each; sequence {i} is [{start}, {end})"
            )
    held = (starts[-1] - starts[0]) // cp_size
    if held != num_tokens:
        raise ValueError(
            f"rope: cu_seqlens hold {held} tokens of this context-parallel rank, q has {num_tokens}"
        )


def unsupported_reason(q: Tensor, freqs: Tensor, k: Tensor | None = None) -> str | None:
    """Why `rope` takes the reference for valid inputs; None if it takes the kernel."""
    if reason := unsupported_dtype(q.dtype):
        return reason
    if freqs.requires_grad:
        return "freqs require a gradient (the kernels give none to angles)"
    return missing_kernel("accel::rope", q.device.type)


torch.library.define(
    "accel::rope",
    "(Tensor[] xs, Tensor cos, Tensor sin, Tensor? cu_seqlens, int cp_size, int cp_rank,"
    " int rotary_dim, bool interleaved_in, bool interleaved_out, bool inverse) -> Tensor[]",
)
_rope = torch.ops.accel.rope.default


@torch.library.register_fake("accel::rope")
def _rope_fake(xs: list[Tensor], *options: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in xs]


def _save(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    _, cos, sin, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(cos, sin, cu_seqlens)


def _gradients(ctx: Any, dys: list[Tensor]) -> tuple[list[Tensor] | None, ...]:
    cp_size, cp_rank, rotary_dim, interleaved_in, interleaved_out, inverse = ctx.options
    dxs = _rope(
        dys,
        *ctx.saved_tensors,
        cp_size,
        cp_rank,
        rotary_dim,
        interleaved_out,
        interleaved_in,
        not inverse,
    )
    return dxs, *[None] * 9


torch.library.register_autograd("accel::rope", _gradients, setup_context=_save)


class _OneAngle:
    """Whether both members of every pair have one angle, without waiting for a GPU to say so."""

    def __init__(self, tables: "Tables") -> None:
        same = [(a == b).all() for a, b in (t.chunk(2, dim=-1) for t in (tables.cos, tables.sin))]
        self.said = torch.logical_and(*same)
        self.when: torch.cuda.Event | None = None
        if self.said.is_cuda:
            on_host = torch.empty((), dtype=torch.bool, pin_memory=True)
            self.said = on_host.copy_(self.said, non_blocking=True)
            self.when = torch.cuda.Event()
            self.when.record(torch.cuda.current_stream(tables.cos.device))

    def answer(self, wait: bool) -> bool | None:
        """None for not yet; of angles without data, always."""
        if (event := self.when) is not None and wait:
            event.synchronize()
        if self.said.is_meta or (event is not None and not event.query()):
            return None
        return bool(self.said)


class _Written:
    """When kernels of a stream have computed tensors, for readers on others."""

    def __init__(self, *tensors: Tensor) -> None:
        self.tensors = [t for t in tensors if t.is_cuda]
        if self.tensors:
            self.stream = torch.cuda.current_stream(self.tensors[0].device)
            self.when = torch.cuda.Event()
            self.when.record(self.stream)

    def wait(self) -> None:
        """Let the current stream read them."""
        if not self.tensors:
            return
        stream = torch.cuda.current_stream(self.tensors[0].device)
        if stream != self.stream:
            stream.wait_event(self.when)
            for t in self.tensors:
                t.record_stream(stream)


class Tables(NamedTuple):
    """cos and sin, fp32 `[rows, 1 or B, R]`, or `[..., R/2]` where both members of a pair have one
    angle."""

    cos: Tensor
    sin: Tensor
    one_angle: _OneAngle | None = None
    """Asked, and not yet answered."""
    written: _Written | None = None
    """Where they are kept."""


VIEWS_KEPT = 16
"""Of one tensor of angles: more than the layers, ranks and micro-batches of a training step ask for."""


class _TablesOfFreqs:
    """Tables by the storage that the angles lie in: layers slice, expand and detach one tensor."""

    def __init__(self) -> None:
        self.by_storage: dict[StorageWeakRef, dict[tuple, Tables]] = {}

    def get(self, freqs: Tensor, layout: Layout, mscale: float) -> Tables:
        if torch.compiler.is_compiling() or freqs.is_inference():
            return _tables(freqs, layout, mscale)
        if is_capturing(freqs.device):  # its replays may have other angles in this memory
            return self._in_graph(freqs, layout, mscale)
        storage = StorageWeakRef(freqs.untyped_storage())
        tables_by_view = self.by_storage.get(storage)
        if tables_by_view is None:
            self.by_storage = {s: t for s, t in self.by_storage.items() if not s.expired()}
            tables_by_view = self.by_storage.setdefault(storage, {})
        key = self._key(freqs, layout, mscale)
        if key not in tables_by_view:
            for stale in [k for k in tables_by_view if k[4] != freqs._version]:
                del tables_by_view[stale]
            if len(tables_by_view) == VIEWS_KEPT:  # generation asks for another length each time
                del tables_by_view[next(iter(tables_by_view))]
            with torch.inference_mode(False):  # the next training step is given them too
                tables = _tables(freqs, layout, mscale)
                one_angle = _OneAngle(tables)
            tables_by_view[key] = tables._replace(
                one_angle=one_angle, written=_Written(tables.cos, tables.sin)
            )
        tables = tables_by_view[key]
        if tables.written is not None:
            tables.written.wait()
        if tables.one_angle is not None:
            with torch.inference_mode(False):
                tables = tables_by_view[key] = _without_twins(tables)
        return tables

    def _in_graph(self, freqs: Tensor, layout: Layout, mscale: float) -> Tables:
        """Made anew at each replay; of half the width where both members of a pair are known to have the
        same angle, which a graph cannot look at."""
        tables = _tables(freqs, layout, mscale)
        known = self.by_storage.get(StorageWeakRef(freqs.untyped_storage()), {})
        before = known.get(self._key(freqs, layout, mscale))
        if before is not None and before.cos.shape[-1] < tables.cos.shape[-1]:
            cos, sin = (t.chunk(2, dim=-1)[0].contiguous() for t in tables[:2])
            return Tables(cos, sin)
        return tables

    @staticmethod
    def _key(freqs: Tensor, layout: Layout, mscale: float) -> tuple:
        view = (freqs.storage_offset(), freqs.shape, freqs.stride(), freqs.dtype)
        return (*view, freqs._version, layout == "interleaved", mscale)


_TABLES = _TablesOfFreqs()


def _tables(freqs: Tensor, layout: Layout, mscale: float) -> Tables:
    """First members of all pairs, then second members, whatever the layout."""
    angles = freqs.detach().squeeze(2)
    if layout == "interleaved":
        angles = torch.cat((angles[..., 0::2], angles[..., 1::2]), dim=-1)
    cos, sin = (f(angles).float().contiguous() for f in (torch.cos, torch.sin))
    return Tables(cos, sin) if mscale == 1 else Tables(cos * mscale, sin * mscale)


def _without_twins(tables: Tables) -> Tables:
    """Half the width where both members of every pair have one angle, once that is known, or must be."""
    same = None if tables.one_angle is None else tables.one_angle.answer(wait=hooks_take_saved())
    if same is None:
        return tables
    cos, sin = tables.cos, tables.sin
    if same:
        cos, sin = (t.chunk(2, dim=-1)[0].contiguous() for t in (cos, sin))
    return Tables(cos, sin, written=_Written(cos, sin))


def rope(
    q: Tensor,
    freqs: Tensor,
    k: Tensor | None = None,
    *,
    layout: Layout = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first R elements of every head of q, and of k, by its position's angles.

    Args:
        q: `[S, B, heads, D]`, or `[T, heads, D]` of packed sequences; any float dtype.
        freqs: `[positions, 1 or B, 1, R]` angles in radians, R even and at most D; it has at least S
            rows, or for packed sequences as many as the longest has tokens. With exactly as many rows
            as all sequences have tokens, each token has its own.
        k: like q, with its own number of heads and width; None for q alone.
        layout: where the members of a pair lie, see above.
        mscale: factor on cos and sin (YaRN's concentration).
        cu_seqlens: `[sequences + 1]` int32 or int64 on the CPU or the device of q, where each packed
            sequence starts in the whole batch; given exactly if q is `[T, heads, D]`.
        cp_size, cp_rank: of packed sequences, q holds chunks `cp_rank` and `2 cp_size - 1 - cp_rank`
            of the `2 cp_size` that each sequence is cut into.

    Returns:
        q and k, rotated; contiguous.

    Raises:
        ValueError: an input of the wrong rank, shape, dtype or device; on the CPU, lengths that do not
            fit (on a GPU they give NaN, see above).

    Where `unsupported_reason` has something to say, that is logged once and `rope_ref` computes
    instead.
    """
    _check(q, freqs, k, layout, cu_seqlens, cp_size, cp_rank)
    if reason := unsupported_reason(q, freqs, k):
        log_fallback("rope", reason)
        return rope_ref(
            q,
            freqs,
            k,
            layout=layout,
            mscale=mscale,
            cu_seqlens=cu_seqlens,
            cp_size=cp_size,
            cp_rank=cp_rank,
        )
    xs = [q] if k is None else [q, k]
    if cu_seqlens is not None:
        xs = [x.unsqueeze(1) for x in xs]
    tables = _TABLES.get(freqs, layout, mscale)
    ys = _rope(
        xs,
        tables.cos,
        tables.sin,
        cu_seqlens,
        cp_size,
        cp_rank,
        freqs.shape[-1],
        layout != "half",
        layout == "interleaved",
        False,
    )
    if cu_seqlens is not None:
        ys = [y.squeeze(1) for y in ys]
    return ys[0], None if k is None else ys[1]


def tables_of(x: Tensor, freqs: Tensor, layout: Layout) -> Tables:
    """The tables of `freqs`, which all layers share, for x `[S, B, ...]` that is not packed.

    Raises:
        ValueError: freqs that do not fit x.
    """
    _check_freqs(x, freqs, None)
    return _TABLES.get(freqs, layout, 1.0)


def _check(
    q: Tensor,
    freqs: Tensor,
    k: Tensor | None,
    layout: str,
    cu_seqlens: Tensor | None,
    cp_size: int,
    cp_rank: int,
) -> None:
    rank = 4 if cu_seqlens is None else 3
    shape = "[S, B, heads, D]" if cu_seqlens is None else "[T, heads, D] (cu_seqlens are given)"
    if layout not in get_args(Layout):
        raise ValueError(f"rope: layout must be one of {get_args(Layout)}, got {layout!r}")
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if x.ndim != rank:
            raise ValueError(f"rope: {name} must have shape {shape}, got {list(x.shape)}")
        if not x.is_floating_point() or x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"rope: {name} must be of a floating dtype and like q, {q.dtype} on {q.device}, got "
                f"{x.dtype} on {x.device}"
            )
        if x.shape[: rank - 2] != q.shape[: rank - 2]:
            raise ValueError(
                f"rope: {name} must have q's leading dimensions, {list(q.shape[: rank - 2])}, got "
                f"{list(x.shape)}"
            )
        if freqs.shape[-1] > x.shape[-1]:
            raise ValueError(
                f"rope: freqs may be as wide as {name}'s heads, {x.shape[-1]}, got {freqs.shape[-1]}"
            )
    _check_freqs(q, freqs, cu_seqlens)
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"rope: cp_rank must be in [0, cp_size = {cp_size}), got {cp_rank}")
    if cp_size > 1 and cu_seqlens is None:
        raise ValueError(
            f"rope: cp_size {cp_size} needs cu_seqlens; without, cut freqs to this rank's positions"
        )


def _check_freqs(q: Tensor, freqs: Tensor, cu_seqlens: Tensor | None) -> None:
    batch = {1} if cu_seqlens is not None else {1, q.shape[1]}
    if freqs.ndim != 4 or freqs.shape[2] != 1 or freqs.shape[1] not in batch or freqs.shape[3] % 2:
        raise ValueError(
            f"rope: freqs must have shape [positions, {' or '.join(map(str, sorted(batch)))}, 1, R] "
            f"with R even, got {list(freqs.shape)}"
        )
    if not freqs.is_floating_point() or freqs.device != q.device:
        raise ValueError(
            f"rope: freqs must be angles of a floating dtype on {q.device} like q, got "
            f"{freqs.dtype} on {freqs.device}"
        )
    if cu_seqlens is None and freqs.shape[0] < q.shape[0]:
        raise ValueError(
            f"rope: freqs must have a row for each of {q.shape[0]} positions, got {freqs.shape[0]}"
        )
    if cu_seqlens is None:
        return
    if (
        cu_seqlens.ndim != 1
        or cu_seqlens.dtype not in (torch.int32, torch.int64)
        or not cu_seqlens.numel()
    ):
        raise ValueError(
            f"rope: cu_seqlens must be int32 or int64 [sequences + 1], got {cu_seqlens.dtype} "
            f"{list(cu_seqlens.shape)}"
        )
    check_at_hand("rope", "cu_seqlens", cu_seqlens, q.device, "q")
