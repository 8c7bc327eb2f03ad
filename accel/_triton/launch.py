"""How a launcher starts its kernel, and what it may know of the device.

One door for all launches, so that the same launchers run on a GPU, in Triton's interpreter on the
CPU (`TRITON_INTERPRET=1`), and in `accel.testing.compile_table`, which is handed every launch on
tensors of device "meta" and compiles it instead.
"""

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

__all__ = ["ceil_div", "instead_of_running", "launch", "next_power_of_2", "num_processors"]

Launch = Callable[[Any, tuple[int, ...], tuple, dict[str, Any]], None]

instead_of_running: ContextVar[Launch | None] = ContextVar("instead_of_running", default=None)
"""Called with kernel, grid, positional and keyword arguments in place of a launch."""

INTERPRETED_PROCESSORS = 3
"""Few, since each costs milliseconds, and odd, so that rows do not divide by it."""
COMPILED_PROCESSORS = 132
"""An H100's and an H200's; what `compile_table` assumes."""


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Run `kernel[grid](*args, **options)` on the device of the first tensor; nothing for an empty grid.

    Args:
        kernel: a function under `triton.jit`.
        grid: one to three numbers of programs.
        args: in the kernel's order; tensors are passed as pointers.
        options: constexpr arguments by name, and `num_warps`, `num_stages`.
    """
    if 0 in grid:
        return
    if hook := instead_of_running.get():
        hook(kernel, grid, args, options)
        return
    device = next(a.device for a in args if isinstance(a, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            kernel[grid](*args, **options)
    else:
        kernel[grid](*args, **options)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of the device: as many programs run beside each other at least."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return COMPILED_PROCESSORS if device.type == "meta" else INTERPRETED_PROCESSORS


def ceil_div(a: int, b: int) -> int:
    """The number of blocks of b that hold a."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, and 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()
