"""Part overlap: how much of tensor parallelism's communication hides behind the products, on one GPU.

The other rank of a group of two is the host: what goes to it is copied into pinned memory on a stream of its
own, what comes from it out of pinned memory on another, which PCIe carries at some 50 GB/s each way. That is
the link of `accel.parallel.overlapped_linear`, whose own code runs.

    gemm     one product of all rows
    comm     the transfers by themselves
    ours     gather_matmul or matmul_reduce_scatter, in as many chunks as are best
    hidden   1 - (ours - gemm) / comm, as Flux reports it (Chang et al. 2024, arXiv:2406.06858)
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from accel.parallel import overlapped_linear
from accel.parallel.overlapped_linear import Plan, gather_matmul, matmul_reduce_scatter
from benchmarks.gpu.setting import Setting, write_json
from benchmarks.gpu.timing import Times, measure, on_stream

__all__ = ["TARGET", "Case", "Wire", "check", "hidden_share", "most_hidden"]

TARGET = 0.9
CHUNKS = (1, 2, 4, 8)
ALLOWED = 1e-2
"""Relative error of a bf16 result: two roundings, of a part and of the sum."""


class Wire:
    """A group of two ranks, of which this process is the first and the host's memory the other.

    Args:
        num_elements: of the bf16 values that one call sends, and of those that come.
    """

    def __init__(self, num_elements: int, device: str) -> None:
        self.on_gpu = device != "cpu"
        self.coming = torch.randn(num_elements).bfloat16()
        self.gone = torch.empty_like(self.coming)
        if self.on_gpu:
            self.coming, self.gone = self.coming.pin_memory(), self.gone.pin_memory()
            self.inward, self.outward = torch.cuda.Stream(), torch.cuda.Stream()
        self._at = 0

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return 0

    def next(self, num_elements: int) -> tuple[Tensor, Tensor]:
        """The next part of what comes and of where things go to; behind the last one the first again."""
        part = slice(self._at, self._at + num_elements)
        self._at = part.stop % self.coming.numel()
        return self.coming[part], self.gone[part]


class Copies:
    """`accel.parallel.collectives.Transfer` over a `Wire`."""

    def __init__(self, outgoing: Tensor, into: Tensor, wire: Wire) -> None:
        self._into, self._wire = into, wire
        coming, gone = wire.next(into.numel())
        if not wire.on_gpu:
            gone.view_as(outgoing).copy_(outgoing)
            into.copy_(coming.view_as(into))
            return
        ready = torch.cuda.current_stream().record_event()  # on the other rank too
        self._sent = self._copy(wire.outward, ready, outgoing, gone.view_as(outgoing))
        self._came = self._copy(wire.inward, ready, coming.view_as(into), into)

    @staticmethod
    def _copy(stream: Any, ready: Any, source: Tensor, target: Tensor) -> Any:
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait_received(self) -> None:
        if self._wire.on_gpu:
            torch.cuda.current_stream().wait_event(self._came)

    def wait_sent(self) -> None:
        if self._wire.on_gpu:
            torch.cuda.current_stream().wait_event(self._sent)

    def received(self) -> Tensor:
        self.wait_received()
        return self._into


@dataclass(frozen=True)
class Case:
    """A linear layer of a group of two. `rows` are a rank's, K and N those of its part of the weight."""

    name: str
    gathers: bool
    rows: int
    k: int
    n: int

    def make(self, device: str) -> tuple[Tensor, Tensor]:
        rows = self.rows if self.gathers else 2 * self.rows
        x = torch.randn(rows, self.k, device=device).bfloat16()
        return x, (torch.randn(self.k, self.n, device=device) / self.k**0.5).bfloat16()

    @property
    def sent(self) -> int:
        """Elements that travel each way."""
        return self.rows * (self.k if self.gathers else self.n)

    def ours(self, wire: Wire, chunks: int) -> Callable[[Tensor, Tensor], Tensor]:
        plan = Plan(chunks, "ring")
        group: Any = wire
        if self.gathers:
            return lambda x, w: gather_matmul(x, w, group, plan)[0]
        return lambda x, w: matmul_reduce_scatter(x, w, group, plan)

    def reference(self, x: Tensor, w: Tensor, wire: Wire) -> Tensor:
        """In fp32."""
        other = wire.coming.to(x.device).float().view(self.rows, -1)
        if self.gathers:
            return torch.cat([x.float(), other]) @ w.float()
        return x[: self.rows].float() @ w.float() + other


