"""``examples/pretrain_gpt.py`` with accel enabled in a function: what it spawns does not have it."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    import pretrain_gpt  # imports accel.megatron_adaptor

    pretrain_gpt.main()


if __name__ == "__main__":
    main()
