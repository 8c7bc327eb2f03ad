"""``python -m accel features``: the table of contents of accel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from accel.cli import tables
from accel.cli.parser import Parser
from accel.feature import Feature, Setting

__all__ = ["main"]

_COLUMNS = (
    ("flag", "aliases", "summary"),
    ("preset", "numerics"),
    ("megatron", "devices"),
    ("requires", "conflicts"),
    ("settings",),
)


def main(argv: Sequence[str]) -> int:
    args = Parser("features").parse(argv)

    from accel.patches import FEATURES

    rows = [describe(feature) for feature in FEATURES]
    if args.json:
        print(json.dumps(rows, indent=2))
    else:
        tables.show([{k: _text(v) for k, v in row.items()} for row in rows], _COLUMNS)
    return 0


def describe(feature: Feature) -> dict[str, Any]:
    """One row: plain types only, as ``--json`` prints it."""
    from accel.patches.command_line import ALIASES

    flags = {feature.flag, *(s.flag(feature.name) for s in feature.settings)}
    return {
        "name": feature.name,
        "flag": feature.flag,
        "aliases": [theirs for theirs, ours in ALIASES.items() if ours in flags],
        "settings": [_setting(feature, s) for s in feature.settings],
        "preset": feature.preset,
        "numerics": feature.numerics,
        "megatron": feature.megatron,
        "devices": list(feature.devices),
        "requires": list(feature.requires),
        "conflicts": dict(feature.conflicts),
        "summary": feature.summary,
    }


def _setting(feature: Feature, setting: Setting) -> str:
    """As ``--help`` shows it."""
    if setting.name:
        return f"{setting.flag(feature.name)} {setting.metavar}: {setting.summary}"
    value = f"[{setting.metavar} ...]" if setting.many else setting.metavar
    return f"{feature.flag} {value}: {setting.summary}"


def _text(value: str | list[str] | dict[str, str] | None) -> str:
    if value is None:
        return "by name"
    return value if isinstance(value, str) else ", ".join(value)
