"""``--tp-comm-overlap`` without Transformer Engine.

Stock hides tensor-parallel communication in Transformer Engine's userbuffers, and does not start without the
package. Here the flag turns on what ``--accel-tp-overlap`` does, with pieces by measured times (see
``tp_overlap``). Megatron's switches for parts of it count in the layers of the Transformer Engine spec:
``--disable-tp-comm-overlap-ag``, ``--disable-tp-comm-overlap-rs`` and those of the configuration; the bulk
overlaps of the backward pass are always there. ``--tp-comm-overlap-cfg`` describes userbuffers and is not
read; a line says so.
"""

from __future__ import annotations

from collections.abc import Callable

from accel.feature import Context, Feature
from accel.parallel import overlap
from accel.patches import _linear, tp_overlap
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, te_installed


def initialize_nothing() -> None:
    """There are no userbuffers."""


def _prepare(context: Context) -> list[str]:
    file = getattr(context.args, "tp_comm_overlap_cfg", None)
    if te_installed() or not file:
        return []
    return [f"--tp-comm-overlap-cfg {file}: not read, it describes userbuffers"]


def _idle(context: Context) -> str | None:
    if not getattr(context.args, "tp_comm_overlap", False):
        return "no --tp-comm-overlap"
    return "Transformer Engine is installed" if te_installed() else None


def switch_on() -> Callable[[], None]:
    """Unless ``--accel-tp-overlap`` has, with what it was given."""
    return tp_overlap.switch_on() if overlap.current() is None else lambda: None


FEATURE = Feature(
    name="tp_comm_overlap",
    summary="serve --tp-comm-overlap where Transformer Engine is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    prepare=_prepare,
    idle=_idle,
    switch_on=switch_on,
    patches=(
        Patch(
            target="megatron.training.initialize:_initialize_tp_communicators",
            replacement="accel.patches.tp_comm_overlap:initialize_nothing",
            expects=(),
            why="It imports Transformer Engine to make its userbuffers.",
        ),
        _linear.LINEAR,
        *_linear.OVERLAP,
    ),
)
