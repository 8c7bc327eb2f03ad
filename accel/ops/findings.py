"""What reading tensors tells, once for all layers: on a GPU each reading waits for all that was asked for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["Findings"]


class _Finding(NamedTuple):
    others: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]
    found: Any


class Findings:
    """Kept as long as the tensors live and nobody writes to them.

    Writes that PyTorch does not count, a collective into a tensor or one into its `data`, are not seen: give
    a new tensor instead.
    """

    def __init__(self) -> None:
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def knows(self, *tensors: Tensor, about: Hashable = None) -> bool:
        """Whether `get` would not have to look."""
        return self._of(tensors, about) is not None

    def get(self, *tensors: Tensor, find: Callable[[], Any], about: Hashable = None) -> Any:
        """What `find()` returns, or has returned.

        Args:
            tensors: all that `find` reads; of inference tensors, which count no writes, nothing is kept.
            find: what it returns holds none of them, or they would live for ever.
            about: what is asked of them besides.
        """
        kept = self._of(tensors, about)
        if kept is not None:
            return kept.found
        if any(t.is_inference() for t in tensors):
            return find()
        with torch.inference_mode(False):  # the next training step is given it, too
            found = find()
        others = tuple(weakref.ref(t) for t in tensors[1:])
        versions = tuple(t._version for t in tensors)
        before = self._kept.get(tensors[0], {})
        current = {a: f for a, f in before.items() if f.versions[0] == versions[0]}
        self._kept[tensors[0]] = {**current, about: _Finding(others, versions, found)}
        return found

    def _of(self, tensors: tuple[Tensor, ...], about: Hashable) -> _Finding | None:
        kept: _Finding | None = self._kept.get(tensors[0], {}).get(about)
        if kept is None or any(t.is_inference() for t in tensors):
            return None
        same = len(kept.others) == len(tensors) - 1 and all(
            other() is t for other, t in zip(kept.others, tensors[1:], strict=True)
        )
        return kept if same and kept.versions == tuple(t._version for t in tensors) else None
