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
    assert found.pop("gradients that differ") == [0] * 4
    assert set(found) == {"bytes of activations", "peak of a step", "step time"}


@needs_native
def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    bench.timeline(path, bench.QUICK)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
