"""Part compiled_ops: peers that compile at their first call, in the rows of part ops: what `torch.compile`
makes of eager PyTorch, QuACK and FlashAttention-4.

After all others: its time is the compilers', seconds for each op, and no other part waits for them.
"""

import sys

import torch._functorch.config as functorch

from benchmarks.gpu.ops import sweep, works
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.work import COMPILED, LATE, Work, can_compile


def compiles(work: Work, device: str) -> bool:
    """Whether one of these peers is there."""
    return can_compile(work, device) or any(callable(work.sides.get(side)) for side in LATE)


def main() -> int:
    setting = Setting.from_argv()
    functorch.donated_buffer = False  # a backward is timed by running it again and again
    works_of = (work for work in works(setting.rehearse) if compiles(work, setting.device))
    return sweep(setting, works_of, setting.folder / "compiled_ops.jsonl", timed=[COMPILED, *LATE])


if __name__ == "__main__":
    sys.exit(main())
