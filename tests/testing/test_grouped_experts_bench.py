"""benchmarks/grouped_experts.py: its sides agree, and each has its numbers."""

from __future__ import annotations

import json
import subprocess
import sys

from accel.testing.bench import CHECKOUT
from benchmarks import grouped_experts
from tests.ops.contract import needs_native


@needs_native
def test_quick_rows() -> None:
    command = [sys.executable, "-m", "accel", "bench", grouped_experts.NAME, "--quick", "--json"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    time, faster = json.loads(done.stdout)["rows"]
    assert {time["metric"], faster["metric"]} == {"time", "speed-up over Megatron"}
    assert set(time["peers"]) == {grouped_experts.STOCK, grouped_experts.GROUPED}
    assert min(time["ours"], *time["peers"].values(), faster["ours"]) > 0
