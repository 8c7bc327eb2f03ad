"""Part compiled_ops: what `torch.compile` makes of eager PyTorch; a peer in the rows of part ops.

After all others: its time is the compiler's, seconds for each op, and no other part waits for it.
"""

import sys

import torch._functorch.config as functorch

from benchmarks.gpu.ops import sweep, works
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.work import COMPILED, can_compile


def main() -> int:
    setting = Setting.from_argv()
    functorch.donated_buffer = False  # a backward is timed by running it again and again
    works_of = (work for work in works(setting.rehearse) if can_compile(work, setting.device))
    return sweep(setting, works_of, setting.folder / "compiled_ops.jsonl", timed=[COMPILED])


if __name__ == "__main__":
    sys.exit(main())
