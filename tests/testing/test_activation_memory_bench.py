"""benchmarks/activation_memory.py: what it promises of bytes and gradients, and its picture."""

from __future__ import annotations

from pathlib import Path

from benchmarks import activation_memory as bench
from tests.ops.contract import needs_native


@needs_native
def test_quick_rows() -> None:
    found: dict[str, list[float]] = {}
    for row in bench.rows(quick=True):
        found.setdefault(row["metric"], []).append(row["ours"])
    assert found.pop("bytes off the formula") == [0] * 3
    assert found.pop("gradients that differ") == [0] * 6
    generous, tight = found.pop("peak in a budget")
    assert tight < generous
    rest = {"bytes of activations", "peak of a step", "step time", "step time in a budget"}
    assert set(found) == rest


@needs_native
def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    assert bench.main(["--quick", "--picture", str(path)]) == 0
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
