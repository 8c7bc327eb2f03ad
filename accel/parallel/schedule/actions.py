"""A pipeline schedule as data: for each rank, what it does, in order.

    p ranks hold v chunks of the model each: p v stages, in the order of the forward pass
    loop     stage = c p + r                                   Megatron's interleaving
    v        stage = c p + r, and c p + p - 1 - r for odd c    ZB-V, DualPipeV: rank 0 holds both ends

A transfer belongs to the chunk whose value it carries: `send_forward` sends a chunk's output,
`receive_forward` receives its input, `send_backward` sends the gradient of its input, and `receive_backward`
receives that of its output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

__all__ = ["Action", "Kind", "Message", "Placement", "Schedule", "in_flight"]


class Kind(StrEnum):
    """What a rank does."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """Of the input and of the weights at once."""
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    SEND_FORWARD = "send_forward"
    RECEIVE_FORWARD = "receive_forward"
    SEND_BACKWARD = "send_backward"
    RECEIVE_BACKWARD = "receive_backward"

    @property
    def sends(self) -> bool:
        return self in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)

    @property
    def receives(self) -> bool:
        return self in (Kind.RECEIVE_FORWARD, Kind.RECEIVE_BACKWARD)

    @property
    def computes(self) -> bool:
        return not (self.sends or self.receives)


class Placement(StrEnum):
    """Which stage of the model is chunk c of rank r; the module says how."""

    LOOP = "loop"
    V = "v"


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does."""

    kind: Kind
    micro_batch: int
    chunk: int
    """Of this rank: 0 is the one nearest to the model's input."""

    def __str__(self) -> str:
        return f"{self.kind}(micro-batch {self.micro_batch}, chunk {self.chunk})"


