"""The ranks that share sequences, and which way they exchange what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

__all__ = ["COMM_TYPES", "ContextGroups"]

COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""Transformer Engine's names; `allgather`, as Megatron's newer code has it, is taken too."""


@dataclass(frozen=True)
class ContextGroups:
    """Which ranks exchange heads, and which share keys, in a ring or by gathering them."""

    heads: dist.ProcessGroup | None
    keys: dist.ProcessGroup | None
    ring: bool

    @staticmethod
    def of(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup], comm_type: str
    ) -> ContextGroups | None:
        """The groups that Transformer Engine's arguments ask for; None if there is but one rank.

        Args:
            group: of all ranks; for `a2a+p2p` the group that exchanges heads, of neighbours, and the one
                across.

        Raises:
            ValueError: an unknown `comm_type`, or groups that do not go with it.
        """
        comm_type = "all_gather" if comm_type == "allgather" else comm_type
        if comm_type not in COMM_TYPES:
            raise ValueError(f"cp_comm_type={comm_type!r}: use one of {', '.join(COMM_TYPES)}")
        groups = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        if len(groups) != (2 if comm_type == "a2a+p2p" else 1):
            raise ValueError(
                f"cp_comm_type={comm_type!r} with {len(groups)} context-parallel groups: 'a2a+p2p' takes "
                "two (--hierarchical-context-parallel-sizes), the others one"
            )
        by_heads = groups[0] if comm_type.startswith("a2a") else None
        by_keys = None if comm_type == "a2a" else groups[-1]
        found = ContextGroups(_unless_alone(by_heads), _unless_alone(by_keys), "p2p" in comm_type)
        return None if found.size == 1 else found

    @property
    def size(self) -> int:
        return self.ranks_by_heads * self.ranks_by_keys

    @property
    def rank(self) -> int:
        """Which of the `size` parts of each sequence this rank holds."""
        within = 0 if self.heads is None else self.heads.rank()
        across = 0 if self.keys is None else self.keys.rank()
        return across * self.ranks_by_heads + within

    @property
    def ranks_by_heads(self) -> int:
        """Ranks that exchange heads."""
        return 1 if self.heads is None else self.heads.size()

    @property
    def ranks_by_keys(self) -> int:
        """Ranks, or groups of such ranks, that share keys."""
        return 1 if self.keys is None else self.keys.size()

    def max_(self, x: Tensor) -> None:
        """Raise each element to its largest on any of the ranks."""
        for group in (self.heads, self.keys):
            if group is not None:
                dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)


def _unless_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    return None if group is None or group.size() == 1 else group
