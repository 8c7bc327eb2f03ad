"""How calls are timed on a GPU: as replays of a CUDA graph, and as a program would make them.

The sides of a case take turns, round after round. Calls go round several sets of inputs, together
larger than the L2 cache many times, so that each call finds its inputs in memory, as in training. In
a graph the launches cost nothing: that is the time of the kernels. Called from Python, small work takes
as long as its launching does: that is the time that a user sees, and `host` is the part of it that the
CPU is busy, without waiting for the GPU.

In a rehearsal, on the CPU, all three are wall time.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Times", "measure", "on_stream", "timed"]

ROUNDS = 15
REPLAY_SECONDS = 4e-3
"""A round replays for about this long, far above the resolution of events."""
HOST_CALLS = 50
HOST_SECONDS = 0.05
"""Of the GPU's work that calls for the host's time make at most, or three do: a full queue makes it wait."""

Call = Callable[..., Any]


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: the median over rounds and the whole range of the graph's."""

    graph: float | None
    """None where the calls cannot be captured."""
    eager: float
    host: float
    spread: tuple[float, float]
    note: str = ""

    @property
    def best(self) -> float:
        """The kernels' own time: the graph's where there is one."""
        return self.eager if self.graph is None else self.graph


def on_stream() -> torch.cuda.Stream:
    """The stream of all timed work: what autograd replays on must be the stream of the capture."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return stream


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def timed(work: Callable[[], Any], stream: torch.cuda.Stream) -> float:
    """Seconds between the events around `work`."""
    begin, end = _events()
    begin.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


def _capture(call: Call, sets: Sequence[tuple], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A call that waits for the GPU, as `.item()` does, cannot be captured and is not tried.

    A capture that fails leaves PyTorch's generator as if it went on: no random number ever after.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(*sets[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for arguments in sets:
            call(*arguments)
    return graph


def _host_seconds(call: Call, sets: Sequence[tuple], seconds_each: float) -> float:
    """Of the CPU for one call. The queue of launches is empty at first and never full."""
    torch.cuda.synchronize()
    num_calls = max(3, min(HOST_CALLS, int(HOST_SECONDS / seconds_each)))
    calls = [sets[i % len(sets)] for i in range(num_calls)]
    begin = time.perf_counter()
    for arguments in calls:
        call(*arguments)
    seconds = (time.perf_counter() - begin) / num_calls
    torch.cuda.synchronize()
    return seconds


def measure(
    calls: dict[str, Call],
    input_sets: dict[str, Sequence[tuple]],
    stream: Any,
    rounds: int = ROUNDS,
) -> dict[str, Times | str]:
    """Time every side.

    Args:
        calls: side -> what does the work once, on one of its input sets.
        input_sets: side -> the arguments of successive calls.
        stream: from `on_stream`, current already; None times on the CPU.

    Returns:
        Side -> its times, or why it could not run: one side's failure is not the others'.
    """
    if stream is None:
        return {side: _on_cpu(call, input_sets[side]) for side, call in calls.items()}
    results: dict[str, Times | str] = {}
    ready: dict[str, Callable[[], Any]] = {}
    graphs: dict[str, bool] = {}
    notes: dict[str, str] = {}
    for side, call in calls.items():
        sets = input_sets[side]
        try:
            for arguments in (*sets, *sets):  # compiles, and touches what the calls will use
                call(*arguments)
            torch.cuda.synchronize()
        except Exception as error:
            results[side] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        try:
            ready[side], graphs[side] = _capture(call, sets, stream).replay, True
        except RuntimeError as error:
            notes[side] = f"not captured: {str(error).splitlines()[0][:120]}"
            torch.cuda.synchronize()

            def once(call: Call = call, sets: Sequence[tuple] = sets) -> None:
                for arguments in sets:
                    call(*arguments)

            ready[side], graphs[side] = once, False
    repeats = {
        side: max(1, int(REPLAY_SECONDS / max(timed(work, stream), 1e-6)))
        for side, work in ready.items()
    }
    seconds: dict[str, list[float]] = {side: [] for side in ready}
    for _ in range(rounds):
        for side, work in ready.items():

            def repeat(work: Callable[[], Any] = work, times: int = repeats[side]) -> None:
                for _ in range(times):
                    work()

            per_call = len(input_sets[side]) * repeats[side]
            seconds[side].append(timed(repeat, stream) / per_call)
    for side, values in seconds.items():
        sets, call = input_sets[side], calls[side]

        def loop(call: Call = call, sets: Sequence[tuple] = sets) -> None:
            for arguments in sets:
                call(*arguments)

        eager = statistics.median(timed(loop, stream) / len(sets) for _ in range(5))
        median = statistics.median(values)
        results[side] = Times(
            graph=1e6 * median if graphs[side] else None,
            eager=1e6 * eager,
            host=1e6 * _host_seconds(call, sets, eager),
            spread=(1e6 * min(values), 1e6 * max(values)),
            note=notes.get(side, ""),
        )
    return {side: results[side] for side in calls}


def _on_cpu(call: Call, sets: Sequence[tuple]) -> Times | str:
    try:
        call(*sets[0])
        begin = time.perf_counter()
        for arguments in sets:
            call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    each = 1e6 * (time.perf_counter() - begin) / len(sets)
    return Times(
        graph=None, eager=each, host=each, spread=(each, each), note="rehearsal: wall time"
    )
