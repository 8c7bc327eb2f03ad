"""Part ceilings: what this device does at best, before anything is compared with it.

copy       a device copy of 4 GiB, launched or replayed, whichever is faster: bytes read and written
gemm       torch.mm of 8192 x 8192 x 8192 in bf16, random data: zeros run a tenth faster
sustained  the same for a second: what a training step's products have, once the chip's power is at its limit
"""

import sys
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.setting import Setting, write_json
from benchmarks.gpu.timing import Times, measure, on_stream, timed

SUSTAINED_SECONDS = 1.0


def sustained_seconds(call: Callable[[], Any], stream: torch.cuda.Stream) -> list[float]:
    """Of one call, tenth by tenth of `SUSTAINED_SECONDS` of nothing else."""
    each = timed(call, stream)
    calls = max(1, int(0.1 * SUSTAINED_SECONDS / each))

    def tenth() -> None:
        for _ in range(calls):
            call()

    return [timed(tenth, stream) / calls for _ in range(10)]


def main() -> int:
    setting = Setting.from_argv()
    size = 256 if setting.rehearse else 8192
    num_bytes = 2**20 if setting.rehearse else 2**32
    device = setting.device
    source = torch.randint(0, 100, (num_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    stream = None if setting.rehearse else on_stream()
    with torch.cuda.stream(stream):
        times = measure(
            {"copy": lambda: target.copy_(source), "gemm": lambda: torch.mm(a, b, out=out)},
            {"copy": [()], "gemm": [()]},
            stream,
        )
        sustained = (
            [] if setting.rehearse else sustained_seconds(lambda: torch.mm(a, b, out=out), stream)
        )
    copy, gemm = times["copy"], times["gemm"]
    if not isinstance(copy, Times) or not isinstance(gemm, Times):
        print(f"copy: {copy}; gemm: {gemm}")
        return 1
    ceilings = {
        "machine": setting.machine,
        "device": "cpu" if setting.rehearse else torch.cuda.get_device_name(),
        "copy_bytes_per_s": 2 * num_bytes / (min(copy.best, copy.eager) * 1e-6),
        "gemm_flops_per_s": 2 * size**3 / (gemm.best * 1e-6),
        "sustained_gemm_flops_per_s": 2 * size**3 / sustained[-1] if sustained else None,
    }
    write_json(setting.folder / "ceilings.json", ceilings)
    print(ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
