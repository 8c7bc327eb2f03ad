"""Part triton_ops: what Triton's kernels take where CUDA C++ has its own; a peer in those ops' rows.

The kernels of both serve the same op, chosen once for a process: so this is another one than part ops.
"""

import os
import sys

from accel.ops import _cuda
from benchmarks.gpu.ops import sweep, works
from benchmarks.gpu.setting import CHECKOUT, Setting
from benchmarks.gpu.work import OURS

FILES = {
    **dict.fromkeys(("swiglu", "geglu", "bias_gelu", "squared_relu"), "activation"),
    "moe_unpermute": "moe_permute",
    **{"l2_norm": "multi_tensor", "scale": "multi_tensor"},
}
"""The kernels of an op, where its name is not theirs."""


def has_both(op: str) -> bool:
    """Whether there are kernels in CUDA C++ besides Triton's."""
    name = FILES.get(op, op)
    kernels = (f"csrc/cuda/{name}.cu", f"accel/_triton/{name}.py")
    return all((CHECKOUT / file).exists() for file in kernels)


def main() -> int:
    setting = Setting.from_argv()
    os.environ["ACCEL_CUDA_KERNELS"] = "triton"
    print(_cuda.reason())
    both = (work for work in works(setting.rehearse) if has_both(work.op))
    return sweep(setting, both, setting.folder / "triton_ops.jsonl", timed=[OURS])


if __name__ == "__main__":
    sys.exit(main())
