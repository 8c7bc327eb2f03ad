"""``examples/pretrain_gpt.py``, step by step in turns with another run of it.

    torchrun ... examples/take_turns.py --turns FOLDER --side accel --other stock [--first] \\
        [--turn-steps 5] [--profile] <Megatron's flags>

Used by the demo and by ``python -m accel bench step``. Each training step is timed between two
barriers; the times end up in ``FOLDER/<side>.json``. With ``--profile`` the last turn but one is
profiled on rank 0: seconds of one step for each operator, its own time, in
``FOLDER/<side>.profile.json``. (Not the last: the side that is done ends its processes meanwhile.)
"""

import accel.megatron_adaptor  # noqa: F401  (the one line)

# isort: split
import argparse
import json
import os
import runpy
import sys
from pathlib import Path

import torch
from megatron.training import training

from accel.testing.turns import Turns


def own_options() -> argparse.Namespace:
    """Ours, taken out of ``sys.argv``; the rest is Megatron's."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--turns", type=Path, required=True)
    parser.add_argument("--side", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--first", action="store_true")
    parser.add_argument("--turn-steps", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    options, sys.argv[1:] = parser.parse_known_args()
    return options


def barrier() -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()


def profiled(step, first: int, count: int, path: Path):
    """`step`, profiled from call number `first` on, `count` times."""
    calls = 0
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])

    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == first:
            profiler.start()
        result = step(*args, **kwargs)
        if calls == first + count - 1:
            profiler.stop()
            events = profiler.key_averages()
            seconds = {e.key: e.self_cpu_time_total / 1e6 / count for e in events}
            path.write_text(json.dumps(seconds))
        return result

    return call


def main() -> None:
    options = own_options()
    rank = int(os.environ.get("RANK", "0"))
    turns = Turns(
        options.turns,
        options.side,
        options.other,
        first=options.first,
        every=options.turn_steps,
        barrier=barrier,
        rank=rank,
    )
    step = training.train_step
    if options.profile and rank == 0:
        total = int(sys.argv[sys.argv.index("--train-iters") + 1])
        path = options.turns / f"{options.side}.profile.json"
        step = profiled(step, total - 2 * options.turn_steps + 1, options.turn_steps, path)
    training.train_step = turns.around(step)
    try:
        runpy.run_path(str(Path(__file__).with_name("pretrain_gpt.py")), run_name="__main__")
    finally:
        turns.finish()


if __name__ == "__main__":
    main()
