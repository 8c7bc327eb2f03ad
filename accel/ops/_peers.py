"""Other libraries' kernels in the place of ours, op by op, where `ACCEL_CUDA_KERNELS` asks for them.

A library that is missing is an error: it was asked for by name. Before an op's first call on a device its
kernels compute a small one in fp32 and in bf16; one that is wrong or raises is told, and ours serve the op.
So they do, told once, where the library does not take a call (`accel._peers`), and while a CUDA graph is
captured of an op that was not tried before.
"""

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accel._peers import LIBRARIES
from accel._peers.limits import NotTaken
from accel.log import log_once
from accel.ops._capture import is_capturing
from accel.ops._kernel_choice import VARIABLE, Choice
from accel.ops._trial import mistake

__all__ = ["Served", "describe", "register"]


class Package(NamedTuple):
    """What a library's kernels need."""

    module: str
    distribution: str
    written_for: str
    how_to_install: str


PACKAGES = {
    "liger": Package("liger_kernel", "liger-kernel", "0.8.5", "pip install liger-kernel"),
    "apex": Package(
        "fused_layer_norm_cuda",
        "apex",
        "its source at 6424da3",
        "build NVIDIA's Apex (github.com/NVIDIA/apex) with its CUDA extensions",
    ),
}


def _require_installed(library: str, op: str) -> None:
    package = PACKAGES[library]
    if importlib.util.find_spec(package.module) is None:
        why = f"there is no module {package.module}: {package.how_to_install}"
        raise RuntimeError(f"{VARIABLE}: {op}={library}: {why}")


class Served:
    """An op's parts by a library, and by ours where it is wrong on a device or does not take a call."""

    def __init__(self, library: str, op: str, theirs: Mapping[str, Callable]) -> None:
        self.library, self.op, self.theirs = library, op, theirs
        self.mistakes: dict[torch.device, str | None] = {}

    def mistake(self, device: torch.device) -> str | None:
        """What the library computes wrongly on that device, or raises; None if it is right."""
        if device not in self.mistakes:
            if is_capturing(device):
                return "a CUDA graph is captured before it was tried"
            # within an op nothing is recorded for autograd; a thread of its own knows nothing of that
            with ThreadPoolExecutor(1) as thread:
                self.mistakes[device] = thread.submit(self._tried, device).result()
        return self.mistakes[device]

    def _tried(self, device: torch.device) -> str | None:
        # by name: it imports the ops, which import this
        trials = importlib.import_module("accel._peers.trials")
        for dtype, allowed in trials.DTYPES.items():

            def results(dtype: torch.dtype = dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
                with _on(device), contextlib.suppress(NotTaken):  # such calls go to ours
                    for what, got, wanted in trials.TRIALS[self.op](self.theirs, dtype, device):
                        due = torch.float32 if what in trials.STATISTICS else dtype
                        if got.dtype != due:
                            raise TypeError(f"its {what} is {got.dtype}, not {due}")
                        yield what, got, wanted

            if reason := mistake(results, allowed):
                return f"{reason} in {dtype}"
        return None

    def part(self, name: str, key: str) -> Callable[..., Any]:
        """The function to be registered for `name`, say "accel::rms_norm_fwd", with the keys of each call.
        Ours is the kernel that is registered now."""
        theirs, ours = self.theirs[name], torch.library.get_kernel(name, key)

        def call(keys: torch._C.DispatchKeySet, *args: Any) -> Any:
            device = next(a.device for a in args if isinstance(a, Tensor))
            reason = self.mistake(device)
            if reason is None:
                try:
                    with _on(device):
                        return theirs(*args)
                except NotTaken as limit:
                    reason = str(limit)
            log_once(name.removeprefix("accel::"), f"by accel, not by {self.library}: {reason}")
            return ours.call_boxed(keys, *args)

        return call


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """With it the current one: most libraries launch on the current device's stream."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


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
            served.append(Served(name, op, _kernels(name, op)))
            for part in served[-1].theirs:
                library.impl(
                    part, served[-1].part(part, key), key, with_keyset=True, allow_override=True
                )
    return served


def _kernels(library: str, op: str) -> Mapping[str, Callable]:
    _require_installed(library, op)
    try:
        found: Mapping[str, Callable] = importlib.import_module(f"accel._peers.{library}").OPS[op]
    except Exception as error:  # of any kind, where its release, PyTorch's and Triton's do not fit
        package = PACKAGES[library]
        raise RuntimeError(
            f"{VARIABLE}: {op}={library}: {type(error).__name__}: {error}; written for "
            f"{package.written_for}, found {_version(package.distribution)}"
        ) from error
    return found


def describe(choice: Choice) -> str | None:
    """A line for the table at the start, or None where nothing was asked for by op.

    Raises:
        RuntimeError: a library that is not installed.
    """
    if not choice.by_op:
        return None
    parts = []
    for op, name in choice.by_op.items():
        by = name
        if name in PACKAGES:
            _require_installed(name, op)
            by = f"{name} {_version(PACKAGES[name].distribution)}, if a trial of it is right"
        parts.append(f"{op} by {by}")
    return f"kernels on CUDA where accel calls the op: {choice.every}, {'; '.join(parts)}"


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of no version"
