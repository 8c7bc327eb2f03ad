"""``python -m accel bench NAME``: hand over to :mod:`accel.testing.bench`."""

from __future__ import annotations

from collections.abc import Sequence

from accel.cli.parser import Parser

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    parser = Parser("bench")
    parser.add_argument("name", metavar="NAME", help="rms_norm, layer_norm, ...")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds")
    args = parser.parse(argv)

    from accel.testing import bench

    return bench.run(args.name, json=args.json, quick=args.quick)
