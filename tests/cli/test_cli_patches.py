"""``python -m accel patches``: contracts against the installed Megatron; nothing is applied."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import accel
from accel import patching
from accel.cli import facts, main
from accel.cli import patches as command
from accel.device import cpu
from accel.feature import Feature
from accel.patches import FEATURES
from accel.patches.command_line import HOOKS
from accel.patching import Patch
from accel.upstream import SUPPORTED_MEGATRON

PATCHES = [patch for feature in FEATURES for patch in feature.patches]


def bound() -> list[Any]:
    """What every target of a patch is bound to now, or None where it is unbound."""
    found: list[Any] = []
    for patch in (*PATCHES, *HOOKS, *cpu.patches()):
        try:
            found.append(patching.resolve(patch.target)[2])
        except patching.PatchError:
            found.append(None)
    return found


@pytest.fixture(scope="module")
def before() -> list[Any]:
    """Imports Megatron, once for this module."""
    return bound()


def report(flags: Sequence[str], capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    status = main(["patches", "--json", *flags])
    parsed: dict[str, Any] = json.loads(capfd.readouterr().out)
    rows = [*parsed["patches"], *parsed["hooks"], *parsed["device"]]
    assert status == (0 if all(row["fits"] for row in rows) else 1)
    return parsed


def test_every_patch_fits_the_installed_megatron_and_none_is_applied(
    before: list[Any], capfd: pytest.CaptureFixture[str]
) -> None:
    status = accel.status()
    found = report(["--device", "cpu"], capfd)
    assert all(now is then for now, then in zip(bound(), before, strict=True))
    assert accel.status() == status

    assert list(found) == ["megatron", "supported", "patches", "hooks", "device", "without_patches"]
    assert found["megatron"]["version"] == facts.megatron().version
    assert [row["target"] for row in found["patches"]] == [p.target for p in PATCHES]
    assert [row["target"] for row in found["hooks"]] == [p.target for p in HOOKS]
    assert [row["target"] for row in found["device"]] == [p.target for p in cpu.patches()]
    assert found["without_patches"] == [f.name for f in FEATURES if not f.patches]
    for row in (*found["patches"], *found["hooks"], *found["device"]):
        assert row["fits"], row["problem"]


def test_contract_of_each_row(before: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    keys = "feature target how replacement why contract fits problem".split()
    for row, patch in zip(report([], capfd)["patches"], PATCHES, strict=True):
        assert list(row) == keys
        assert row["contract"]["parameters"] == _listed(patch.contract)
        assert list(row["contract"]["sources"]) == list(SUPPORTED_MEGATRON)
        assert row["contract"]["sources"] == {v: patch.sources.get(v) for v in SUPPORTED_MEGATRON}


@pytest.mark.parametrize(
    ("flags", "there", "absent"),
    [
        (["--accel-preset", "off"], "gradient_accumulation_fusion", "norm"),
        (["--accel-preset", "fast", "--no-accel-fused-norm"], "norm", "fused_norm"),
        (["--accel-preset=off", "--use-fused-rmsnorm"], "norm", "host_bf16_gemm"),
        (["--no-accel-norm", "--no-accel-fused-norm"], "dataset_helpers", "norm"),
    ],
)
def test_flags_choose_features(
    flags: list[str],
    there: str,
    absent: str,
    before: list[Any],
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = report(flags, capfd)
    shown = {row["feature"] for row in found["patches"]} | set(found["without_patches"])
    assert there in shown
    assert absent not in shown


def test_patches_as_text(before: list[Any], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--device", "cpu"]) == 0
    out = capfd.readouterr().out
    for patch in (*PATCHES, *HOOKS):
        lines = [
            line for line in out.splitlines() if f"  {patch.target}  " in line and patch.why in line
        ]
        assert len(lines) == sum(p is patch for p in (*PATCHES, *HOOKS)), "a line for each feature"
        assert all(line.startswith("ok") and patch.replacement in line for line in lines)
    assert "accel.device.cpu.surface:compile_" in out
    assert f"megatron-core {facts.megatron().version}" in out.splitlines()[-1]


def test_the_patches_beyond_torch_npus_redirect(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["patches", "--device", "npu"]) == 0
    rows = [line for line in capfd.readouterr().out.splitlines() if "accel.device.npu:" in line]
    assert any("torch.distributed.distributed_c10d:all_reduce" in row for row in rows)
    assert all(row.startswith("ok") for row in rows)


@pytest.mark.parametrize(
    ("flag", "near"),
    [
        ("--accel-fused-nrm", "--accel-fused-norm"),
        ("--no-accel-fused-nrm", "--no-accel-fused-norm"),
        ("--use-fused-rmsnrom", "--use-fused-rmsnorm"),
        ("--devic=cpu", "--device"),
    ],
)
def test_misspelt_feature_flag(flag: str, near: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["patches", flag])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert f"did you mean {near}?" in err


@pytest.mark.parametrize(
    "flags",
    [
        ["--accel-preset", "fsat"],
        ["--device", "tpu"],
        ["--accel-fused-norm", "--no-accel-norm"],
        ["--accel-host-optimizer", "lots"],
        ["--accel-host-optimizer-ratio", "0.5"],
    ],
)
def test_impossible_choice_is_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["patches", *flags])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


UPSTREAM = """\
import os
print("an import that prints")
def scale(x, factor):
    return x * factor