class Message(NamedTuple):
    """What goes from one stage to the next: an output forward, or the gradient of an input backward."""

    forward: bool
    micro_batch: int
    stage: int
    """That made it."""


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order; with the transfers, or of computation only.

    Raises:
        ValueError: data that is no schedule; the message names rank, position and value. Whether a schedule
            is right, `validate` says.
    """

    num_ranks: int
    num_chunks: int
    """Of each rank."""
    num_micro_batches: int
    placement: Placement
    ranks: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_chunks", "num_micro_batches"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number, at least 1, got {value!r}")
        if not isinstance(self.placement, Placement):
            raise ValueError(f"placement must be {_one_of(Placement)}, got {self.placement!r}")
        if len(self.ranks) != self.num_ranks:
            raise ValueError(f"{self.num_ranks} ranks, but the actions of {len(self.ranks)}")
        limits = {"micro_batch": self.num_micro_batches, "chunk": self.num_chunks}
        for rank, actions in enumerate(self.ranks):
            for at, action in enumerate(actions):
                where = f"rank {rank}, position {at}"
                if not isinstance(action, Action) or not isinstance(action.kind, Kind):
                    raise ValueError(f"{where}: no action: {action!r}")
                for name, limit in limits.items():
                    value = getattr(action, name)
                    if type(value) is not int or not 0 <= value < limit:
                        raise ValueError(f"{where}: {name} must be 0 to {limit - 1}, got {value!r}")

    @property
    def num_stages(self) -> int:
        return self.num_ranks * self.num_chunks

    @cached_property
    def compute_only(self) -> bool:
        """No rank sends or receives."""
        return all(action.kind.computes for actions in self.ranks for action in actions)

    @cached_property
    def forward_only(self) -> bool:
        """Each computation is a forward."""
        return all(
            action.kind is Kind.FORWARD or not action.kind.computes
            for actions in self.ranks
            for action in actions
        )

    def stage(self, rank: int, chunk: int) -> int:
        """Of the model: 0 has the input, `num_stages - 1` the loss."""
        turned = self.placement is Placement.V and chunk % 2 == 1
        return chunk * self.num_ranks + (self.num_ranks - 1 - rank if turned else rank)

    def owner(self, stage: int) -> tuple[int, int]:
        """The rank that holds a stage, and which of its chunks that is."""
        chunk, rank = divmod(stage, self.num_ranks)
        turned = self.placement is Placement.V and chunk % 2 == 1
        return (self.num_ranks - 1 - rank if turned else rank), chunk

    def needs(self, rank: int, action: Action) -> Message | None:
        """What a computation or a receive takes of the stage beside its own; None at the model's ends."""
        stage = self.stage(rank, action.chunk)
        if action.kind in (Kind.FORWARD, Kind.RECEIVE_FORWARD):
            return Message(True, action.micro_batch, stage - 1) if stage > 0 else None
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.RECEIVE_BACKWARD):
            last = stage == self.num_stages - 1
            return None if last else Message(False, action.micro_batch, stage + 1)
        return None

    def makes(self, rank: int, action: Action) -> Message | None:
        """What a computation or a send has for the stage beside its own; None at the model's ends."""
        stage = self.stage(rank, action.chunk)
        if action.kind in (Kind.FORWARD, Kind.SEND_FORWARD):
            last = stage == self.num_stages - 1
            return None if last else Message(True, action.micro_batch, stage)
        if action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.SEND_BACKWARD):
            return Message(False, action.micro_batch, stage) if stage > 0 else None
        return None

    def ends(self, message: Message) -> tuple[int, int]:
        """The ranks that a message comes from and goes to; they may be one."""
        target = message.stage + (1 if message.forward else -1)
        return self.owner(message.stage)[0], self.owner(target)[0]

    def to_dict(self) -> dict[str, Any]:
        """Of numbers, strings and lists, as JSON has them."""
        return {
            "num_ranks": self.num_ranks,
            "num_chunks": self.num_chunks,
            "num_micro_batches": self.num_micro_batches,
            "placement": str(self.placement),
            "ranks": [[[str(a.kind), a.micro_batch, a.chunk] for a in own] for own in self.ranks],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schedule:
        """Of what `to_dict` makes.

        Raises:
            ValueError: data that is no schedule; the message names rank, position and value.
        """
        names = ("num_ranks", "num_chunks", "num_micro_batches", "placement", "ranks")
        if not isinstance(data, Mapping) or set(data) != set(names):
            raise ValueError(f"a schedule has the keys {', '.join(names)}, got {_short(data)}")
        placement, ranks = data["placement"], data["ranks"]
        if placement not in list(Placement):
            raise ValueError(f"placement must be {_one_of(Placement)}, got {placement!r}")
        if not isinstance(ranks, Sequence) or isinstance(ranks, str):
            raise ValueError(f"ranks must be a list, got {ranks!r}")
        actions = tuple(_actions(rank, own) for rank, own in enumerate(ranks))
        counts = {name: data[name] for name in names[:3]}
        return cls(placement=Placement(placement), ranks=actions, **counts)


def _actions(rank: int, rows: Any) -> tuple[Action, ...]:
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(f"rank {rank}: its actions must be a list, got {rows!r}")
    actions = []
    for at, row in enumerate(rows):
        where = f"rank {rank}, position {at}"
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
            raise ValueError(f"{where}: an action is [kind, micro-batch, chunk], got {row!r}")
        if row[0] not in list(Kind):
            raise ValueError(f"{where}: kind must be {_one_of(Kind)}, got {row[0]!r}")
        actions.append(Action(Kind(row[0]), row[1], row[2]))
    return tuple(actions)


def _one_of(names: type[StrEnum]) -> str:
    return "one of " + ", ".join(names)


def _short(data: Any) -> str:
    return ", ".join(map(repr, data)) if isinstance(data, Mapping) else repr(data)


def in_flight(schedule: Schedule) -> list[int]:
    """Most activations that each rank holds at once, in chunks of one micro-batch.

    They are held from the forward until `backward`, or until `backward_weight` where the backward is in two
    parts: an upper bound, as `backward_input` frees what only it needs. A forward-only schedule holds one.
    """
    peaks = []
    for actions in schedule.ranks:
        held = peak = 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                held += 1
            peak = max(peak, held)
            if action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT) or schedule.forward_only:
                held -= action.kind.computes
        peaks.append(peak)
    return peaks
