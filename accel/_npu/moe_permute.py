"""Tokens to their experts and back on Ascend: see `accel/ops/moe_permute.py`.

Copies are `index_select`: the row map already says which token a row is, so there is nothing left that
`npu_moe_token_permute`, which sorts expert indices, could do. Sums over a token's rows are torch-npu's
where every token has equally many and no row is padding, as in any routing without dropped tokens:

    npu_moe_token_unpermute          sum of w[p] y[p]
    npu_moe_token_permute_grad_v2    sum of y[p]

Both want the places of each token's rows. Whether a map is such a one is read from the device once and
kept with it. Other maps are summed with `index_add_` in fp32, whose order torch-npu fixes only under
`torch.use_deterministic_algorithms`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from accel._npu.kept import KEPT
from accel.ops.moe_permute import tokens_of_rows, weights_of_rows

__all__ = ["KERNELS"]

MOST_ROWS_OF_A_TOKEN = 512
MOST_ROWS = 16777214


def row_map(routing_map: Tensor, num_rows: int, capacity: int, align: int) -> Tensor:
    """`accel::moe_row_map`, without a size that the host would have to wait for."""
    num_tokens, num_experts = routing_map.shape
    routed = routing_map.bool().T.contiguous()
    device = routed.device
    if capacity >= 0:
        order = routed.to(torch.float16).argsort(dim=-1, descending=True, stable=True)[:, :capacity]
        experts = torch.arange(num_experts, device=device)[:, None]
        return (order + experts * num_tokens).reshape(-1)
    # AI cores sort floats and sum and scatter int32; other integers go to the host's kind of cores
    index = torch.int32 if (num_tokens + align) * num_experts < 2**31 else torch.int64
    places = torch.arange(routed.numel(), dtype=index, device=device)
    rows = places.new_full((num_rows + 1,), -1)
    if routed.numel() and num_rows:
        counts = routed.sum(1, dtype=index)
        room = (counts + align - 1) // align * align
        shift = (_ends(room) - room) - (_ends(counts) - counts)
        flat = routed.reshape(-1)
        row = (
            _ends(flat.to(index))
            - 1
            + shift.repeat_interleave(num_tokens, output_size=flat.numel())
        )
        dropped = ~flat | (row >= num_rows)  # into the row too many
        rows.scatter_(0, row.masked_fill(dropped, num_rows).long(), places)
    return rows[:num_rows].long()


def _ends(counts: Tensor) -> Tensor:
    return counts.cumsum(0, dtype=counts.dtype)


def _places(row_map: Tensor, num_tokens: int) -> Tensor | None:
    """[T k] int32: where each token's rows are, if every token has k and none is padding."""

    def look() -> Tensor | None:
        num_rows = len(row_map)
        if not num_rows or num_rows > MOST_ROWS or not num_tokens or num_rows % num_tokens:
            return None
        topk = num_rows // num_tokens
        tokens = tokens_of_rows(row_map, num_tokens)
        ones = torch.ones_like(tokens, dtype=torch.int32)
        counts = ones.new_zeros(num_tokens + 1).scatter_add_(0, tokens, ones)
        if topk > MOST_ROWS_OF_A_TOKEN or not bool((counts[:num_tokens] == topk).all()):
            return None
        return tokens.float().argsort(stable=True).to(torch.int32)  # exact: there are few enough

    places: Tensor | None = KEPT.get(row_map, find=look, about=("places", num_tokens))
    return places


def _taken(weight: Tensor) -> Tensor:
    """In a dtype that torch-npu takes beside rows of any."""
    return weight.float() if weight.dtype == torch.float64 else weight


def _copied(x: Tensor, row_map: Tensor) -> Tensor:
    """The token of each row, and 0 for padding."""
    return F.pad(x, (0, 0, 0, 1)).index_select(0, tokens_of_rows(row_map, len(x)))


