"""Rows that go to their experts' ranks slice by slice, and what comes home in their places.

Places     A piece has its rows in one buffer, expert after expert, others' rows and this rank's: the former
           are received where they belong, the latter are copied there while the others are under way.
Order      between two ranks: the scalars and the rows of all slices, then whatever else the caller sends,
           then what comes home, slice after slice. Every rank keeps it. An outbox that posts together has
           the scalars and the first slice; the caller's and the second slice; then the first one's homecoming
           and the third, and so on.
Waiting    On a host, all that is to come is asked for at once and before anything is sent: nobody waits for
           a slower rank to ask, nor does the asking wait behind what leaves. On devices each slice's
           homecoming is a step in which all ranks send and receive, as a stream takes one step after the
           other; from an outbox that posts together, one step with the next slice's setting out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accel.parallel.collectives import Messages, Outbox
from accel.parallel.experts.traffic import Traffic

__all__ = ["Journey"]

Message = tuple[Tensor, int]


def asks_ahead(device: torch.device) -> bool:
    """Whether all that is to come is asked for before anything is sent ("Waiting", above)."""
    return device.type == "cpu"


class Journey:
    """The journey of one rank's rows, and of those that come to it. The rows set out at once, but from an
    outbox that posts together each slice as the one before it is given.

    Args:
        rows: `[P, H]`, contiguous; this rank's.
        home: `[P, H]`, contiguous; where what comes home is put. Rows of no piece are left alone.
        scalars: `[P]`, one for each row, that go with it; None: only rows do.
    """

    def __init__(
        self,
        traffic: Traffic,
        outbox: Outbox,
        rows: Tensor,
        home: Tensor,
        scalars: Tensor | None = None,
    ) -> None:
        self.traffic, self.outbox, self.home = traffic, outbox, home
        self.slices = range(traffic.slices)
        self.pieces = traffic.pieces
        self._rows, self._own_scalars = rows, scalars
        self._came = [rows.new_empty(piece.rows, rows.shape[1]) for piece in self.pieces]
        self._messages: list[Messages] = []
        self._asked = asks_ahead(rows.device) and not outbox.together
        if scalars is not None:
            self._scalars = [scalars.new_empty(piece.rows) for piece in self.pieces]
            self._with = {q: scalars.new_empty(n) for q, n in self._number_from().items()}
            out = [(torch.cat([scalars[r] for r in rs]), q) for q, rs in self._places_of().items()]
            self._scalars_out = self._post(out, [(into, q) for q, into in self._with.items()])
        if self._asked:
            self._out = [self._post([], self._into(i)) for i in self.slices]
            for i in self.slices:
                self._post(self._leaving(rows, i), [])
        else:
            self._out = []
            for _ in self.slices[: 1 if outbox.together else None]:
                self._next_sets_out()
        outbox.post()

    def ask(self) -> None:
        """Before anything is sent home: ask for all that comes home here."""
        if self._asked:
            for index in self.slices:
                self._post([], self._leaving(self.home, index))

    def arrived(self, index: int) -> Tensor:
        """The rows of a piece."""
        for here, own in self.traffic.staying[index]:
            self._came[index][here] = self._rows[own]
        self._out[index].wait_received()
        if len(self._out) < len(self.slices):
            self._next_sets_out()
        self.outbox.post()
        return self._came[index]

    def arrived_scalars(self) -> list[Tensor]:
        """Those of the rows of each piece."""
        assert self._own_scalars is not None
        for index in self.slices:
            for here, own in self.traffic.staying[index]:
                self._scalars[index][here] = self._own_scalars[own]
        self._scalars_out.wait_received()
        for source, came in self._with.items():
            parts = self._parts_of(self._scalars, source)
            for part, here in zip(parts, came.split([len(p) for p in parts]), strict=True):
                part.copy_(here)
        return self._scalars

    def send_home(self, index: int, results: Tensor) -> None:
        """Send home the results of a piece, contiguous, a row for each of its rows."""
        sends = [(results[rows], source) for rows, source in self.traffic.arriving[index]]
        self._post(sends, [] if self._asked else self._leaving(self.home, index))
        for here, own in self.traffic.staying[index]:
            self.home[own] = results[here]

    def send_scalars_home(self, scalars: Sequence[Tensor], home: Tensor) -> Callable[[], None]:
        """After all rows: one for each row of each piece, into their places in `home` `[P]`.

        Returns what waits for those that come home here and puts them into their places.
        """
        sends = [(torch.cat(self._parts_of(scalars, q)), q) for q in self._number_from()]
        places = self._places_of()
        sizes = {q: [rows.stop - rows.start for rows in of] for q, of in places.items()}
        into = {q: home.new_empty(sum(of)) for q, of in sizes.items()}
        messages = self._post(sends, [(came, q) for q, came in into.items()])

        def put() -> None:
            for index in self.slices:
                for here, own in self.traffic.staying[index]:
                    home[own] = scalars[index][here]
            messages.wait_received()
            for q, came in into.items():
                for rows, part in zip(places[q], came.split(sizes[q]), strict=True):
                    home[rows] = part

        return put

    def wait(self) -> None:
        """Wait until all is home, and nothing that was given here is read any more."""
        for messages in self._messages:
            messages.wait_received()
            messages.wait_sent()

    def _next_sets_out(self) -> None:
        index = len(self._out)
        self._out.append(self._post(self._leaving(self._rows, index), self._into(index)))

    def _post(self, sends: list[Message], receives: list[Message]) -> Messages:
        self._messages.append(self.outbox.add(sends, receives))
        return self._messages[-1]

    def _leaving(self, rows: Tensor, index: int) -> list[Message]:
        """Of this rank's rows, those that go to a slice of the others' experts."""
        return [(rows[where], rank) for where, rank in self.traffic.leaving[index]]

    def _into(self, index: int) -> list[Message]:
        """Where others' rows of a piece are put."""
        came = self._came[index]
        return [(came[rows], source) for rows, source in self.traffic.arriving[index]]

    def _places_of(self) -> dict[int, list[slice]]:
        """Rank -> which of this rank's rows go there, in the order of slices."""
        found: dict[int, list[slice]] = {}
        for of_slice in self.traffic.leaving:
            for rows, rank in of_slice:
                found.setdefault(rank, []).append(rows)
        return dict(sorted(found.items()))

    def _parts_of(self, of_pieces: Sequence[Tensor], source: int) -> list[Tensor]:
        """What belongs to rows of one rank, in the order in which it sent them."""
        return [
            values[rows]
            for values, arriving in zip(of_pieces, self.traffic.arriving, strict=True)
            for rows, rank in arriving
            if rank == source
        ]

    def _number_from(self) -> dict[int, int]:
        """Rank -> how many of its rows come here."""
        number = Counter[int]()
        for of_piece in self.traffic.arriving:
            for rows, source in of_piece:
                number[source] += rows.stop - rows.start
        return dict(sorted(number.items()))
