"""What a link gives: goodput of one large message, alone and in company, and the latency of a tiny one.

    one way      rank 0 sends to rank 1, then rank 1 to rank 0, in turn
    both ways    both at the same time; the slower of the two
    ring         every rank sends to the next; the slowest of the links
    computing    as ring, while every rank multiplies matrices on its one thread; the slowest of the links

Goodput is the message's bytes by the time from where both ends have asked for it until the receiver has it.
`measure` launches this file's ranks.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from benchmarks.lab import launch
from benchmarks.lab.limited import limit
from benchmarks.lab.network import Network

__all__ = ["Measured", "measure"]

MATRIX = 256
PINGS = 100


@dataclass(frozen=True)
class Measured:
    """Of each repetition: goodput in bytes per second, latency in seconds."""

    one_way: list[float]
    both_ways: list[float]
    ring: list[float]
    computing: list[float]
    compute_kept: list[float]
    """Speed of rank 0's multiplications during the transfers, as a fraction of that right after them."""
    latency: list[float]
    """Half a round trip."""


def measure(
    network: Network | None,
    ranks: int = 2,
    *,
    num_bytes: int = 4 << 20,
    repeats: int = 5,
    bytes_per_second: float | None = None,
    timeout: float = 120,
) -> Measured:
    """Launch the ranks and probe.

    Args:
        bytes_per_second: of the wrapper, where there is no network.
    """
    command = ["-m", "benchmarks.lab.probe", f"--bytes={num_bytes}", f"--repeats={repeats}"]
    if bytes_per_second is not None:
        command.append(f"--limit={bytes_per_second}")
    outputs = launch.run(network, command, ranks, timeout, launch.CHECKOUT_FIRST)
    return Measured(**json.loads(outputs[0]))


def exchange(
    targets: dict[int, int], num_bytes: int, meanwhile: Callable[[], object] | None = None
) -> tuple[float, float]:
    """Send messages at the same time.

    Args:
        targets: to whom each rank that sends does.
        meanwhile: called again and again until this rank's transfers are done.

    Returns:
        Seconds of the slowest transfer, and this rank's calls of `meanwhile` in a second.
    """
    rank = dist.get_rank()
    message = torch.full((num_bytes,), rank, dtype=torch.uint8)
    received = {s: torch.full_like(message, 255) for s, t in targets.items() if t == rank}
    times = torch.zeros(2, dtype=torch.float64)
    done = threading.Event()
    dist.barrier()

    def transfer() -> None:
        try:
            times[0] = time.monotonic()  # one machine: all ranks read the same clock
            works = [dist.irecv(into, source) for source, into in received.items()]
            if rank in targets:
                works.append(dist.isend(message, targets[rank]))
            for work in works:
                wait(work)
            times[1] = time.monotonic()
        finally:
            done.set()

    speed = 0.0
    if meanwhile is None:
        transfer()
    else:
        thread = threading.Thread(target=transfer)
        thread.start()
        speed = calls_in_a_second(meanwhile, done.is_set)
        thread.join()
    for source, into in received.items():
        assert bool((into == source).all()), f"rank {rank}: not what rank {source} has sent"
    every = [torch.empty_like(times) for _ in range(dist.get_world_size())]
    dist.all_gather(every, times)
    asked, ended = torch.stack(every).T.tolist()
    return max(ended[t] - max(asked[s], asked[t]) for s, t in targets.items()), speed


def wait(work: dist.Work | None) -> None:
    assert work is not None, "this rank is not of the group"
    work.wait()


def calls_in_a_second(function: Callable[[], object], enough: Callable[[], bool]) -> float:
    calls, begin = 0, time.perf_counter()
    while True:
        function()
        calls += 1
        if enough():
            return calls / (time.perf_counter() - begin)


def round_trips() -> list[float]:
    """Seconds between rank 0 and rank 1 and back."""
    rank, message = dist.get_rank(), torch.zeros(1)
    seconds = []
    for _ in range(PINGS):
        begin = time.perf_counter()
        if rank == 0:
            wait(dist.isend(message, 1))
            wait(dist.irecv(message, 1))
        elif rank == 1:
            wait(dist.irecv(message, 0))
            wait(dist.isend(message, 0))
        seconds.append(time.perf_counter() - begin)
    return seconds


def probe(num_bytes: int, repeats: int) -> Measured:
    """On every rank; what rank 0 returns counts."""
    size = dist.get_world_size()
    ring = {rank: (rank + 1) % size for rank in range(size)}
    matrix = torch.randn(MATRIX, MATRIX)

    def multiply() -> None:
        torch.mm(matrix, matrix)

    def goodput(*turns: dict[int, int]) -> list[float]:
        exchange(turns[0], num_bytes)  # the connections' first
        turns *= repeats
        return [num_bytes / exchange(targets, num_bytes)[0] for targets in turns]

    one_way, both_ways = goodput({0: 1}, {1: 0}), goodput({0: 1, 1: 0})
    around = goodput(ring) if size > 2 else both_ways
    computing, kept = [], []
    for _ in range(repeats):
        seconds, during = exchange(ring, num_bytes, multiply)
        computing.append(num_bytes / seconds)
        dist.barrier()
        until = time.monotonic() + seconds
        kept.append(during / calls_in_a_second(multiply, lambda: time.monotonic() > until))
    latency = [seconds / 2 for seconds in round_trips()]
    return Measured(one_way, both_ways, around, computing, kept, latency)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="One rank of the probe.")
    parser.add_argument("--bytes", type=int, default=4 << 20, help="of the large message")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=float, help="rate of the wrapper, bytes per second")
    args = parser.parse_args(argv)
    dist.init_process_group("gloo")
    with limit(args.limit) if args.limit else nullcontext():
        found = probe(args.bytes, args.repeats)
    if dist.get_rank() == 0:
        print(json.dumps(asdict(found)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
