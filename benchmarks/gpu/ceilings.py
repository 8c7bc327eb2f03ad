"""Part ceilings: what this device does at best, before anything is compared with it.

copy   a device copy of 4 GiB: bytes read and written over its time
gemm   torch.mm of 8192 x 8192 x 8192 in bf16, random data: zeros run a tenth faster
"""

import sys

import torch

from benchmarks.gpu.setting import Setting, write_json
from benchmarks.gpu.timing import Times, measure, on_stream


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
    copy, gemm = times["copy"], times["gemm"]
    if not isinstance(copy, Times) or not isinstance(gemm, Times):
        print(f"copy: {copy}; gemm: {gemm}")
        return 1
    ceilings = {
        "machine": setting.machine,
        "device": "cpu" if setting.rehearse else torch.cuda.get_device_name(),
        "copy_bytes_per_s": 2 * num_bytes / (copy.best * 1e-6),
        "gemm_flops_per_s": 2 * size**3 / (gemm.best * 1e-6),
    }
    write_json(setting.folder / "ceilings.json", ceilings)
    print(ceilings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
