"""``python -m accel features``."""

from __future__ import annotations

import json

import pytest

from accel.cli import main
from accel.cli.features import describe
from accel.feature import Feature
from accel.patches import FEATURES
from accel.patches.command_line import ALIASES


def test_features_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["flag"] for row in rows] == [f.flag for f in FEATURES]
    keys = (
        "name flag aliases settings preset numerics megatron devices requires conflicts summary"
    ).split()
    assert all(list(row) == keys for row in rows)
    flags = {f.flag: {f.flag, *(s.flag(f.name) for s in f.settings)} for f in FEATURES}
    assert sorted(alias for row in rows for alias in row["aliases"]) == sorted(ALIASES)
    assert all(ALIASES[alias] in flags[row["flag"]] for row in rows for alias in row["aliases"])


def test_features_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["flag", "aliases", "summary"]
    assert len(lines) == len(FEATURES)
    for line, feature in zip(lines, FEATURES, strict=True):
        assert line.startswith(feature.flag)
        assert feature.summary in line


def test_conflicts_keep_their_reason() -> None:
    feature = Feature(
        name="swap", summary="s", preset="max", numerics="tolerance", megatron=">=0.17",
        conflicts={"norm": "both own the buffer"},
    )  # fmt: skip
    assert describe(feature)["conflicts"] == {"norm": "both own the buffer"}
