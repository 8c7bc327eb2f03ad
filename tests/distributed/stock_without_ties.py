"""``examples/pretrain_gpt.py`` where an fp32 master moves as a shared one does if its rounding to bf16 is a
tie: one ulp towards zero. Prints how many moved."""

import runpy
import sys
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from accel.ops.remainder import join_remainder, split_remainder

ties = 0


def move(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global ties
    for master in (p.detach() for group in optimizer.param_groups for p in group["params"]):
        shared = join_remainder(*split_remainder(master))
        ties += int((shared != master).sum())
        master.copy_(shared)


register_optimizer_step_post_hook(move)
sys.argv[0] = str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py")
runpy.run_path(sys.argv[0], run_name="__main__")
print(f"ties: {ties}")
