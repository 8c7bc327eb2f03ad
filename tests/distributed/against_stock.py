"""A feature's trainings against stock's, digit for digit, and each going on from the other's checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from unittest import mock

import pytest

from . import training
from .test_resume import numbers
from .training import KINDS, shared_folder, train

__all__ = ["FreshStore", "check_checkpoints", "check_training"]

ITERATIONS, SAVED_AT = 4, 2
UNTIED = "--untie-embeddings-and-output-weights"

_OF_STOCK: dict[tuple[object, ...], list[tuple[str, str]]] = {}
"""Flags and what else there was -> losses and gradient norms."""

FreshStore = Callable[[], None]
"""The fixture `fresh_store`."""


def check_training(
    kind: str,
    flags: str,
    ours: Sequence[str],
    stock: Sequence[str],
    fresh_store: FreshStore,
    tolerance: float = 0.0,
    bf16: bool = True,
    changed: str = "",
) -> None:
    """Losses and gradient norms under `ours` are those under `stock`; `kind`: of `KINDS`, or ``tied``.

    `tolerance`: relative, where digit for digit is not to be had. `changed`: what the test has changed of
    both sides, as stock's numbers are kept for the next test of the same flags in this launch.
    """
    shown = [f for f in training.MODEL if kind != "tied" or f != UNTIED]
    with mock.patch.object(training, "MODEL", shown):
        given = " ".join([*KINDS.get(kind, []), flags])  # the later of two wins
        key = (*shown, given, *stock, bf16, changed)
        if key not in _OF_STOCK:
            _OF_STOCK[key] = _run(fresh_store, given, *stock, bf16=bf16)
        expected = _OF_STOCK[key]
        found = _run(fresh_store, given, *ours, bf16=bf16)
    _check_same(found, expected, tolerance)
    assert len(expected) == ITERATIONS * _logs()


def check_checkpoints(
    case: str,
    first: str,
    then: str,
    ours: Sequence[str],
    stock: Sequence[str],
    fresh_store: FreshStore,
    tolerance: float = 0.0,
    bf16: bool = True,
) -> None:
    """What one side saved in the layout `first`, both go on from in the layout `then`, as the uninterrupted
    run does. `tolerance` as above."""
    found = {}
    sides = {"ours": ours, "stock": stock}
    for saved_by, flags in sides.items():
        folder = shared_folder(f"{case}-{ours[0].strip('-')}-{saved_by}")
        save = ["--save", str(folder), "--save-interval", str(SAVED_AT)]
        found[saved_by, "whole"] = _run(fresh_store, first, *flags, *save, bf16=bf16)[SAVED_AT:]
        (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
        for loaded_by, these in sides.items():
            if "ours" in (saved_by, loaded_by) or first != then:
                load = ["--load", str(folder)]
                found[saved_by, loaded_by] = _run(fresh_store, then, *these, *load, bf16=bf16)
    # Megatron averages the first loss that a process logs into the second
    resumed = [numbers for (_, loaded_by), numbers in found.items() if loaded_by != "whole"]
    for each in resumed:
        _check_same(each, resumed[0], tolerance)
    assert len(resumed[0]) == (ITERATIONS - SAVED_AT) * _logs()
    if first == then:
        norms = [[(norm,) for _, norm in numbers] for numbers in found.values()]
        for row in norms:
            _check_same(row, norms[0], tolerance)


def _check_same(
    found: Sequence[Sequence[str]], expected: Sequence[Sequence[str]], tolerance: float
) -> None:
    if not tolerance:
        assert found == expected
        return
    for one, other in zip(found, expected, strict=True):
        assert list(map(float, one)) == pytest.approx(list(map(float, other)), rel=tolerance)


def _run(
    fresh_store: FreshStore, flags: str, *more: str, bf16: bool = True
) -> list[tuple[str, str]]:
    """Loss and gradient norm of each iteration, on the rank that logs."""
    fresh_store()
    return numbers(
        train([*["--bf16"] * bf16, "--train-iters", str(ITERATIONS), *flags.split(), *more])
    )


def _logs() -> bool:
    return int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