def _summed(rows: Tensor, row_map: Tensor, num_tokens: int, weight: Tensor | None = None) -> Tensor:
    """The sum of each token's rows, in the dtype of the rows."""
    if rows.numel() == 0:
        return rows.new_zeros(num_tokens, rows.shape[1])
    places = _places(row_map, num_tokens)
    if places is not None:
        topk = len(places) // num_tokens
        if weight is None:
            return torch.ops.npu.npu_moe_token_permute_grad_v2(
                rows.contiguous(), places, num_tokens, rows.dtype, topk
            )
        probs = _taken(weight).index_select(0, places).view(num_tokens, topk)
        return torch.ops.npu.npu_moe_token_unpermute(rows.contiguous(), places, probs=probs)
    wide = rows.float() if weight is None else rows.float() * weight.float()[:, None]
    total = wide.new_zeros(num_tokens + 1, rows.shape[1])
    total.index_add_(0, tokens_of_rows(row_map, num_tokens), wide)
    return total[:num_tokens].to(rows.dtype).clone()


def _gradient_of_probs(dw: Tensor, row_map: Tensor, num_tokens: int, num_experts: int) -> Tensor:
    """[T, E] fp32 from that of each row."""
    place = torch.where(row_map < 0, num_tokens * num_experts, row_map)
    flat = dw.new_zeros(num_tokens * num_experts + 1, dtype=torch.float32)
    flat.index_add_(0, place, dw.float())
    return flat[:-1].view(num_experts, num_tokens).T


def permute_forward(x: Tensor, row_map: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """`accel::moe_permute_fwd`."""
    w = x.new_empty(0) if probs is None else weights_of_rows(probs, row_map)
    return _copied(x, row_map), w


def permute_backward(
    dy: Tensor,
    dw: Tensor,
    row_map: Tensor,
    num_tokens: int,
    num_experts: int,
    probs_dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """`accel::moe_permute_bwd`."""
    dprobs = dy.new_empty(0, dtype=probs_dtype)
    if num_experts:
        wide = _gradient_of_probs(dw, row_map, num_tokens, num_experts)
        dprobs = wide.to(probs_dtype).contiguous()
    return _summed(dy, row_map, num_tokens), dprobs


def unpermute_forward(y: Tensor, row_map: Tensor, num_tokens: int, probs: Tensor | None) -> Tensor:
    """`accel::moe_unpermute_fwd`."""
    weight = None if probs is None else weights_of_rows(probs, row_map)
    return _summed(y, row_map, num_tokens, weight)


def unpermute_backward(dout: Tensor, row_map: Tensor) -> Tensor:
    """`accel::moe_unpermute_bwd`."""
    return _copied(dout, row_map)


def unpermute_probs_backward(
    dout: Tensor, y: Tensor, row_map: Tensor, probs: Tensor
) -> tuple[Tensor, Tensor]:
    """`accel::moe_unpermute_probs_bwd`."""
    weight = weights_of_rows(probs, row_map)
    places = _places(row_map, len(dout)) if y.numel() else None
    if places is not None:
        shape = (len(dout), len(places) // len(dout))
        dy, dchosen = torch.ops.npu.npu_moe_token_unpermute_grad(
            y.contiguous(),
            dout.contiguous(),
            places,
            probs=_taken(weight).index_select(0, places).view(shape),
        )
        dchosen = dchosen.view(-1).to(weight.dtype)
        dweight = torch.empty_like(weight).index_copy_(0, places.long(), dchosen)
    else:
        copied = _copied(dout, row_map).float()
        dy = (copied * weight.float()[:, None]).to(y.dtype)
        dweight = (copied * y.float()).sum(1)
    if probs.ndim == 1:
        return dy, dweight.to(probs.dtype)
    dprobs = _gradient_of_probs(dweight, row_map, *probs.shape)
    return dy, dprobs.to(probs.dtype).contiguous()


KERNELS = {
    "accel::moe_row_map": row_map,
    "accel::moe_permute_fwd": permute_forward,
    "accel::moe_permute_bwd": permute_backward,
    "accel::moe_unpermute_fwd": unpermute_forward,
    "accel::moe_unpermute_bwd": unpermute_backward,
    "accel::moe_unpermute_probs_bwd": unpermute_probs_backward,
}
