"""The losses of a V, from the first rank of a pipeline, which has them, to the last, where they are read.

    sizes      two int64 numbers: bytes of the text, bytes of the tensors
    content    the text, JSON that says what is in what and where the tensors go; then the tensors' bytes, the
               token count's first

Nothing is pickled. What cannot be moved is an error on both ranks.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["to_last_rank"]


def to_last_rank(data: list[Any], tokens: Tensor, group: dist.ProcessGroup) -> list[Any]:
    """`data` of the group's first rank, on its last rank; an empty list on the others.

    Every rank of the group may call it; those between do nothing.

    Args:
        data: one entry for each micro-batch; of dicts, lists, tuples, tensors, numbers, text and None. It is
            read on the first rank only.
        tokens: a count, alike in shape and dtype on both ranks; the last rank's is overwritten. Its device is
            the one that the group sends from.

    Raises:
        TypeError: something else is in `data`, on both ranks.
    """
    rank, last = group.rank(), group.size() - 1
    if rank == last == 0:
        return data
    if rank == 0:
        _send(data, tokens, last, group)
    return _receive(tokens, group) if rank == last else []


def _send(data: list[Any], tokens: Tensor, last: int, group: dist.ProcessGroup) -> None:
    tensors = [tokens]
    try:
        said, problem = {"data": _described(data, "data", tensors)}, None
    except TypeError as error:
        said, problem = {"problem": str(error)}, error
    text = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    bytes_of = [_bytes(tensor, tokens.device) for tensor in tensors]
    content = torch.cat([text.to(tokens.device), *bytes_of])
    sizes = torch.tensor([text.numel(), content.numel() - text.numel()], device=tokens.device)
    dist.send(sizes, group=group, group_dst=last)
    dist.send(content, group=group, group_dst=last)
    if problem is not None:
        raise problem


def _receive(tokens: Tensor, group: dist.ProcessGroup) -> list[Any]:
    sizes = torch.empty(2, dtype=torch.int64, device=tokens.device)
    dist.recv(sizes, group=group, group_src=0)
    of_text, of_tensors = sizes.tolist()
    content = torch.empty(of_text + of_tensors, dtype=torch.uint8, device=tokens.device)
    dist.recv(content, group=group, group_src=0)
    said = json.loads(bytes(content[:of_text].tolist()))
    if "problem" in said:
        raise TypeError(said["problem"])
    values = _Values(content[of_text:])
    tokens.copy_(values.take(tokens.dtype, tokens.shape))
    return _made(said["data"], values)


def _described(value: Any, where: str, tensors: list[Tensor]) -> Any:
    """As JSON has it; tensors are appended to `tensors`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind in (list, tuple):
        items = [_described(item, f"{where}[{at}]", tensors) for at, item in enumerate(value)]
        return {kind.__name__: items}
    if kind is dict and all(type(key) in (bool, int, float, str) for key in value):
        items = [[k, _described(item, f"{where}[{k!r}]", tensors)] for k, item in value.items()]
        return {"dict": items}
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": [dtype, list(value.shape), value.device.type]}
    raise TypeError(
        f"{where}: {kind.__name__} cannot be moved to the pipeline's last rank; return dense tensors, "
        "numbers and text, in lists, tuples and dicts with keys of numbers and text"
    )


def _made(said: Any, values: _Values) -> Any:
    """What `_described` was given."""
    if not isinstance(said, dict):
        return said
    ((kind, content),) = said.items()
    if kind == "tensor":
        dtype, shape, device = content
        return values.take(getattr(torch, dtype), shape).to(device)
    if kind == "dict":
        return {key: _made(item, values) for key, item in content}
    return (list if kind == "list" else tuple)(_made(item, values) for item in content)


class _Values:
    """Tensors out of bytes, one after the other."""

    def __init__(self, content: Tensor) -> None:
        self._content, self._at = content, 0

    def take(self, dtype: torch.dtype, shape: Any) -> Tensor:
        start = self._at
        self._at += math.prod(shape) * dtype.itemsize
        # a copy begins where any dtype may
        return self._content[start : self._at].clone().view(dtype).reshape(shape)


def _bytes(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device).contiguous().reshape(-1).view(torch.uint8)
