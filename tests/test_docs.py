"""The generated pages are what the features and the results say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_pages_are_up_to_date() -> None:
    command = [sys.executable, ROOT / "docs" / "generate.py", "--check"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr


def test_every_benchmark_of_a_feature_exists() -> None:
    from accel.patches import FEATURES

    for feature in FEATURES:
        for name in feature.benchmarks:
            assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"{feature.name}: {name}"


def test_the_best_peers_are_measured_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of an op counts; what is less exact, or accel's own in Triton, is no peer."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    from generate import table
    from gpu import against_the_best

    sides = {
        "accel": {"us": 2.0, "note": ""},
        "liger": {"us": 1.0, "note": "less exact: by much"},
        "accel in Triton": {"us": 1.0, "note": ""},
        "quack": {"us": 3.0, "note": ""},
        "flash": {"absent": "not installed"},
    }
    row = {"op": "rms_norm", "mode": "forward", "shape": "2 x 8", "sides": sides}
    failed = {**row, "op": "rope", "sides": {"accel": {"absent": "wrong"}}}
    times = {
        "metric": "time",
        "case": "8x8",
        "ours": 4.0,
        "peers": {"a": 6.0, "b": 5.0},
        "unit": "ms",
    }
    reports = {
        "gpu/results": {"ops": [row, {**row, "mode": "backward"}, failed]},
        "cpu/swiglu": {"name": "swiglu", "rows": [{**times, "metric": "bandwidth"}, times]},
        "cpu/pipeline": {"name": "pipeline", "rows": [times]},
    }
    for name, report in reports.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    assert against_the_best(tmp_path, table).splitlines() == [
        "| op | cpu | gpu |",
        "| --- | --- | --- |",
        "| `rms_norm` |  | forward 2 x 8: **2** us, quack 3 (1.50x) |",
        "| `swiglu` | 8x8: **4** ms, b 5 (1.25x) |  |",
    ]


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [link.partition("#")[0] for link in links if not re.match(r"https?:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_the_readme_names_features_that_exist() -> None:
    from accel.cli.features import describe
    from accel.patches import FEATURES

    text = (ROOT / "README.md").read_text()
    flags = {flag for f in FEATURES for flag in (f.flag, *map(str, describe(f)["settings"]))}
    known = {flag.split()[0] for flag in flags} | {"--accel-preset", "--accel-strict"}
    named = set(re.findall(r"--accel-[a-z][a-z-]*[a-z]", text))
    assert len(named) > 10
    assert named <= known