def _ours(x, factor): ...
def _theirs(x, factor): ...
"""


def feature(name: str, *patches: Patch) -> Feature:
    return Feature(
        name=name, summary="s", preset="off", numerics="tolerance", megatron=">=0", patches=patches
    )


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module to patch, not imported yet."""
    (tmp_path / "cli_upstream.py").write_text(UPSTREAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cli_upstream", raising=False)
    return "cli_upstream"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"target": "cli_upstream:scael"}, "near names: scale"),
        ({"target": "cli_upstream:gone", "optional": True}, "absent in this version"),
        ({"target": "cli_no_such_module:scale"}, "cli_no_such_module"),
        ({"expects": ("x", "alpha")}, "('x', 'factor')"),
        ({"sources": {"0.19.2": "0123456789ab"}}, "none of those"),
        ({"replacement": "cli_upstream:gone"}, "gone"),
        ({"how": "wrap", "replacement": "cli_upstream:gone"}, "gone"),
        ({"how": "provide"}, "binds it already"),
        ({"how": "provide", "target": "cli_upstream:sale"}, "never mentions"),
        ({"how": "wrap", "replacement": "cli_upstream:scale"}, "TypeError"),
    ],
)
def test_what_does_not_fit_is_said_in_the_row(
    changes: dict[str, Any], problem: str | None, upstream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    base = {"target": f"{upstream}:scale", "replacement": f"{upstream}:_ours", "why": "Because."}
    with command._nothing_on_stdout():
        (row,) = command.rows({"scaling": [Patch(**{**base, **changes})]})
    assert row["fits"] is (problem is None or "absent" in problem)
    assert (problem or "") in (row["problem"] or "")
    assert capsys.readouterr().out == "", "what an import prints belongs on stderr"


def test_features_of_one_launch_must_get_on(upstream: str) -> None:
    both = {
        name: [Patch(target=f"{upstream}:scale", replacement=f"{upstream}:_{name}", why="W.")]
        for name in ("ours", "theirs")
    }
    assert all(row["fits"] for row in command.rows(both)), "each alone is fine"
    assert all("replaced by both" in row["problem"] for row in command.rows(both, together=True))


def test_patch_that_does_not_fit_is_status_1(
    upstream: str,
    before: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    renamed = Patch(target=f"{upstream}:scael", replacement=f"{upstream}:_ours", why="Because.")
    monkeypatch.setattr(command, "FEATURES", (feature("norm", renamed),))
    assert report([], capfd)["patches"][0]["fits"] is False
    assert main(["patches"]) == 1
    out = capfd.readouterr().out
    assert "\nNO    replace  norm" in out
    assert (
        "\nnorm: cli_upstream:scael: module cli_upstream has no 'scael'; near names: scale" in out
    )


def _listed(names: tuple[str, ...] | None) -> list[str] | None:
    return None if names is None else list(names)
