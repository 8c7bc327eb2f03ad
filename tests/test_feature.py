"""Choosing features: presets, explicit wishes, requirements, clashes, reasons."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from accel.feature import Choice, Context, Feature, active, choose


def feature(name: str, **fields: Any) -> Feature:
    defaults: dict[str, Any] = {
        "summary": "x",
        "preset": "fast",
        "numerics": "tolerance",
        "megatron": ">=0.17.1,<0.20",
    }
    return Feature(name=name, **{**defaults, **fields})


BASE = feature("base", preset="exact")
FUSED = feature("fused", requires=("base",))
RIVAL = feature("rival", preset="max", conflicts={"fused": "both own the buffer"})
PICKY = feature("picky", conflicts={"tp_comm_overlap": "it owns the buffer"})
HERE = Context("cpu", "0.19.2", SimpleNamespace(tp_comm_overlap=False))
THERE = Context("cpu", "0.19.2", SimpleNamespace(tp_comm_overlap=True))


def states(choices: list[Choice]) -> dict[str, str]:
    return {c.feature.name: c.state for c in choices}


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("off", []), ("exact", ["base"]), ("fast", ["base", "fused"]), ("max", ["base", "fused"])],
)
def test_presets_contain_each_other(preset: str, expected: list[str]) -> None:
    assert [f.name for f in active(choose([BASE, FUSED], preset, {}, HERE))] == expected


def test_explicit_wish_beats_the_preset_and_brings_what_it_needs() -> None:
    chosen = choose([BASE, FUSED], "off", {"fused": True}, HERE)
    assert [(c.asked, c.state) for c in chosen] == [
        ("required by fused", "active"),
        ("flag", "active"),
    ]
    assert states(choose([BASE, FUSED], "fast", {"fused": False}, HERE))["fused"] == "off"


def test_what_another_feature_does_is_told_where_both_are_active() -> None:
    told = "the sum is elsewhere"
    busy = feature("busy", aside=lambda context: "not on Sundays", requires=("base",))
    relief = feature("relief", preset="max", relieves={"base": told, "busy": told, "fused": told})
    table = [BASE, busy, FUSED, relief]

    def reasons(preset: str, wishes: dict[str, Any]) -> dict[str, str]:
        return {c.feature.name: c.reason for c in choose(table, preset, wishes, HERE)}

    with_it = reasons("max", {"fused": False})
    assert with_it == {"base": told, "busy": f"not on Sundays; {told}", "fused": "", "relief": ""}
    assert reasons("fast", {}) == {"base": "", "busy": "not on Sundays", "fused": "", "relief": ""}


@pytest.mark.parametrize("wish", [0, 1, "false", []])
def test_a_feature_without_a_value_takes_none(wish: Any) -> None:
    with pytest.raises(ValueError, match=r"--accel-base takes no value, got .*: use True"):
        choose([BASE], "off", {"base": wish}, HERE)


def test_requirement_turned_off_names_both_flags() -> None:
    with pytest.raises(ValueError, match="--accel-fused needs --accel-base, which was turned off"):
        choose([BASE, FUSED], "fast", {"base": False, "fused": True}, HERE)


def test_requirement_turned_off_leaves_a_feature_of_the_preset_idle() -> None:
    choices = choose([BASE, FUSED], "fast", {"base": False}, HERE, strict=True)
    assert states(choices) == {"base": "off", "fused": "idle"}
    assert choices[1].reason == "needs base, which is off"


def test_a_skipped_requirement_skips() -> None:
    broken = feature("base", preset="exact", unavailable=lambda context: "no kernel")
    choices = choose([broken, FUSED], "fast", {}, HERE)
    assert (choices[1].state, choices[1].reason) == ("skipped", "needs base: no kernel")


def test_clash_of_two_asked_features_names_both_flags_and_the_reason() -> None:
    with pytest.raises(ValueError, match=r"--accel-rival and --accel-fused .*both own the buffer"):
        choose([BASE, FUSED, RIVAL], "off", {"fused": True, "rival": True}, HERE)


def test_clash_with_a_megatron_flag() -> None:
    with pytest.raises(ValueError, match=r"--accel-picky and --tp-comm-overlap .*owns the buffer"):
        choose([PICKY], "off", {"picky": True}, THERE)
    (choice,) = choose([PICKY], "fast", {}, THERE)
    assert (choice.state, "--tp-comm-overlap" in choice.reason) == ("skipped", True)


def test_what_has_nothing_to_do_clashes_with_nobody_unless_it_was_asked_for_by_name() -> None:
    resting = replace(PICKY, idle=lambda context: "nothing to do")
    (choice,) = choose([resting], "fast", {}, THERE, strict=True)
    assert (choice.state, choice.reason) == ("idle", "nothing to do")
    with pytest.raises(ValueError, match="it owns the buffer"):
        choose([resting], "fast", {"picky": True}, THERE)


@pytest.mark.parametrize("idle", ["one", "other"])
def test_a_feature_that_rests_is_in_nobodys_way(idle: str) -> None:
    """Asked for by name too: neither would change anything for the other."""
    why = {idle: lambda context: "nothing to do"}
    one = feature("one", preset="fast", idle=why.get("one", lambda context: None))
    other = feature(
        "other",
        preset=None,
        conflicts={"one": "both take the last byte"},
        idle=why.get("other", lambda context: None),
    )
    for wishes in ({"other": True}, {"one": True, "other": True}):
        found = {c.feature.name: c.state for c in choose([one, other], "fast", wishes, HERE)}
        assert found == {"one": "active", "other": "active"} | {idle: "idle"}


def test_what_a_named_feature_needs_is_not_refused_in_passing() -> None:
    base = feature("base", preset=None, refuses=lambda context: "not with --this")
    middle = feature("middle", preset=None, requires=("base",))
    top = feature("top", preset="fast", requires=("middle",))
    skipped = choose([base, middle, top], "fast", {}, HERE)
    assert [c.state for c in skipped] == ["skipped"] * 3
    with pytest.raises(
        ValueError, match=r"^--accel-base: not with --this \(--accel-top needs --acc"
    ):
        choose([base, middle, top], "fast", {"top": True}, HERE)
    with pytest.raises(ValueError, match=r"this \(--accel-middle needs --accel-base\)$"):
        choose([base, middle, top], "fast", {"middle": True}, HERE)
    with pytest.raises(ValueError, match=r"^--accel-base: not with --this$"):
        choose([base, middle, top], "fast", {"base": True}, HERE)


def test_skip_has_a_reason_and_is_an_error_when_strict() -> None:
    broken = feature("broken", unavailable=lambda context: f"no kernel for {context.device}")
    (choice,) = choose([broken], "fast", {}, HERE)
    assert (choice.state, choice.reason) == ("skipped", "no kernel for cpu")
    with pytest.raises(ValueError, match="--accel-strict: --accel-broken: no kernel for cpu"):
        choose([broken], "fast", {}, HERE, strict=True)


def test_idle_is_no_fault() -> None:
    idle = feature("idle", idle=lambda context: "nothing to do")
    other = feature("other", devices=("npu",))
    chosen = choose([idle, other], "fast", {}, HERE, strict=True)
    assert [(c.state, c.reason) for c in chosen] == [
        ("idle", "nothing to do"),
        ("idle", "concerns npu only"),
    ]


def test_megatron_range() -> None:
    old = Context("cpu", "0.16.1", None)
    assert states(choose([BASE], "exact", {}, old)) == {"base": "skipped"}
    assert states(choose([BASE], "exact", {}, old, allow_untested=True)) == {"base": "active"}


def test_what_others_have_replaced_is_left_to_them() -> None:
    def taken(feature: Feature) -> str | None:
        return "liger has it" if feature is BASE else None

    base, fused = choose([BASE, FUSED], "fast", {}, HERE, taken=taken)
    assert (base.state, base.reason) == ("skipped", "liger has it")
    assert (fused.state, fused.reason) == ("skipped", "needs base: liger has it")
    with pytest.raises(ValueError, match="--accel-strict: --accel-base: liger has it"):
        choose([BASE, FUSED], "fast", {}, HERE, taken=taken, strict=True)


def test_unknown_preset() -> None:
    with pytest.raises(ValueError, match="unknown preset 'fats': use off, exact, fast, max"):
        choose([BASE], "fats", {}, HERE)
