"""Other libraries' kernels in the place of ours, op by op, where `ACCEL_CUDA_KERNELS` asks for them.

A library that is missing is an error: it was asked for by name. Before an op's first call on a device its
kernels compute a small one in fp32 and in bf16; one that is wrong or raises is told, and ours serve the op.
So they do, told once, where the library does not take a call (`accel._peers`), and while a CUDA graph is
captured of an op that was not tried before.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from accel._peers import LIBRARIES
from accel._peers.limits import NotTaken
from accel.ops import _launchers
from accel.ops._kernel_choice import VARIABLE, Choice

__all__ = ["Served", "describe", "register"]

logger = logging.getLogger("accel")

PACKAGES = {"liger": ("liger_kernel", "liger-kernel"), "apex": ("fused_layer_norm_cuda", "apex")}
"""The module that a library's kernels need, and the distribution that brings it."""


def _missing(library: str) -> str | None:
    module, distribution = PACKAGES[library]
    if importlib.util.find_spec(module) is not None:
        return None
    return f"there is no module {module}: install {distribution}"


class Served:
    """An op's parts by a library, and by ours where it is wrong on a device or does not take a call."""

    def __init__(
        self, library: str, op: str, theirs: Mapping[str, Callable], ours: Mapping[str, Callable]
    ) -> None:
        self.library, self.op, self.theirs, self.ours = library, op, theirs, ours
        self.mistakes: dict[torch.device, str | None] = {}

    def mistake(self, device: torch.device) -> str | None:
        """What the library computes wrongly on that device, or raises; None if it is right."""
        if device not in self.mistakes:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return "a CUDA graph is captured before it was tried"
            # within an op nothing is recorded for autograd; a thread of its own knows nothing of that
            with ThreadPoolExecutor(1) as thread:
                self.mistakes[device] = thread.submit(self._tried, device).result()
        return self.mistakes[device]

    def _tried(self, device: torch.device) -> str | None:
        trials = importlib.import_module(
            "accel._peers.trials"
        )  # it imports the ops, which import this
        for dtype, allowed in trials.DTYPES.items():
            try:
                with (
                    torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
                ):
                    for what, got, wanted in trials.TRIALS[self.op](self.theirs, dtype, device):
                        off = float((got.cpu().float() - wanted).norm() / wanted.norm())
                        if got.dtype != dtype or not off <= allowed:  # so is NaN
                            return f"its {what}, {got.dtype}, was off by {off:.2g} in a trial in {dtype}"
            except torch.OutOfMemoryError:
                raise  # of no library: the call itself would not fit either
            except Exception as error:
                first_line = (str(error).splitlines() or [""])[0]
                return f"a trial in {dtype} raised {type(error).__name__}: {first_line[:200]}"
        return None

    def part(self, name: str) -> Callable[..., Any]:
        """The function to be registered for `name`, say "accel::rms_norm_fwd"."""
        theirs, ours = self.theirs[name], self.ours[name]

        def call(*args: Any) -> Any:
            device = next(a.device for a in args if isinstance(a, Tensor))
            reason = self.mistake(device)
            if reason is None:
                try:
                    return theirs(*args)
                except NotTaken as limit:
                    reason = str(limit)
            _warn_once(name, self.library, reason)
            return ours(*args)

        return call


@functools.cache
def _warn_once(name: str, library: str, reason: str) -> None:
    logger.warning("%s: not by %s: %s", name.removeprefix("accel::"), library, reason)


def register(choice: Choice, library: torch.library.Library, key: str) -> list[Served]:
    """Let the libraries that `choice` names serve their ops, for as long as `library` lives.

    Args:
        choice: of `_kernel_choice.chosen()`.
        library: of kind "IMPL" and namespace "accel".
        key: a dispatch key, "CUDA"; with `TRITON_INTERPRET=1` "CPU", in tests.

    Raises:
        RuntimeError: a library that is not installed, or cannot be imported.
    """
    served = []
    for name in LIBRARIES:
        for op in choice.asked_of(name):
            if missing := _missing(name):
                raise RuntimeError(f"{VARIABLE}: {op}={name}: {missing}")
            try:
                theirs = importlib.import_module(f"accel._peers.{name}").OPS[op]
            except ImportError as error:
                raise RuntimeError(f"{VARIABLE}: {op}={name}: {error}") from error
            ours = _launchers.kernels("accel._triton")
            served.append(Served(name, op, theirs, ours))
            for part in theirs:
                _launchers.replace(library, part, served[-1].part(part), key)
    return served


def describe(choice: Choice) -> str | None:
    """A line for the table at the start, or None where nothing was asked for by op.

    Raises:
        RuntimeError: a library that is not installed.
    """
    if not choice.by_op:
        return None
    parts = []
    for op, name in choice.by_op.items():
        if name in PACKAGES:
            if missing := _missing(name):
                raise RuntimeError(f"{VARIABLE}: {op}={name}: {missing}")
            name = f"{name} {_version(PACKAGES[name][1])} (where a trial of it is right)".replace(
                "  ", " "
            )
        parts.append(f"{op} by {name}")
    return f"kernels on CUDA: {choice.every}, {', '.join(parts)}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""
