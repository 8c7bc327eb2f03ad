"""Writes docs/tp_overlap.json, from which docs/generate.py draws the picture of overlapped layers.

    python docs/record_overlap.py

Takes the overlap lab's link (benchmarks/lab), a minute, and a machine on which nothing else runs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> None:
    sys.path.insert(0, str(HERE.parent))
    from accel.testing.bench import commit
    from benchmarks.tp_overlap import trace

    found = trace()
    sides = {
        side: [
            [[lane, round(start, 5), round(end, 5)] for lane, start, end in rank] for rank in ranks
        ]
        for side, ranks in found["sides"].items()
    }
    report = {"commit": commit(), "shape": found["shape"], "link": found["link"], "sides": sides}
    (HERE / "tp_overlap.json").write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
