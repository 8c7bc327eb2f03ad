"""``--tp-comm-overlap`` without Transformer Engine.

Stock hides tensor-parallel communication in Transformer Engine's userbuffers, and does not start without the
package. Here the flag turns on what ``--accel-tp-overlap`` does, with pieces by measured times (see
``tp_overlap``). Megatron's switches for parts of it count in the layers of the Transformer Engine spec:
``--disable-tp-comm-overlap-ag``, ``--disable-tp-comm-overlap-rs``, ``--tp-comm-overlap-rs-dgrad`` and those
of the configuration; in the local spec every linear layer overlaps. The bulk overlaps of the backward pass
are always there, and ``--tp-comm-overlap-cfg`` and what else describes userbuffers is not read. With
``--use-megatron-fsdp`` upstream's own linear layers run in the local spec, and nothing overlaps. A line says
so for each of them that was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from accel.feature import Context, Feature
from accel.parallel import linear_overlap as overlap
from accel.patches import _linear, tp_overlap
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, te_installed


def initialize_nothing() -> None:
    """There are no userbuffers."""


_PARTS = {
    "tp_comm_overlap_ag": (True, "--disable-tp-comm-overlap-ag"),
    "tp_comm_overlap_rs": (True, "--disable-tp-comm-overlap-rs"),
    "tp_comm_overlap_rs_dgrad": (False, "--tp-comm-overlap-rs-dgrad"),
    "tp_comm_overlap_disable_qkv": (False, "tp_comm_overlap_disable_qkv"),
    "tp_comm_overlap_disable_fc1": (False, "tp_comm_overlap_disable_fc1"),
}
"""Megatron's name -> its default, and how another value is given; those without a flag with --yaml-cfg."""

_BULK = {
    "tp_comm_bulk_wgrad": (True, "--disable-tp-comm-bulk-wgrad"),
    "tp_comm_bulk_dgrad": (True, "--disable-tp-comm-bulk-dgrad"),
}

_USERBUFFERS = {
    "tp_comm_split_ag": (True, "--disable-tp-comm-split-ag"),
    "tp_comm_split_rs": (True, "--disable-tp-comm-split-rs"),
    "tp_comm_atomic_ag": (False, "tp_comm_atomic_ag"),
    "tp_comm_atomic_rs": (False, "tp_comm_atomic_rs"),
    "tp_comm_bootstrap_backend": ("nccl", "--tp-comm-bootstrap-backend"),
}


def _prepare(context: Context) -> list[str]:
    """Changes nothing; a line for each setting that has no effect."""
    args = context.args
    if te_installed():
        return []
    lines = []
    if file := getattr(args, "tp_comm_overlap_cfg", None):
        lines.append(f"--tp-comm-overlap-cfg {file}: not read, it describes userbuffers")
    if not _value(args, "tp_comm_overlap", False):
        return lines
    local = getattr(args, "transformer_impl", None) == "local"
    if local and getattr(args, "use_megatron_fsdp", False):
        return [
            "--tp-comm-overlap does nothing with --use-megatron-fsdp and --transformer-impl local, where "
            "upstream's own linear layers run; with transformer_engine it does",
            *lines,
        ]
    if local:
        why = "with --transformer-impl local, where every linear layer overlaps"
        lines += [f"{flag} does nothing {why}" for flag in _given(args, _PARTS)]
    why = "collectives beside a product that does not need them are always there"
    lines += [f"{flag} does nothing: {why}" for flag in _given(args, _BULK)]
    return lines + [
        f"{flag} does nothing: it is about userbuffers" for flag in _given(args, _USERBUFFERS)
    ]


def _given(args: Any, settings: dict[str, tuple[Any, str]]) -> list[str]:
    """How those are given that have not their default."""
    return [
        flag
        for name, (default, flag) in settings.items()
        if _value(args, name, default) not in (default, None)
    ]


def _value(args: Any, name: str, default: Any) -> Any:
    """With --yaml-cfg it is nested until Megatron has validated it."""
    return getattr(getattr(args, "model_parallel", args), name, default)


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
