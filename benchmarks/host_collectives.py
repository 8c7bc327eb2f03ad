"""Collectives of two ranks: through shared memory (`host_shared_memory_collectives`) beside gloo, and gloo
with and without `host_batch_scheduling` and `host_shared_gloo_device`.

Memory      Two ranks on this host, each of one thread. A case is called `CALLS` times between two barriers,
            on one side after the other, round after round; rank 0's time of one call counts, and the median
            over the rounds. Both sides give the same bits, which is checked first. The size is that of the
            larger tensor of one rank: the input of a reduce-scatter, the output of an all-gather. 384 KiB
            is one layer's activations in the demo. Limit: a copy of that many bytes within one rank. Not
            compared: more ranks than two, which share these cores with the gloo threads of both.
Scheduling  Two hosts of the lab (benchmarks/lab), each of one core, at full speed. Both sides are gloo's
            all-reduce, ours with threads of gloo's that do not interrupt.
Groups      40 on this host (Megatron makes 24 with TP 2 and PP 2): what a rank's CPU does for them in a
            second in which nothing travels, and how long it takes to make and end them; ours on the default
            group's device.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from accel.device.cpu import shared_memory
from accel.patches import host_shared_gloo_device
from accel.testing import bench
from accel.testing.bench import OURS, row
from benchmarks.lab.link import hosts_of

NAME = "host_collectives"
RANKS, CALLS = 2, 20
SIZES_KIB = (8, 384, 8192)
GLOO, COPY = "gloo", "copy"

GROUPS = 40

Sides = dict[str, Callable[[], object]]


def cases(channel: shared_memory.Channel) -> Iterator[tuple[str, Sides, list[torch.Tensor]]]:
    """Name, sides, and what each side writes."""
    for kib in SIZES_KIB:
        for dtype in (torch.bfloat16, torch.float32):
            whole = torch.randn(kib * 1024 // dtype.itemsize).to(dtype)
            shard = whole.chunk(RANKS)[dist.get_rank()].clone()
            part, gathered, reduced = (
                torch.empty_like(shard),
                torch.empty_like(whole),
                whole.clone(),
            )
            total = dist.ReduceOp.SUM
            size = f"{kib} KiB {str(dtype).removeprefix('torch.')}"
            yield (
                f"reduce-scatter {size}",
                {
                    OURS: lambda: channel.reduce_scatter(part, [whole], total, False),
                    GLOO: lambda: dist.reduce_scatter_tensor(part, whole),
                },
                [part],
            )
            yield (
                f"all-gather {size}",
                {
                    OURS: lambda: channel.all_gather([gathered], shard, False),
                    GLOO: lambda: dist.all_gather_into_tensor(gathered, shard),
                },
                [gathered],
            )
            yield (
                f"all-reduce {size}",
                {
                    OURS: lambda: channel.all_reduce(reduced.copy_(whole), total, False),
                    GLOO: lambda: dist.all_reduce(reduced.copy_(whole)),
                },
                [reduced],
            )
    nothing: list[torch.Tensor] = []
    yield (
        "barrier",
        {OURS: lambda: channel.barrier(False), GLOO: dist.barrier},
        nothing,
    )


def check(name: str, sides: Sides, written: list[torch.Tensor]) -> None:
    results = []
    for call in sides.values():
        call()
        results.append([t.clone() for t in written])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs), f"{name}: the sides differ"


def seconds_per_call(sides: Sides, num_rounds: int) -> dict[str, float]:
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(num_rounds):
        for side, call in sides.items():
            dist.barrier()
            call()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            found[side].append((time.perf_counter() - start) / CALLS)
    return {side: statistics.median(values) for side, values in found.items()}


def group_rows(num_rounds: int) -> list[dict]:
    ways = {OURS: host_shared_gloo_device.devices_of_new_group, GLOO: contextlib.nullcontext}
    idle: dict[str, list[float]] = {side: [] for side in ways}
    made: dict[str, list[float]] = {side: [] for side in ways}
    for _ in range(num_rounds):
        for side, way in ways.items():
            dist.barrier()
            start = time.perf_counter()
            with way():
                groups = [dist.new_group() for _ in range(GROUPS)]
            seconds = time.perf_counter() - start
            busy = time.process_time()
            time.sleep(1)
            idle[side].append(time.process_time() - busy)
            dist.barrier()
            start = time.perf_counter()
            while groups:  # a group that is still held ends when nobody holds it
                dist.destroy_process_group(groups.pop())
            made[side].append(seconds + time.perf_counter() - start)
    method = f"median of {num_rounds} rounds, sides in turn; {RANKS} ranks on this host"
    return [
        row(name, metric, "ms", {side: 1e3 * statistics.median(of[side]) for side in ways}, method)
        for name, metric, of in (
            (f"{GROUPS} groups that wait, host_shared_gloo_device", "CPU time of a second", idle),
            (f"{GROUPS} groups made and ended, host_shared_gloo_device", "time", made),
        )
    ]


def rank_main(quick: bool) -> None:
    """Prints the rows, on rank 0, as one line of JSON."""
    dist.init_process_group("gloo")
    channel = shared_memory.channel()
    assert channel is not None, "no shared memory: the log says why"
    num_rounds, rows = 3 if quick else 15, []
    method = (
        f"median of {num_rounds} interleaved rounds of {CALLS} calls, {RANKS} ranks "
        "of one thread; limit: a copy of the result's bytes"
    )
    for name, sides, written in cases(channel):
        check(name, sides, written)
        if written:
            source = torch.empty(max(t.nbytes for t in written), dtype=torch.uint8)
            target = torch.empty_like(source)
            sides = {**sides, COPY: lambda: target.copy_(source)}
        times = {side: 1e3 * value for side, value in seconds_per_call(sides, num_rounds).items()}
        limit = times.pop(COPY, None)
        rows.append(row(name, "time", "ms", times, method, limit=limit))
    rows += group_rows(num_rounds)
    if dist.get_rank() == 0:
        print(json.dumps(rows))
    dist.destroy_process_group()


def rows(quick: bool) -> list[dict]:
    return shared_memory_rows(quick) + scheduling_rows(quick)


def scheduling_rows(quick: bool) -> list[dict]:
    with hosts_of("benchmarks._batch_scheduling_ranks", RANKS) as link:
        found, kind = link.run(["cases"], quick)
        method = (
            f"median of {found['rounds']} rounds of {found['calls']} calls, sides in turn; {RANKS} ranks of "
            f"one thread, {'each on a host of its own' if link.why is None else link.why}; {kind}"
        )
    return [
        row(f"{case}, host_batch_scheduling", "time", "ms", took, method)
        for case, took in found["milliseconds"].items()
    ]


def shared_memory_rows(quick: bool) -> list[dict]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(RANKS), "-m", f"benchmarks.{NAME}"]
    command += ["--quick"] * quick
    with subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=bench.CHECKOUT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            printed, _ = process.communicate()
        except BaseException:
            process.terminate()  # torchrun ends its ranks before it exits
            raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(printed.splitlines()[-1])


def main(argv: list[str] | None = None) -> int:
    args = bench.parser(NAME).parse_args(argv)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        rank_main(args.quick)
        return 0
    return bench.run_rows(NAME, rows, args)


if __name__ == "__main__":
    sys.exit(main())
