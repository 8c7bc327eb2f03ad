"""Start from a wheel: the dataset helpers are built already.

Megatron calls ``compile_helpers()``, which runs ``make`` in ``megatron/core/datasets``,
unconditionally at start. The wheels carry the compiled ``helpers_cpp`` but no Makefile, so stock
Megatron from PyPI exits with status 1 before training. With this, ``make`` runs only when
``helpers_cpp`` cannot be imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from accel.feature import Feature
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

FEATURE = Feature(
    name="dataset_helpers",
    summary="do not run make for the dataset helpers that a Megatron wheel brings compiled",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    patches=(
        Patch(
            target="megatron.core.datasets.utils:compile_helpers",
            replacement="accel.patches.dataset_helpers:unless_built",
            how="wrap",
            why="A wheel brings helpers_cpp compiled but no Makefile, and the failing make ends the program.",
        ),
    ),
)


@around
def unless_built(compile_helpers: Callable[[], None]) -> None:
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
        compile_helpers()
