"""python -m tests.triton.shared_memory: what attention's kernels want of a block's shared memory, as JSON.

The calls that want the most where there is the least: 99 KiB on consumer GPUs; on an A100 fp32 with dropout.
"""

import functools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch

from accel._triton import attention
from accel.testing.compile_table import SHARED_LIMIT, _launches, shared_bytes

BF16, FP32 = torch.bfloat16, torch.float32
CASES = {
    "sm_80": [(256, 256, FP32, 0.1)],
    "sm_86": [(192, 128, FP32, 0.1), (256, 256, BF16, 0.1)],
    "sm_89": [(128, 128, FP32, 0.1), (512, 64, BF16, 0.0)],
    "sm_120": [(128, 128, BF16, 0.0)],
}
"""Architecture -> widths of q and v, dtype and dropout."""


def calls(arch: str) -> Iterator[tuple[str, Callable, tuple]]:
    for width, value_width, dtype, dropout in CASES[arch]:

        def empty(heads: int, columns: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(4096, 2, heads, columns, dtype=dtype, device="meta")

        q, k, v, out = (
            empty(8, width),
            empty(2, width),
            empty(2, value_width),
            empty(8, value_width),
        )
        lse = torch.empty(2, 8, 4096, device="meta")
        seed = torch.empty((), dtype=torch.int64, device="meta") if dropout else None
        rest = (None, None, seed, width**-0.5, -1, 0, dropout)
        name = f"{width}/{value_width} {dtype} dropout {dropout}"
        yield name, attention.forward, (q, k, v, *rest)
        yield name, attention.backward, (out, q, k, v, out, lse, *rest)


def main() -> None:
    wanted = {}
    for arch in CASES:
        attention.SHARED_LIMIT = SHARED_LIMIT[arch]
        attention.assumed_capability.set(divmod(int(arch.removeprefix("sm_")), 10))
        attention._shared_limit.cache_clear()
        module = SimpleNamespace(__name__="attention", compile_cases=functools.partial(calls, arch))
        for case, launch in _launches(module):
            name = f"{arch} {case} {launch.kernel.__name__}"
            wanted[name] = shared_bytes(launch, arch)
    print(json.dumps(wanted))


if __name__ == "__main__":
    main()
