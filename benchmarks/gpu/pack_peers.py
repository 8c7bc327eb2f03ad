"""`make gpu-peers`: QuACK, FlashAttention-4 and the compiler they need, into one archive to carry.

As wheels they have 102 MB, 92 of them the compiler. Packed more tightly they fit into the 60 MiB that a
machine without a network may get; it takes some minutes.
"""

import lzma
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.setting import CHECKOUT, WHEELS

REQUIREMENTS = CHECKOUT / "requirements" / "gpu-peers.txt"
ARCHIVE = WHEELS / "peers.tar.xz"
FILTERS = [
    {"id": lzma.FILTER_X86},  # jumps and calls to the same place look the same
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "dict_size": 256 << 20},
]


def pack(wheels: Iterable[Path], archive: Path) -> None:
    """The files of all wheels as one .tar.xz, there whole or not at all."""
    unfinished = archive.with_suffix(".tmp")
    with tempfile.TemporaryDirectory() as scratch:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as content:
                content.extractall(scratch)
        with (
            lzma.open(unfinished, "wb", filters=FILTERS) as out,
            tarfile.open(fileobj=out, mode="w") as tar,
        ):
            for name in sorted(os.listdir(scratch)):
                tar.add(Path(scratch) / name, name)
    unfinished.replace(archive)


def main() -> int:
    WHEELS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [
                *(
                    sys.executable,
                    "-m",
                    "pip",
                    "download",
                    "--quiet",
                    "--disable-pip-version-check",
                ),
                *("--no-deps", "--only-binary", ":all:", "--dest", folder),
                *("--requirement", str(REQUIREMENTS)),
            ],
            check=True,
        )
        pack(Path(folder).glob("*.whl"), ARCHIVE)
    print(f"{ARCHIVE.relative_to(CHECKOUT)}: {ARCHIVE.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
