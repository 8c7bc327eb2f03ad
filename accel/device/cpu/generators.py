"""Random numbers: the default CPU generator is the *device's* generator.

On CUDA there are two streams of random numbers, the host's and the device's. Here every tensor
lives on the host, so every draw (dropout, initialisation) comes from the default CPU generator;
that one therefore plays the device's, and Megatron's RNG tracker, which forks and restores the
device's state, keeps all that it promises. What Megatron takes for the *host's* state (it saves it,
and warns if it changes within a fork) is kept apart in :data:`HOST`: ``torch.manual_seed``
seeds both, and what a data loader draws (the seed of its workers, samplers, a data set without
workers) comes from it. Were it to come from the device's stream, the ranks that read data would part
from those that do not, with other dropout masks on each tensor-parallel rank, and a resumed run, which
makes its loaders after its random state was loaded, from the run that was not interrupted. Everybody
else's ``torch.get_rng_state()`` is untouched.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from accel.device.audience import addressed
from accel.device.cpu import streams
from accel.device.cpu.factories import host

__all__ = ["HOST", "of_this_device", "seed_of"]

HOST = torch.Generator()
"""The generator that the audience sees as the host's."""


class _DefaultGenerators:
    """Stands in for the tuple ``torch.cuda.default_generators``: one generator, under every index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter((torch.default_generator,))


DEFAULT_GENERATORS = _DefaultGenerators()

_PHILOX_STATE_BYTES = 16  # seed and offset, 8 bytes each: torch's CUDAGeneratorImpl::get_state
_log = logging.getLogger("accel")


def generator(original: type[torch.Generator]) -> type[torch.Generator]:
    """``torch.Generator``: one for cuda is the host's, of the original class."""

    class Kind(type(original)):  # type: ignore[misc]  # a metaclass of that of a C type
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, original)

        def __subclasscheck__(cls, other: type) -> bool:
            return issubclass(other, original)

    class Generator(original, metaclass=Kind):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> torch.Generator:  # type: ignore[misc]
            return original(host(device))

    Generator.__module__, Generator.__qualname__ = original.__module__, original.__qualname__
    Generator.__doc__ = original.__doc__
    return Generator


def get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def seed_of(state: torch.Tensor) -> int:
    """A seed made of another generator's state."""
    digest = hashlib.sha256(state.cpu().numpy().tobytes()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def of_this_device(state: torch.Tensor) -> torch.Tensor:
    """A generator's state as the CPU's generator takes it. One that a CUDA run wrote has another form: it
    becomes the seed of another, and a warning says so."""
    if state.numel() != _PHILOX_STATE_BYTES:
        return state
    _log.warning(
        "this RNG state was written by a CUDA run (Philox); the CPU generator is seeded from it, "
        "so random draws continue reproducibly but differ from the CUDA run's"
    )
    return torch.Generator().manual_seed(seed_of(state)).get_state()


def set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(of_this_device(new_state))


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(new_states: Any) -> None:
    """Of all devices; there is this one, under whatever number."""
    states = list(new_states)
    if states:
        at = streams.current_device()
        set_rng_state(states[at if at < len(states) else 0])


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


def host_get_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get() -> torch.Tensor:
        return HOST.get_state() if addressed() else original()

    return get


def host_set_rng_state(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_(new_state: torch.Tensor) -> None:
        if addressed():
            HOST.set_state(new_state)
        else:
            original(new_state)

    return set_


def host_manual_seed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def seed_both(seed: Any) -> torch.Generator:
        HOST.manual_seed(int(seed))
        return original(seed)

    return seed_both


def host_fork_rng(original: Callable[..., Any]) -> Callable[..., Any]:
    """`manual_seed` within seeds both; so both are as before afterwards."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def fork(
        devices: Any = None, enabled: bool = True, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        state = HOST.get_state()
        try:
            with original(devices, enabled, *args, **kwargs):
                yield
        finally:
            if enabled:
                HOST.set_state(state)

    return fork


_STREAM = SimpleNamespace(is_hosts=False)
"""Whether the default generator is the host's stream now."""


@contextlib.contextmanager
def host_stream() -> Iterator[None]:
    """Within, whoever draws from the default generator draws from the host's stream."""
    if _STREAM.is_hosts:
        yield
        return
    device_state = torch.default_generator.get_state()
    torch.default_generator.set_state(HOST.get_state())
    _STREAM.is_hosts = True
    try:
        yield
    finally:
        _STREAM.is_hosts = False
        HOST.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(device_state)


def drawn_on_host(original: Callable[..., Any]) -> Callable[..., Any]:
    """Only some ranks read data: their draws must not move the device's stream. Of a loader with workers,
    where indices are drawn and not where it waits: another thread may draw from the device's meanwhile."""

    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        with host_stream():
            return original(*args, **kwargs)

    return draw