# Hidden 8192, as Llama 3 70B: parts of a layer whose products take as long as transfers at 50 GB/s (1.3 ms on
# an H200), three quarters of it, and one and a half. Where transfers take longer than the product, what can
# hide is the product's share of them.
CASES = tuple(
    case
    for n in (6144, 8192, 12288)
    for case in (
        Case(f"column, 8192 -> {n}", True, 4096, 8192, n),
        Case(f"row, {n} -> 8192", False, 4096, n, 8192),
    )
)
TOYS = (Case("column, toy", True, 64, 32, 48), Case("row, toy", False, 64, 48, 32))


def check(case: Case, wire: Wire, device: str, chunks: int) -> str | None:
    """Why the result is wrong, or None."""
    x, w = case.make(device)
    y, exact = case.ours(wire, chunks)(x, w).float(), case.reference(x, w, wire)
    error = float((y - exact).norm() / exact.norm())
    return None if error <= ALLOWED else f"wrong: relative error {error}, allowed {ALLOWED}"


def hidden_share(ours: float, gemm: float, comm: float) -> float:
    return 1 - (ours - gemm) / comm


def most_hidden(gemm: float, comm: float) -> float:
    """Of `hidden_share`, where nothing is faster than the longer of the two."""
    return min(1.0, gemm / comm)


def measured(case: Case, device: str, stream: Any) -> dict[str, Any]:
    """Microseconds of all sides, and the share of the transfers that hides; or `failed`."""
    wire = Wire(case.sent, device)
    x, w = case.make(device)
    rows = torch.cat([x, x]) if case.gathers else x
    travels = torch.empty(case.sent, dtype=torch.bfloat16, device=device)
    arrives = torch.empty_like(travels)

    def comm() -> None:
        copies = Copies(travels, arrives, wire)
        copies.wait_received()
        copies.wait_sent()

    calls: dict[str, Callable] = {"gemm": lambda: torch.mm(rows, w), "comm": comm}
    for chunks in CHUNKS:
        if why := check(case, wire, device, chunks):
            return {"failed": f"{chunks} chunks: {why}"}
        ours = case.ours(wire, chunks)
        calls[f"{chunks} chunks"] = lambda ours=ours: ours(x, w)
    times = measure(calls, {side: [()] for side in calls}, stream)
    failed = {side: told for side, told in times.items() if not isinstance(told, Times)}
    if failed:
        return {"failed": str(failed)}
    us = {side: found.best for side, found in times.items() if isinstance(found, Times)}
    best = min((side for side in us if side.endswith("chunks")), key=lambda side: us[side])
    return {
        "us": us,
        "best": best,
        "comm_over_gemm": us["comm"] / us["gemm"],
        "bytes_per_s": 2 * case.sent / (us["comm"] * 1e-6),
        "hidden": hidden_share(us[best], us["gemm"], us["comm"]),
    }


def main() -> int:
    setting = Setting.from_argv()
    stream = None if setting.rehearse else on_stream()
    found = {}
    with mock.patch.object(overlapped_linear, "Transfer", Copies), torch.cuda.stream(stream):
        for case in TOYS if setting.rehearse else CASES:
            found[case.name] = measured(case, setting.device, stream)
            print(case.name, found[case.name], flush=True)
            write_json(setting.folder / "overlap.json", found)
    return 0 if all("us" in row for row in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
