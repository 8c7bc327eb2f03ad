"""AdamW in Triton: see `accel/ops/adamw.py` for the formulas, `accel/ops/remainder.py` for remainders.

One launch over the chunks of all parameters (`chunk_table`). A thread has 4 elements at a time: 16 bytes
of what is fp32, 8 of what has 16 bits, so that a warp reads whole lines of both and no layout has to be
changed between them. What hides the latency of memory is the number of programs: some 50 registers a thread
leave room for four or five of 256 threads on a processor, which have 64 KB under way; 25 KB times 132
processors are what 4.8 TB/s bring in the 700 ns that a read takes.

What depends on a step, the two bias corrections, is computed in fp64 by a few operations on a vector
of one number per parameter: on the host, where steps are kept there, and then copied to the device without
waiting; on the device otherwise, where a CUDA graph may hold it all.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.chunk_table import (
    TRITON_DTYPES,
    chunk_tables,
    find_chunk,
    is_capturing,
    list_pointer,
    upload,
)
from accel._triton.launch import launch

CHUNK = 16384
"""Elements of a program: 16 blocks, beside which its four reads of the table are little, and still 1,500
programs for a rank with 25 million parameters (25e6 / 16384). Derived, not measured."""
BLOCK = 1024
NUM_WARPS = 8

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit
def _round_to_bfloat16(x):
    """The upper halves of fp32 numbers rounded to nearest, ties to even; as uint32, lower halves 0."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    quiet_nan = bits | 0x400000
    return tl.where(x == x, rounded, quiet_nan) & 0xFFFF0000


@triton.jit
def _load_master(weight, remainder, at, mask, HAS_REMAINDER: tl.constexpr):
    if HAS_REMAINDER:
        upper = tl.load(weight + at, mask=mask).to(tl.int32) << 16
        distance = tl.load(remainder + at, mask=mask).to(tl.int32)
        # No number rounds to a zero that is further from zero: somebody else has set the weight to zero.
        distance = tl.where((upper & 0x7FFFFFFF) == 0, tl.maximum(distance, 0), distance)
        return (upper + distance).to(tl.float32, bitcast=True)
    else:
        return tl.load(weight + at, mask=mask)


