"""Part build: the carried wheels into a folder of their own, the native kernels into accel/.

No network: what is not carried is not there. The wheels come without their dependencies, which the
machine has (PyTorch, NumPy) or which are carried too; those of the peers that bring a compiler along
in an archive of their own (`pack_peers`).
"""

import os
import subprocess
import sys
import tarfile

import torch

from benchmarks.gpu.setting import CHECKOUT, SITE, WHEELS, Setting


def unpack_wheels() -> None:
    """Install the carried wheels into SITE."""
    wheels = sorted(map(str, WHEELS.glob("*.whl")))
    if not wheels:
        print(
            f"no wheels in {WHEELS.name}: `make gpu-wheels` fetches them where there is a network"
        )
    else:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
                *("--no-index", "--no-deps", "--upgrade", "--target", str(SITE)),
                *wheels,
            ],
            check=True,
        )
    for archive in sorted(WHEELS.glob("*.tar.xz")):
        with tarfile.open(archive) as peers:
            peers.extractall(SITE, filter="data")


def architectures(capability: tuple[int, int]) -> dict[str, str]:
    """For this GPU alone: all that `setup.py` builds for took 230 s of 16 cores, beside the tests."""
    name = "{}{}".format(*capability)
    return {"ACCEL_CUDA_ARCHS": name} if name in ("80", "90", "100") else {}


def build_kernels() -> None:
    """Compile in place what this machine's PyTorch needs; up to date files are left alone."""
    chosen = architectures(torch.cuda.get_device_capability())
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        cwd=CHECKOUT,
        # else a failure is a message and rc 0
        env={**chosen, **os.environ, "ACCEL_REQUIRE_NATIVE": "1"},
        check=True,
    )


def missing() -> str:
    """Why kernels are not there after all, asked in a process that has not looked before; "" if they are."""
    code = "from accel.ops import _cuda, _native; print(_native.reason() or _cuda.reason() or '')"
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    setting = Setting.from_argv()
    unpack_wheels()
    if setting.rehearse:
        print("rehearsal: the kernels of `make setup` are used")
        return 0
    build_kernels()
    if reason := missing():
        print(reason)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
