"""The generated pages are what the features and the results say."""

import subprocess
import sys
from pathlib import Path

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