@triton.jit
def _store_master(weight, remainder, at, mask, master, HAS_REMAINDER: tl.constexpr):
    if HAS_REMAINDER:
        upper = _round_to_bfloat16(master)
        distance = master.to(tl.uint32, bitcast=True) - upper
        # One too many for 16 bits: the distance of a tie that was rounded towards zero.
        kept = tl.where(distance == 0x8000, 0x7FFF, distance & 0xFFFF)
        tl.store(weight + at, (upper >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
        tl.store(remainder + at, kept.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        tl.store(weight + at, master, mask=mask)


@triton.jit
def _step_block(
    weight, grad, exp_avg, exp_avg_sq, beside, at, mask,
    scale, l2, decay, to_other, beta2, one_minus_beta2, root_correction2, eps, step_size,
    HAS_REMAINDER: tl.constexpr, COPY: tl.constexpr, FROM_AVERAGE: tl.constexpr, L2: tl.constexpr,
):  # fmt: skip
    """One block; `beside` is the copy or the remainder. The order of operations is torch.optim.Adam's."""
    w = _load_master(weight, beside, at, mask, HAS_REMAINDER)
    g = tl.load(grad + at, mask=mask).to(tl.float32) * scale
    if L2:
        g += l2 * w
    m_old = tl.load(exp_avg + at, mask=mask)
    difference = g - m_old
    m = (m_old if FROM_AVERAGE else g) + to_other * difference
    v = tl.load(exp_avg_sq + at, mask=mask) * beta2 + one_minus_beta2 * g * g
    denominator = tl.div_rn(tl.sqrt_rn(v), root_correction2) + eps
    w = w * decay - tl.div_rn(step_size * m, denominator)
    tl.store(exp_avg + at, m, mask=mask)
    tl.store(exp_avg_sq + at, v, mask=mask)
    _store_master(weight, beside, at, mask, w, HAS_REMAINDER)
    if tl.bfloat16 == COPY:  # this way round for constants that may be None
        upper = _round_to_bfloat16(w) >> 16
        tl.store(beside + at, upper.to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    elif COPY is not None:
        tl.store(beside + at, w.to(COPY), mask=mask)


@triton.jit(do_not_specialize=["num_chunks"])
def _adamw(
    words, num_chunks, corrections_P2, grad_scale, scale, l2, decay, to_other,
    beta2, one_minus_beta2, eps, step_size,
    GRAD: tl.constexpr, COPY: tl.constexpr, HAS_REMAINDER: tl.constexpr,
    FROM_AVERAGE: tl.constexpr, L2: tl.constexpr,
    ALIGNED: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    HAS_BESIDE: tl.constexpr = HAS_REMAINDER or COPY is not None
    # 16-bit weights, remainders and bf16 copies are handled as words.
    WEIGHT: tl.constexpr = tl.int16 if HAS_REMAINDER else tl.float32
    BESIDE: tl.constexpr = tl.int16 if HAS_REMAINDER or tl.bfloat16 == COPY else COPY
    row, start, end = find_chunk(words, num_chunks, 5 if HAS_BESIDE else 4, CHUNK)
    weight = list_pointer(row, 0, WEIGHT, ALIGNED)
    grad = list_pointer(row, 1, GRAD, ALIGNED)
    exp_avg = list_pointer(row, 2, tl.float32, ALIGNED)
    exp_avg_sq = list_pointer(row, 3, tl.float32, ALIGNED)
    beside = list_pointer(row, 4, BESIDE, ALIGNED) if HAS_BESIDE else weight
    if grad_scale is not None:
        scale = tl.load(grad_scale).to(tl.float32)
    root_correction2 = 1.0
    if corrections_P2 is not None:
        corrections = corrections_P2 + 2 * tl.load(row + 1)
        step_size = tl.load(corrections)
        root_correction2 = tl.load(corrections + 1)
    cols = tl.arange(0, BLOCK)
    whole = start + (end - start) // BLOCK * BLOCK
    for first in range(start, whole, BLOCK):
        _step_block(
            weight, grad, exp_avg, exp_avg_sq, beside, first + cols, None,
            scale, l2, decay, to_other, beta2, one_minus_beta2, root_correction2, eps, step_size,
            HAS_REMAINDER, COPY, FROM_AVERAGE, L2,
        )  # fmt: skip
    if whole < end:
        _step_block(
            weight, grad, exp_avg, exp_avg_sq, beside, whole + cols, whole + cols < end,
            scale, l2, decay, to_other, beta2, one_minus_beta2, root_correction2, eps, step_size,
            HAS_REMAINDER, COPY, FROM_AVERAGE, L2,
        )  # fmt: skip


def _check(
    params: Sequence[Tensor],
    lists: Mapping[str, tuple[Sequence[Tensor], Sequence[torch.dtype]]],
    steps: Sequence[Tensor],
) -> None:
    """The kernel sees memory, not shapes: what lies beside a parameter must lie as it does."""
    sizes = [t.shape for t in params]
    device = params[0].device
    for name, (tensors, dtypes) in lists.items():
        if [t.shape for t in tensors] != sizes:
            raise ValueError(f"adamw: {name} must have the shapes of params, one for each")
        if not all(t.is_contiguous() and t.device == device for t in tensors):
            raise ValueError(f"adamw: {name} must be contiguous and on {device}")
        found = {t.dtype for t in tensors}
        if len(found) != 1 or not found <= set(dtypes):
            raise ValueError(f"adamw: {name} must be of one of {list(dtypes)}, got {list(found)}")
    if len(steps) != len(params) or any(
        t.numel() != 1 or t.dtype != torch.float32 or t.device not in (torch.device("cpu"), device)
        for t in steps
    ):
        raise ValueError(
            f"adamw: a step must be one fp32 number on the CPU or on {device}, "
            f"one for each of {len(params)} params"
        )


def _advance(steps: Sequence[Tensor]) -> Tensor:
    """Add 1 to each step -> what each parameter then sees, `[P]`.

    A tensor that several parameters share grows for each, as in torch's loop.
    """
    if len({t.data_ptr() for t in steps}) == len(steps):
        torch._foreach_add_(list(steps), 1.0)
        return torch.stack([t.reshape(()) for t in steps])
    seen = []
    for step in steps:
        step += 1.0
        seen.append(step.reshape(()).clone())
    return torch.stack(seen)


def _corrections(steps_P: Tensor, lr: float, beta1: float, beta2: float) -> Tensor:
    """`[P, 2]` fp32: lr / (1 - beta1^t) and sqrt(1 - beta2^t), computed in fp64 where the steps are."""
    t = steps_P.double()
    corrections = torch.stack([lr / (1.0 - beta1**t), (1.0 - beta2**t).sqrt()], dim=1)
    return corrections.float()


def _advanced_corrections(
    steps: Sequence[Tensor],
    device: torch.device,
    bias_correction: bool,
    lr: float,
    betas: tuple[float, float],
) -> Tensor | None:
    """Advance the steps -> `_corrections` of them on the device; None without bias correction."""
    on_device = [t.device.type == device.type for t in steps]
    if all(on_device):
        steps_P = _advance(steps)
        return _corrections(steps_P, lr, *betas) if bias_correction else None
    if is_capturing(device):
        raise ValueError(
            "adamw: steps on the CPU are not counted by the replays of a CUDA graph: keep them on "
            f"{device}"
        )
    if any(on_device):
        raise ValueError("adamw: steps must be on one device, some are on the CPU and some are not")
    steps_P = _advance(steps)
    return upload(_corrections(steps_P, lr, *betas), device) if bias_correction else None


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    copies: Sequence[Tensor],
    remainders: Sequence[Tensor],
    grad_scale: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """`accel::adamw_`."""
    if not params:
        return
    if copies and remainders:
        raise ValueError("adamw: params with remainders take no copies")
    fp32 = (torch.float32,)
    lists: dict[str, tuple[Sequence[Tensor], Sequence[torch.dtype]]] = {
        "params": (params, (torch.bfloat16,) if remainders else fp32),
        "grads": (grads, FLOAT_DTYPES),
        "exp_avgs": (exp_avgs, fp32),
        "exp_avg_sqs": (exp_avg_sqs, fp32),
    }
    if copies:
        lists["copies"] = (copies, FLOAT_DTYPES)
    if remainders:
        lists["remainders"] = (remainders, (torch.int16,))
    _check(params, lists, steps)
    device = params[0].device
    scale = 1.0
    if grad_scale is not None and grad_scale.device != device:
        if is_capturing(device):
            raise ValueError(f"adamw: a CUDA graph needs grad_scale on {device}")
        scale, grad_scale = float(grad_scale), None
    corrections = _advanced_corrections(steps, device, bias_correction, lr, (beta1, beta2))
    l2 = 0.0 if decoupled else float(weight_decay)
    from_average = 1.0 - beta1 < 0.5  # interpolate from the nearer end, as lerp does
    for table in chunk_tables([tensors for tensors, _ in lists.values()], CHUNK):
        launch(
            _adamw, (table.num_chunks,),
            table.words, table.num_chunks, corrections, grad_scale, scale,
            l2, 1.0 - lr * weight_decay if decoupled else 1.0,
            1.0 - beta1 if from_average else -beta1,
            float(beta2), 1.0 - beta2, float(eps), float(lr),
            GRAD=TRITON_DTYPES[grads[0].dtype],
            COPY=TRITON_DTYPES[copies[0].dtype] if copies else None,
            HAS_REMAINDER=bool(remainders), FROM_AVERAGE=from_average, L2=l2 != 0.0, ALIGNED=table.is_aligned,
            CHUNK=CHUNK, BLOCK=BLOCK, num_warps=NUM_WARPS,
            enable_fp_fusion=False,  # else masters and pairs may round differently
        )  # fmt: skip
    changed = (params, exp_avgs, exp_avg_sqs, copies, remainders)
    torch.autograd.graph.increment_version([t for tensors in changed for t in tensors])


KERNELS = {"accel::adamw_": adamw_}


def compile_cases() -> Iterator[tuple[str, Callable, tuple]]:
    """Masters in bf16 with remainders; masters in fp32 with bf16 copies; without; bf16 gradients."""
    steps = [torch.zeros(()), torch.zeros(())]

    def row(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(n, dtype=dtype, device="meta") for n in (4096, 4096 * 4096)]

    fp32, bf16 = row(torch.float32), row(torch.bfloat16)
    rest = (None, 1e-4, 0.9, 0.95, 1e-8, 0.1, True, True)
    yield "bf16+int16", adamw_, (bf16, fp32, fp32, fp32, steps, [], row(torch.int16), *rest)
    scale = torch.empty((), device="meta")
    yield "fp32, bf16 copy", adamw_, (fp32, fp32, fp32, fp32, steps, bf16, [], scale, *rest[1:])
    yield "fp32", adamw_, (fp32, fp32, fp32, fp32, steps, [], [], *rest)
    yield "bf16 grads", adamw_, (bf16, bf16, fp32, fp32, steps, [], row(torch.int16), *rest)
