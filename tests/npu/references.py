"""What torch-npu's ops compute, from their documentation (docs/ascend.md names the pages)."""

import torch
from torch import Tensor

from accel._npu.kept import KEPT
from tests.npu.conformance import FLOATS, need, reference

NORM_DTYPES = {
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float16, torch.float32),
}
"""Of x and gamma, on Atlas A2 and A3."""


def _need_norm(x: Tensor, gamma: Tensor) -> None:
    need((x.dtype, gamma.dtype) in NORM_DTYPES, f"x {x.dtype} with gamma {gamma.dtype}")
    need(2 <= x.ndim <= 8, f"x has 2 to 8 dimensions, got {x.ndim}")
    need(gamma.shape == x.shape[-gamma.ndim :], f"gamma {gamma.shape} for x {x.shape}")


def _rms(x: Tensor, num_normed: int, epsilon: float) -> Tensor:
    """fp32 `[..., 1]`, the reciprocal of the root of the mean square."""
    dims = tuple(range(-num_normed, 0))
    return (x.float().square().mean(dims, keepdim=True) + epsilon).rsqrt()


@reference("npu_rms_norm")
def npu_rms_norm(self: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    _need_norm(self, gamma)
    rstd = _rms(self, gamma.ndim, epsilon)
    return (self.float() * rstd * gamma.float()).to(self.dtype), rstd


@reference("npu_rms_norm_backward")
def npu_rms_norm_backward(
    dy: Tensor, self: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    _need_norm(self, gamma)
    need(
        (dy.shape, dy.dtype) == (self.shape, self.dtype), f"dy {dy.dtype} {dy.shape} is not like x"
    )
    need(rstd.dtype == torch.float32, f"rstd is float32, got {rstd.dtype}")
    need(rstd.shape == (*self.shape[: -gamma.ndim], *[1] * gamma.ndim), f"rstd {rstd.shape}")
    normed = self.float() * rstd
    dnormed = dy.float() * gamma.float()
    dims = tuple(range(-gamma.ndim, 0))
    dx = rstd * (dnormed - normed * (dnormed * normed).mean(dims, keepdim=True))
    dgamma = (dy.float() * normed).flatten(0, -gamma.ndim - 1).sum(0)
    return dx.to(self.dtype), dgamma


@reference("npu_add_rms_norm")
def npu_add_rms_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    need(x1.dtype in FLOATS, f"x1 {x1.dtype}")
    need((x1.shape, x1.dtype) == (x2.shape, x2.dtype), f"x2 {x2.dtype} {x2.shape} is not like x1")
    need(gamma.dtype == x1.dtype, f"gamma {gamma.dtype} is not {x1.dtype} like x1")
    need(gamma.shape == x1.shape[-gamma.ndim :], f"gamma {gamma.shape} for x1 {x1.shape}")
    need(x1.numel() > 0, "no empty tensors")
    wide = x1.float() + x2.float()
    total = wide.to(x1.dtype)
    if x1.dtype == torch.float16:
        wide = total.float()
    rstd = _rms(wide, gamma.ndim, epsilon)
    normed = (wide * rstd).to(x1.dtype)
    return (normed.float() * gamma.float()).to(x1.dtype), rstd, total


def _halves(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    need(x.dtype in FLOATS, f"x {x.dtype}")
    need(1 <= x.ndim <= 8 and x.numel() > 0, f"x of 1 to 8 dimensions, not empty, got {x.shape}")
    need(x.shape[dim] % 2 == 0, f"dimension {dim} of {x.shape} is odd")
    need(x.is_contiguous(), "x is contiguous")
    first, second = x.float().chunk(2, dim=dim)
    return first, second


def _need_gradient(dy: Tensor, x: Tensor, dim: int | None = None) -> None:
    shape = list(x.shape)
    if dim is not None:
        shape[dim] //= 2
    need(
        list(dy.shape) == shape and dy.dtype == x.dtype, f"dy {dy.dtype} {dy.shape} for x {x.shape}"
    )
    need(dy.is_contiguous(), "dy is contiguous")


@reference("npu_swiglu")
def npu_swiglu(self: Tensor, dim: int = -1) -> Tensor:
    gate, up = _halves(self, dim)
    return (gate * torch.sigmoid(gate) * up).to(self.dtype)


@reference("npu_swiglu_backward")
def npu_swiglu_backward(grad_output: Tensor, self: Tensor, dim: int = -1) -> Tensor:
    gate, up = _halves(self, dim)
    _need_gradient(grad_output, self, dim)
    dy, s = grad_output.float(), torch.sigmoid(gate)
    dgate = dy * up * s * (1 + gate * (1 - s))
    return torch.cat((dgate, dy * gate * s), dim=dim).to(self.dtype)


@reference("npu_clipped_swiglu")
def npu_clipped_swiglu(
    x: Tensor,
    *,
    group_index: Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> Tensor:
    need(x.ndim > 1, f"x has more than one dimension, got {x.ndim}")
    need(group_index is None and not interleaved, "only what the kernels use is written here")
    gate, up = _halves(x, dim)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + bias)).to(x.dtype)


def _gelu_tanh(v: Tensor) -> Tensor:
    return torch.nn.functional.gelu(v, approximate="tanh")


def _gelu_tanh_backward(dy: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(dy, v, approximate="tanh")


@reference("npu_geglu")
def npu_geglu(
    self: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False
) -> tuple[Tensor, Tensor]:
    need(approximate == 1, "only the tanh formula is written here")
    left, right = _halves(self, dim)
    gate, up = (left, right) if activate_left else (right, left)
    gelu = _gelu_tanh(gate)
    return (gelu * up).to(self.dtype), gelu.to(self.dtype)


@reference("npu_geglu_grad")
def npu_geglu_grad(
    grad_output: Tensor,
    self: Tensor,
    gelu: Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> Tensor:
    need(approximate == 1, "only the tanh formula is written here")
    left, right = _halves(self, dim)
    _need_gradient(grad_output, self, dim)
    _need_gradient(gelu, self, dim)
    gate, up = (left, right) if activate_left else (right, left)
    dy = grad_output.float()
    dgate, dup = _gelu_tanh_backward(dy * up, gate), dy * gelu.float()
    halves = (dgate, dup) if activate_left else (dup, dgate)
    return torch.cat(halves, dim=dim).to(self.dtype)


@reference("npu_gelu")
def npu_gelu(self: Tensor, *, approximate: str = "none") -> Tensor:
    need(self.dtype in FLOATS and self.ndim <= 8, f"{self.dtype} of {self.ndim} dimensions")
    need(approximate == "tanh", "only the tanh formula is written here")
    return _gelu_tanh(self.float()).to(self.dtype)


@reference("npu_gelu_backward")
def npu_gelu_backward(grad_output: Tensor, self: Tensor, *, approximate: str = "none") -> Tensor:
    need(self.dtype in FLOATS and self.ndim <= 8, f"{self.dtype} of {self.ndim} dimensions")
    need(approximate == "tanh", "only the tanh formula is written here")
    _need_gradient(grad_output, self)
    return _gelu_tanh_backward(grad_output.float(), self.float()).to(self.dtype)


def _need_softmax(x: Tensor, mask: Tensor, fixed_triu_mask: bool) -> None:
    need(x.dtype in FLOATS and x.ndim == 4, f"x {x.dtype} {x.shape}")
    sizes = x.shape[-2:]
    need(
        all(32 <= n <= 4096 and n % 32 == 0 for n in sizes),
        f"the last sizes are multiples of 32 from 32 to 4096, got {sizes}",
    )
    fits = mask.ndim == 4 and mask.shape[-2:] == sizes
    fits = fits and all(m in (1, n) for m, n in zip(mask.shape[:2], x.shape[:2], strict=True))
    need(mask.dtype == torch.bool and fits, f"mask {mask.dtype} {mask.shape} for x {x.shape}")
    need(not fixed_triu_mask, "fixed_triu_mask is reserved")


@reference("npu_scaled_masked_softmax")
def npu_scaled_masked_softmax(
    x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False
) -> Tensor:
    _need_softmax(x, mask, fixed_triu_mask)
    z = (x * scale).float() if x.dtype == torch.float16 else x.float() * scale
    return torch.softmax(z.masked_fill(mask, -10000.0), dim=-1).to(x.dtype)


@reference("npu_scaled_masked_softmax_backward")
def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    _need_softmax(y, mask, fixed_triu_mask)
    need((y_grad.shape, y_grad.dtype) == (y.shape, y.dtype), f"y_grad {y_grad.dtype} is not like y")
    dy, p = y_grad.float(), y.float()
    dx = (dy * p - (dy * p).sum(-1, keepdim=True) * p) * scale
    return dx.masked_fill(mask, 0.0).to(y.dtype)


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


@reference("npu_apply_adam_w.out")
def npu_apply_adam_w_out(
    beta1_power: float,
    beta2_power: float,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    grad: Tensor,
    max_grad_norm: Tensor | None,
    amsgrad: bool | None,
    maximize: bool | None,
    *,
    var: Tensor,
    m: Tensor,
    v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The powers are those of the step before: the op multiplies them with beta."""
    need(
        not amsgrad and not maximize and max_grad_norm is None, "only AdamW itself is written here"
    )
    need(var.dtype in FLOATS and var.ndim <= 8, f"var {var.dtype} of {var.ndim} dimensions")
    for name, t in (("m", m), ("v", v), ("grad", grad)):
        same = (t.shape, t.dtype) == (var.shape, var.dtype)
        need(same, f"{name} {t.dtype} {t.shape} is not like var {var.dtype} {var.shape}")
    numbers = (beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon)
    power1, power2, lr, weight_decay, beta1, beta2, epsilon = (_fp32(n) for n in numbers)
    m.copy_(m * beta1 - (beta1 - 1) * grad)
    v.copy_(v * beta2 - (beta2 - 1) * grad * grad)
    decayed = var * (1 - lr * weight_decay)
    denominator = (v / (1 - power2 * beta2)).sqrt() + epsilon
    var.copy_(decayed - lr * m / (1 - power1 * beta1) / denominator)
    return var, m, v


def _partner(x: Tensor, rotary_mode: str) -> Tensor:
    if rotary_mode == "half":
        first, second = x.chunk(2, dim=-1)
        return torch.cat((-second, first), dim=-1)
    return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)


def _need_rotary(x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str) -> None:
    """Layout SBND, the only one that the kernels use."""
    need(rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode}")
    need(x.dtype in FLOATS and x.ndim == 4, f"x {x.dtype} {x.shape}")
    length, batch, heads, width = x.shape
    need(width < 896 and width % 2 == 0, f"the width is even and below 896, got {width}")
    for r in (r1, r2):
        need(r.dtype == x.dtype, f"cos and sin are {x.dtype} like x, got {r.dtype}")
        batches = (1,) if rotary_mode == "interleave" else (1, batch)
        fits = r.ndim == 4 and r.shape[1] in batches and r.shape == (length, r.shape[1], 1, width)
        need(fits, f"cos and sin {r.shape} for x {x.shape} and mode {rotary_mode}")
    if rotary_mode == "interleave":
        need(batch * heads < 1000, f"B N < 1000, got {batch * heads}")
    need(batch < 1000 and heads < 1000, f"B and N < 1000, got {batch} and {heads}")


@reference("npu_rotary_mul")
def npu_rotary_mul(
    self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    need(rotate is None, "only without a matrix is written here")
    _need_rotary(self, r1, r2, rotary_mode)
    x = self.float()
    return (x * r1.float() + _partner(x, rotary_mode) * r2.float()).to(self.dtype)


@reference("npu_rotary_mul_backward")
def npu_rotary_mul_backward(
    grad: Tensor, self: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    """Only dx is used: cos and sin get no gradient, and theirs are left undefined here."""
    _need_rotary(self, r1, r2, rotary_mode)
    need((grad.shape, grad.dtype) == (self.shape, self.dtype), f"grad {grad.dtype} is not like x")
    dy = grad.float()
    dx = dy * r1.float() - _partner(dy * r2.float(), rotary_mode)
    return dx.to(self.dtype), torch.full_like(r1, torch.nan), torch.full_like(r2, torch.nan)


def _need_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str
) -> tuple[int, int]:
    """The widths of a row of query and of value."""
    dtypes = {t.dtype for t in (query, key, value)}
    need(len(dtypes) == 1 and dtypes <= set(FLOATS), f"one floating dtype, got {dtypes}")
    need(input_layout in ("SBH", "TND"), "only the layouts that the kernels use are written here")
    need(all(t.ndim == 3 and t.is_contiguous() for t in (query, key, value)), "3 dimensions, dense")
    need(1 <= head_num <= 256, f"1 to 256 heads, got {head_num}")
    need(min(query.numel(), key.numel(), value.numel()) > 0, "nothing is empty")
    if input_layout == "SBH":
        need(query.shape[1] == key.shape[1] == value.shape[1], "one batch size")
        need(query.shape[2] % head_num == 0, f"{query.shape[2]} is no multiple of {head_num} heads")
        width = query.shape[2] // head_num
        need(key.shape[2] % width == 0, f"{key.shape[2]} is no multiple of width {width}")
        heads_of_key = key.shape[2] // width
        need(value.shape[2] % heads_of_key == 0, f"value {value.shape} for {heads_of_key} heads")
        width_of_value = value.shape[2] // heads_of_key
    else:
        need(query.shape[1] == head_num, f"{query.shape[1]} heads, not {head_num}")
        heads_of_key, width, width_of_value = key.shape[1], query.shape[2], value.shape[2]
        need(key.shape[2] == width and value.shape[1] == heads_of_key, "q, k, v do not fit")
    need(head_num % heads_of_key == 0, f"{head_num} heads over {heads_of_key}")
    need(len(key) == len(value) and max(len(query), len(key)) <= 1 << 20, "as many keys as values")
    need(width_of_value <= width <= 768, f"Dv <= Dk <= 768, got {width_of_value} and {width}")
    return width, width_of_value


def _need_mask(mask: Tensor | None, sparse_mode: int) -> None:
    if mask is None:
        need(sparse_mode == 0, f"sparse_mode {sparse_mode} without a mask")
        return
    need(sparse_mode in (2, 3, 4), f"sparse_mode {sparse_mode} is not written here")
    need(mask.dtype in (torch.bool, torch.uint8), f"mask {mask.dtype}")
    need(mask.shape == (2048, 2048) and mask.is_contiguous(), f"mask {mask.shape}")
    as_documented = KEPT.get(mask, find=lambda: _hides_what_is_later(mask))
    need(as_documented, "the compressed mask hides what is above the diagonal")


def _hides_what_is_later(mask: Tensor) -> bool:
    return torch.equal(mask.bool(), torch.ones(mask.shape, dtype=torch.bool).triu(1))


def _sparse(num_queries: int, num_keys: int, mode: int, before: int, after: int) -> Tensor:
    """[queries, keys]: what is hidden."""
    distance = torch.arange(num_keys) - torch.arange(num_queries)[:, None]
    if mode == 0:
        hidden = torch.zeros_like(distance, dtype=torch.bool)
    elif mode == 2:  # aligned at the upper left
        hidden = distance > 0
    else:  # at the lower right
        distance = distance - (num_keys - num_queries)
        hidden = distance > (0 if mode == 3 else after)
        if mode == 4:
            hidden |= distance < -before
    need(not hidden.all(1).any(), "every query sees a key")
    need(
        mode != 3 or num_queries <= num_keys, f"{num_queries} queries of {num_keys} keys in mode 3"
    )
    return hidden


def _sequences(
    query: Tensor,
    key: Tensor,
    head_num: int,
    width: int,
    ends_q: list[int] | None,
    ends_k: list[int] | None,
) -> list[tuple[tuple, tuple]]:
    """Where each sequence's queries and keys are: indices into `[S, B, N, D]` or `[T, N, D]`."""
    if query.shape[1] == head_num and ends_q is not None and ends_k is not None:
        need(len(ends_q) == len(ends_k) <= 1024, "as many sequences of q as of k, at most 1024")
        need(ends_q[-1] == len(query) and ends_k[-1] == len(key), "the last ends are the sizes")
        slices = [
            [slice(a, b) for a, b in zip([0, *ends], ends, strict=False)]
            for ends in (ends_q, ends_k)
        ]
        return [((a,), (b,)) for a, b in zip(*slices, strict=True)]
    need(ends_q is None and ends_k is None, "lengths go with TND")
    return [((slice(None), b),) * 2 for b in range(query.shape[1])]


def _by_heads(t: Tensor, width: int) -> Tensor:
    """[S, N, D] of one sequence, from [S, H] or [S, N, D]."""
    return t.unflatten(-1, (-1, width)) if t.ndim == 2 else t


def _probabilities(
    q: Tensor, k: Tensor, scale: float, hidden: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum and sum [N, Q, 1], and e^(s - maximum), fp32; q, k [S, N, D] with equal N."""
    scores = q.float().transpose(0, 1) @ k.float().permute(1, 2, 0) * scale
    scores = scores.masked_fill(hidden, -torch.inf)
    maximum = scores.amax(-1, keepdim=True)
    weights = (scores - maximum).exp()
    return maximum, weights.sum(-1, keepdim=True), weights


def _need_defaults(options: dict) -> None:
    """Only what the kernels use is written here."""
    unused = {"keep_prob": 1.0, "inner_precise": 0, "seed": 0, "offset": 0, "numels": 0}
    unused |= {"gen_mask_parallel": True, "sync": False}
    for name, value in options.items():
        need(value == unused.get(name), f"{name}={value} is not written here")


@reference("npu_fusion_attention")
def npu_fusion_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    input_layout: str,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    scale: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    seed: int = 0,
    offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Maximum and sum are `[B, N, S, 8]`, or of a pack with softmax_layout "TND" `[T, N, 8]`."""
    unused = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    unused |= {"dropout_mask": dropout_mask, "keep_prob": keep_prob, "sync": sync}
    _need_defaults(unused | {"inner_precise": inner_precise, "seed": seed, "offset": offset})
    width, width_of_value = _need_attention(query, key, value, head_num, input_layout)
    _need_mask(atten_mask, sparse_mode)
    need(softmax_layout == ("TND" if input_layout == "TND" else ""), "softmax_layout goes with TND")
    out = query.new_empty((*query.shape[:-1], query.shape[-1] // width * width_of_value))
    stats_shape = (
        (len(query), head_num, 8)
        if input_layout == "TND"
        else (query.shape[1], head_num, len(query), 8)
    )
    maxima, sums = (query.new_empty(stats_shape, dtype=torch.float32) for _ in range(2))
    lengths = actual_seq_qlen, actual_seq_kvlen
    for i, (at_q, at_k) in enumerate(_sequences(query, key, head_num, width, *lengths)):
        q, k = (_by_heads(t[at], width) for t, at in ((query, at_q), (key, at_k)))
        v = _by_heads(value[at_k], width_of_value)
        if not len(q):
            continue
        k, v = (t.repeat_interleave(head_num // t.shape[1], dim=1) for t in (k, v))
        hidden = _sparse(len(q), len(k), sparse_mode, pre_tockens, next_tockens)
        maximum, total, weights = _probabilities(q, k, scale, hidden)
        probs = (weights / total).to(v.dtype).float()
        rows = (probs @ v.float().transpose(0, 1)).transpose(0, 1).to(out.dtype)
        out[at_q] = rows.flatten(1) if input_layout == "SBH" else rows
        for of, stat in ((maxima, maximum), (sums, total)):
            repeated = stat.expand(*stat.shape[:-1], 8)
            if input_layout == "SBH":
                of[i] = repeated
            else:
                of[at_q] = repeated.transpose(0, 1)
    return out, maxima, sums, query.new_empty(0), 0, 0, 0


@reference("npu_fusion_attention_grad")
def npu_fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    *,
    pse: Tensor | None = None,
    padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None,
    softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None,
    scale_value: float = 1.0,
    keep_prob: float = 1.0,
    pre_tockens: int = 2147483647,
    next_tockens: int = 2147483647,
    inner_precise: int = 0,
    seed: int = 0,
    offset: int = 0,
    numels: int = 0,
    prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None,
    sparse_mode: int = 0,
    gen_mask_parallel: bool = True,
    sync: bool = False,
    softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    unused = {"pse": pse, "padding_mask": padding_mask, "prefix": prefix, "sink": sink}
    unused |= {"softmax_in": softmax_in, "keep_prob": keep_prob, "numels": numels}
    _need_defaults(unused | {"inner_precise": inner_precise, "seed": seed, "offset": offset})
    width, width_of_value = _need_attention(query, key, value, head_num, input_layout)
    _need_mask(atten_mask, sparse_mode)
    need(softmax_layout == ("TND" if input_layout == "TND" else ""), "softmax_layout goes with TND")
    need(softmax_max is not None and softmax_sum is not None, "softmax_max and softmax_sum")
    need(attention_in is not None, "attention_in")
    for t in (dy, attention_in):
        need(t.dtype == query.dtype and t.is_contiguous(), f"{t.dtype}, {t.stride()}")
        need(t.shape[:-1] == query.shape[:-1], f"{t.shape} for query {query.shape}")
    for t in (softmax_max, softmax_sum):
        need(t.dtype == torch.float32 and t.is_contiguous() and t.shape[-1] == 8, f"{t.shape}")
        need(
            torch.equal(t.nan_to_num(), t[..., :1].expand_as(t).nan_to_num()),
            "eight times the same",
        )
    grads = [torch.empty_like(t) for t in (query, key, value)]
    lengths = actual_seq_qlen, actual_seq_kvlen
    for i, (at_q, at_k) in enumerate(_sequences(query, key, head_num, width, *lengths)):
        q, k = (_by_heads(t[at], width) for t, at in ((query, at_q), (key, at_k)))
        v = _by_heads(value[at_k], width_of_value)
        dout, out = (_by_heads(t[at_q], width_of_value) for t in (dy, attention_in))
        groups = k.shape[1]
        q, k, v, dout, out = (t.float().transpose(0, 1) for t in (q, k, v, dout, out))
        k, v = (t.repeat_interleave(head_num // groups, dim=0) for t in (k, v))
        stats = [
            (t[i] if input_layout == "SBH" else t[at_q].transpose(0, 1))[..., :1]
            for t in (softmax_max, softmax_sum)
        ]
        hidden = _sparse(q.shape[1], k.shape[1], sparse_mode, pre_tockens, next_tockens)
        scores = (q @ k.transpose(1, 2) * scale_value).masked_fill(hidden, -torch.inf)
        probs = (scores - stats[0]).exp() / stats[1]
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = probs * (dout @ v.transpose(1, 2) - delta)
        probs, dscores = (t.to(query.dtype).float() for t in (probs, dscores))
        dq = dscores @ k * scale_value
        dk, dv = dscores.transpose(1, 2) @ q * scale_value, probs.transpose(1, 2) @ dout
        dk, dv = (t.unflatten(0, (groups, -1)).sum(1) for t in (dk, dv))
        for grad, at, part in zip(grads, (at_q, at_k, at_k), (dq, dk, dv), strict=True):
            rows = part.transpose(0, 1).to(grad.dtype)
            grad[at] = rows.flatten(1) if input_layout == "SBH" else rows
    return grads[0], grads[1], grads[2], query.new_empty(0), query.new_empty(0)


def _need_grouped(t: Tensor, inner: int) -> None:
    need(t.dtype in FLOATS, f"{t.dtype}")
    need(inner < 65536, f"the inner dimension is below 65536, got {inner}")


@reference("npu_grouped_matmul")
def npu_grouped_matmul(
    x: list[Tensor], weight: list[Tensor], *, group_list: Tensor | None = None, **options
) -> list[Tensor]:
    """By rows, with one stack or a list of matrices; or by K, where x is a transpose."""
    given = {name: value for name, value in options.items() if value is not None}
    need(given.pop("split_item", 0) in (2, 3), "one result: split_item 2 or 3")
    group_type = given.pop("group_type", None)
    need(given.pop("group_list_type", 0) == 0, "group_list_type 0, cumulative")
    need(not any(given.values()), f"{given} is not written here")
    need(
        group_list is not None and group_list.dtype == torch.int64, "group_list is an int64 tensor"
    )
    need(len(x) == 1 and x[0].ndim == 2, "one matrix x")
    need(1 <= len(group_list) <= 1024, f"1 to 1024 groups, got {len(group_list)}")
    ends = group_list.tolist()
    starts = [0, *ends[:-1]]
    need(starts + ends[-1:] == sorted(starts + ends[-1:]), "the sums never fall")
    (left,) = x
    need({left.dtype, *(w.dtype for w in weight)} == {left.dtype}, "one dtype")
    if group_type == 2:
        (right,) = weight
        need(left.T.is_contiguous() and right.is_contiguous(), "x is a transpose, weight is not")
        need(right.ndim == 2 and left.shape[1] == len(right) == ends[-1], "K is the last sum")
        _need_grouped(left, left.shape[0])
        _need_grouped(right, right.shape[1])
        parts = [(left[:, a:b], right[a:b]) for a, b in zip(starts, ends, strict=True)]
        products = [(a.float() @ b.float()).to(left.dtype) for a, b in parts]
        for product, (a, _) in zip(products, parts, strict=True):
            if not a.shape[1]:
                product.fill_(torch.nan)  # not said what it is
        return [torch.stack(products)]
    need(group_type == 0, f"group_type {group_type} is not written here")
    need(left.is_contiguous() and len(left) == ends[-1], "the last sum is the number of rows")
    if len(weight) == 1:
        need(weight[0].ndim == 3, "one weight is a stack of matrices")
        matrices = list(weight[0])
    else:
        need(len(weight) <= 128 and all(w.ndim == 2 for w in weight), "at most 128 matrices")
        matrices = list(weight)
    need(len(matrices) == len(ends), f"{len(matrices)} matrices for {len(ends)} groups")
    transposed = {m.T.is_contiguous() and not m.is_contiguous() for m in matrices}
    need(len(transposed) == 1, "all matrices are transposed, or none")
    for m in matrices:
        _need_grouped(m, m.shape[0] if transposed == {True} else m.shape[1])
        need(m.is_contiguous() or m.T.is_contiguous(), "a matrix is dense or a transpose")
    _need_grouped(left, left.shape[1])
    rows = [left[a:b].float() @ m.float() for a, b, m in zip(starts, ends, matrices, strict=True)]
    return [torch.cat(rows).to(left.dtype)]


@reference("npu_grouped_matmul_add_")
def npu_grouped_matmul_add_(
    self: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    need(
        self.dtype == torch.float32 and self.is_contiguous(), f"self {self.dtype} is fp32 and dense"
    )
    need(x.dtype == weight.dtype, f"{x.dtype} and {weight.dtype}")
    need(x.dtype in (torch.bfloat16, torch.float16), f"x is bfloat16 or float16, got {x.dtype}")
    need(x.is_contiguous() and weight.is_contiguous() and x.numel() > 0, "dense, not empty")
    need(
        transpose_x and not transpose_weight and group_type == 2, "x is transposed, groups along K"
    )
    need(group_list_type == 0 and group_list.dtype == torch.int64, "cumulative int64 sums")
    need(max(x.shape[1], weight.shape[1]) <= 65535, "M and N are at most 65535")
    ends = group_list.tolist()
    need(len(ends) <= 128 and ends[-1] == len(x) == len(weight), "the last sum is K")
    need(self.shape == (len(ends) * x.shape[1], weight.shape[1]), f"self {self.shape}")
    parts = [
        x[a:b].float().T @ weight[a:b].float() for a, b in zip([0, *ends[:-1]], ends, strict=True)
    ]
    return self.add_(torch.cat(parts))


def _need_rows(rows: Tensor, sorted_indices: Tensor) -> None:
    need(rows.dtype in FLOATS and rows.ndim == 2, f"rows {rows.dtype} {rows.shape}")
    need(
        sorted_indices.dtype == torch.int32, f"sorted_indices is int32, got {sorted_indices.dtype}"
    )
    need(
        sorted_indices.shape == rows.shape[:1], f"{sorted_indices.shape} places, rows {rows.shape}"
    )
    used = sorted_indices.sort().values
    need(torch.equal(used, torch.arange(len(rows), dtype=torch.int32)), "each row has one place")


@reference("npu_moe_token_unpermute")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> Tensor:
    """dtypes of probs: any float, by CANN's op definition (hicann/ops-transformer)."""
    _need_rows(permuted_tokens, sorted_indices)
    need(not padded_mode and restore_shape is None, "padded_mode is reserved")
    need(probs is not None and probs.dtype in FLOATS, "only with probs is written here")
    topk = probs.shape[1]
    need(topk <= 512 and probs.numel() == len(sorted_indices), f"probs {probs.shape}")
    rows = permuted_tokens.float()[sorted_indices.long()].view(-1, topk, permuted_tokens.shape[1])
    return (rows * probs.float()[..., None]).sum(1).to(permuted_tokens.dtype)


@reference("npu_moe_token_unpermute_grad")
def npu_moe_token_unpermute_grad(
    permuted_tokens: Tensor,
    grad_unpermuted_tokens: Tensor,
    sorted_indices: Tensor,
    probs: Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: list[int] | None = None,
) -> tuple[Tensor, Tensor]:
    _need_rows(permuted_tokens, sorted_indices)
    need(not padded_mode and restore_shape is None, "padded_mode is reserved")
    need(probs is not None and probs.dtype in FLOATS, "only with probs is written here")
    need(grad_unpermuted_tokens.dtype == permuted_tokens.dtype, f"{grad_unpermuted_tokens.dtype}")
    need(len(grad_unpermuted_tokens) == len(probs), f"{grad_unpermuted_tokens.shape}")
    dout, places = grad_unpermuted_tokens.float()[:, None], sorted_indices.long()
    drows = (dout * probs.float()[..., None]).flatten(0, 1).to(permuted_tokens.dtype)
    rows = permuted_tokens.float()[places].view(*probs.shape, -1)
    grad = torch.empty_like(permuted_tokens).index_copy_(0, places, drows)
    return grad, (dout * rows).sum(-1).to(probs.dtype)


@reference("npu_moe_token_permute_grad_v2")
def npu_moe_token_permute_grad_v2(
    grad_permuted_tokens: Tensor,
    sorted_indices: Tensor,
    tokens_size_0: int,
    tokens_dtype: torch.dtype,
    num_topK: int,
    padded_mode: bool = False,
) -> Tensor:
    _need_rows(grad_permuted_tokens, sorted_indices)
    need(not padded_mode and num_topK <= 512, "padded_mode is reserved, topk at most 512")
    need(
        tokens_size_0 * num_topK == len(sorted_indices), f"{tokens_size_0} tokens, {num_topK} each"
    )
    need(tokens_dtype == grad_permuted_tokens.dtype, f"{tokens_dtype}")
    rows = grad_permuted_tokens.float()[sorted_indices.long()]
    return rows.view(tokens_size_0, num_topK, -1).sum(1).to(tokens_dtype)


@reference("npu_moe_gating_top_k")
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """The bias decides the choice alone, and softmax is not divided by the sum of the chosen: the
    golden results of torch-npu's own test have it so, where the formula on the page is not clear."""
    experts = x.shape[1]
    need(x.dtype in FLOATS and x.ndim == 2 and experts <= 2048, f"x {x.dtype} {x.shape}")
    need(bias is None or (bias.dtype == x.dtype and bias.shape == (experts,)), "bias is like x")
    need(input_ids is None and tid2eid is None and renorm == 0, "not written here")
    need(norm_type in (0, 1) and group_select_mode in (0, 1), "0 or 1")
    need(experts % group_count == 0 and 1 <= k_group <= group_count, f"{group_count} groups")
    size = experts // group_count
    need(1 <= k <= size * k_group and size > 2, f"k {k} of {k_group} groups of {size}")
    need(-(-size // 32) * 32 * group_count <= 2048 or group_count == 1, "groups padded to 32")
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    choice = scores if bias is None else scores + bias.float()
    if group_count > 1:
        groups = choice.unflatten(1, (group_count, -1))
        worth = groups.topk(1 + group_select_mode, dim=-1).values.sum(-1)
        best = torch.zeros_like(worth, dtype=torch.bool)
        best.scatter_(1, worth.topk(k_group, dim=-1).indices, True)
        choice = groups.masked_fill(~best[..., None], -torch.inf).flatten(1)
    indices = choice.topk(k, dim=1).indices
    y = scores.gather(1, indices)
    if norm_type == 1:
        y = y / (y.sum(-1, keepdim=True) + eps)
    y = y * routed_scaling_factor
    return y.to(x.dtype), indices.int(), scores if out_flag else x.new_empty(0)


@reference("npu_moe_gating_top_k_softmax_v2")
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    need(x.dtype in FLOATS and x.ndim in (2, 3), f"x {x.dtype} {x.shape}")
    need(0 < k <= min(x.shape[-1], 1024), f"k {k} of {x.shape[-1]}")
    need(finished is None and renorm == 1 and not output_softmax, "not written here")
    values, indices = x.float().topk(k, dim=-1)
    return values.softmax(-1).to(x.dtype), indices.int(), x.new_empty(0)
