"""Collectives of ranks that live on one host, through memory that they share.

The first collective of a group sets its memory up: the ranks tell each other, through gloo, who they
are and where; rank 0 makes a nameless file in memory (``memfd``, sealed, readable by this user alone)
that the others open through its ``/proc/<pid>/fd``; each rank writes a random number into it and finds
those of all others. Only when every rank has said that it did is the memory used, and by all of them;
after any failure all stay with gloo, and the log says why. The file has no name, so nothing is left
behind however the processes end. The first collective of a group must therefore be called in one order
everywhere, as with NCCL.

The rest is ``csrc/cpu/shared_memory_collectives.cpp``. What it promises:

* sums and averages of fp16, bf16 and fp32 in fp32, of fp64 in fp64, in the order of the ranks, rounded
  once; minimum and maximum keep NaN; integers wrap around. The same bits on every rank, every time;
* ``async_op`` never blocks: what fits the free slots is sent at once and received by ``wait()``, the
  rest is moved by a thread of the group;
* a rank that waits spins briefly where there is a core for every rank, then sleeps on a futex; it raises
  RuntimeError when the group's time-out is over or the awaited process has ended;
* so does a rank that meets another collective, or one of another size, than its own.

Which collectives are served follows from their kind, dtype and reduction, which are the same on all
ranks: :func:`reduces` and :func:`moves`. ``torch.compile`` breaks its graph at each: none is traced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import secrets
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo  # the public one takes a second to import

from accel.log import log_once
from accel.ops import _native

__all__ = ["Channel", "Work", "channel", "moves", "reduces", "unavailable"]

MAX_RANKS = 64
"""Of a group: their proofs fill the first page of the segment."""

SPIN_MICROSECONDS = 200
"""A rank that finds nothing spins so long before it sleeps: a wake-up costs about 50 us."""

_PROOF_BYTES = 64
_REDUCTIONS = {
    dist.ReduceOp.SUM: 0,
    dist.ReduceOp.AVG: 1,
    dist.ReduceOp.PRODUCT: 2,
    dist.ReduceOp.MIN: 3,
    dist.ReduceOp.MAX: 4,
}
"""Numbers as in ``enum class Reduction``."""
_FLOATS = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_INTEGERS = frozenset({torch.int64, torch.int32, torch.int8, torch.uint8})
_MOVED = _FLOATS | _INTEGERS | {torch.int16, torch.bool}
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


def unavailable() -> str | None:
    """Why no group of this process can share memory."""
    if not hasattr(os, "memfd_create") or not os.path.exists("/proc/self/fd"):
        return "needs Linux with memfd_create and /proc"
    return _native.reason()


def reduces(tensor: torch.Tensor, op: Any) -> bool:
    """Whether a reduction of `tensor` with `op` is served. Averages of integers, bitwise operations,
    complex and rarer dtypes are not."""
    if op not in _REDUCTIONS or not _is_plain(tensor):
        return False
    return tensor.dtype in _FLOATS or (tensor.dtype in _INTEGERS and op != dist.ReduceOp.AVG)


def moves(tensor: torch.Tensor) -> bool:
    """Whether a gather or broadcast of `tensor` is served. Complex and rarer dtypes are not."""
    return tensor.dtype in _MOVED and _is_plain(tensor)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided


UNFINISHED: set[Any] = set()
"""Handles of collectives that have something to do when they are waited for."""
_LAST: dict[int, int] = {}
"""Group -> ticket of its last asynchronous collective that was not waited for."""


@_disable_dynamo
def finish_all() -> None:
    """Wait for all collectives, as a device does when it is synchronized."""
    for work in list(UNFINISHED):
        work.wait()
    for group in list(_LAST):
        if (ticket := _LAST.pop(group, None)) is not None:
            torch.ops.accel._shared_memory_wait(group, ticket)


class Work(dist.Work):
    """The handle of an asynchronous collective."""

    def __init__(self, group: int, ticket: int) -> None:
        super().__init__()
        self._group, self._ticket = group, ticket
        _LAST[group] = ticket

    @_disable_dynamo
    def wait(self, timeout: Any = None) -> bool:
        """Returns when the result is there. The time-out is the group's."""
        torch.ops.accel._shared_memory_wait(self._group, self._ticket)
        self._over()
        return True

    @_disable_dynamo
    def is_completed(self) -> bool:
        done = bool(torch.ops.accel._shared_memory_done(self._group, self._ticket))
        if done:
            self._over()
        return done

    def _over(self) -> None:
        if _LAST.get(self._group) == self._ticket:
            _LAST.pop(self._group, None)


class Channel:
    """The shared memory of one group. Each method is the collective of its name in
    ``torch.distributed``; with `async_op` it returns a :class:`Work`, without it None."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        ops: Any = torch.ops.accel
        self._all_reduce: Callable[..., int] = ops._shared_memory_all_reduce.default
        self._all_gather: Callable[..., int] = ops._shared_memory_all_gather.default
        self._reduce_scatter: Callable[..., int] = ops._shared_memory_reduce_scatter.default
        self._broadcast: Callable[..., int] = ops._shared_memory_broadcast.default
        self._barrier: Callable[..., int] = ops._shared_memory_barrier.default

    def set_timeout(self, milliseconds: int) -> None:
        torch.ops.accel._shared_memory_set_timeout(self._handle, milliseconds)

    def left_to_the_parent(self) -> None:
        """In a child that was forked, which has not inherited the memory."""
        self._all_reduce = self._all_gather = self._reduce_scatter = _not_a_rank
        self._broadcast = self._barrier = _not_a_rank

    @_disable_dynamo
    def all_reduce(self, tensor: torch.Tensor, op: Any, async_op: bool) -> Work | None:
        return self._work(
            self._all_reduce(self._handle, tensor, _REDUCTIONS[op], async_op), async_op
        )

    @_disable_dynamo
    def all_gather(
        self, outputs: Sequence[torch.Tensor], input: torch.Tensor, async_op: bool
    ) -> Work | None:
        """`outputs`: one tensor that is cut evenly, or one for each rank, of any sizes."""
        return self._work(self._all_gather(self._handle, input, outputs, async_op), async_op)

    @_disable_dynamo
    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Any, async_op: bool
    ) -> Work | None:
        """`inputs`: one tensor that is cut evenly, or one for each rank, of any sizes."""
        ticket = self._reduce_scatter(self._handle, output, inputs, _REDUCTIONS[op], async_op)
        return self._work(ticket, async_op)

    @_disable_dynamo
    def broadcast(self, tensor: torch.Tensor, root: int, async_op: bool) -> Work | None:
        """`root`: rank within the group."""
        return self._work(self._broadcast(self._handle, tensor, root, async_op), async_op)

    @_disable_dynamo
    def barrier(self, async_op: bool) -> Work | None:
        return self._work(self._barrier(self._handle, async_op), async_op)

    def _work(self, ticket: int, async_op: bool) -> Work | None:
        return Work(self._handle, ticket) if async_op else None


def _not_a_rank(*args: Any) -> Any:
    raise RuntimeError(
        "a collective in a process that was forked from a rank: only the rank itself can take part"
    )


_CHANNELS: weakref.WeakKeyDictionary[Any, Channel | None] = weakref.WeakKeyDictionary()
"""Of the groups that have had a collective; None: it stays with gloo."""


def _after_fork() -> None:
    _LAST.clear()
    UNFINISHED.clear()
    for made in _CHANNELS.values():
        if made is not None:
            made.left_to_the_parent()


os.register_at_fork(after_in_child=_after_fork)


@_disable_dynamo
def channel(group: Any = None) -> Channel | None:
    """The channel of `group`, set up at the first call, which is collective; None where the group
    stays with gloo, or is none."""
    if group is None:
        group = dist.group.WORLD
    try:
        return _CHANNELS[group]
    except (KeyError, TypeError):  # TypeError: the number that stands for "not a member"
        pass_on = not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != "gloo"
    if pass_on or not 2 <= group.size() <= MAX_RANKS:
        return None
    made = _CHANNELS[group] = _agree(group)
    return made


@dataclass(frozen=True)
class _Introduction:
    """What a rank tells the others about itself."""

    place: bytes
    """Digest of what must be equal."""
    nonce: bytes
    pid: int
    fd: int
    """Of rank 0: its file descriptor of the segment."""

    FORMAT = "<32s16sii"

    def pack(self) -> bytes:
        return struct.pack(self.FORMAT, self.place, self.nonce, self.pid, self.fd)

    @classmethod
    def unpack(cls, data: bytes) -> _Introduction:
        return cls(*struct.unpack_from(cls.FORMAT, data))


def _agree(group: Any) -> Channel | None:
    """Set the segment up; the same outcome on every rank."""
    try:
        with contextlib.ExitStack() as files:
            return Channel(_set_up(group, files))
    except _Refused as refusal:
        if group.rank() == 0:
            log_once("host_shared_memory_collectives", f"groups of ranks stay with gloo: {refusal}")
        return None


def _set_up(group: Any, files: contextlib.ExitStack) -> int:
    """The handle of the segment. Three exchanges, see the top of this file.

    Args:
        files: closes what was opened on the way.
    """
    rank, size = group.rank(), group.size()

    def introduce() -> bytes:
        if reason := unavailable():
            raise OSError(reason)
        fd = _make_segment(size) if rank == 0 else -1
        if fd >= 0:
            files.callback(os.close, fd)
        return _Introduction(_place(), secrets.token_bytes(16), os.getpid(), fd).pack()

    said = [_Introduction.unpack(answer) for answer in _together(group, introduce)]
    if len({each.place for each in said}) > 1:
        raise _Refused("the ranks live on different hosts, or run different builds")

    def prove() -> bytes:
        path = f"/proc/{said[0].pid}/fd/{said[0].fd}"
        files.callback(os.close, fd := os.open(path, os.O_RDWR | os.O_CLOEXEC))
        os.pwrite(fd, said[rank].nonce, rank * _PROOF_BYTES)
        return fd.to_bytes(4, "little")

    fd = int.from_bytes(_together(group, prove)[rank][:4], "little")
    opened: list[int] = []

    def enter() -> bytes:
        for peer, each in enumerate(said):
            if os.pread(fd, len(each.nonce), peer * _PROOF_BYTES) != each.nonce:
                raise OSError(f"what rank {peer} wrote into the segment is not there")
        handle: int = torch.ops.accel._shared_memory_open(
            fd,
            rank,
            [each.pid for each in said],
            str(dist.get_process_group_ranks(group)),
            _timeout_milliseconds(group),
            _spin_microseconds(size),
        )
        opened.append(handle)
        return b""

    try:
        _together(group, enter)
    except BaseException:
        for handle in opened:
            torch.ops.accel._shared_memory_close(handle)
        raise
    weakref.finalize(group, _close, opened[0]).atexit = False
    return opened[0]


def _close(handle: int) -> None:
    _LAST.pop(handle, None)
    torch.ops.accel._shared_memory_close(handle)


class _Refused(Exception):
    """All ranks agree that the group cannot share memory, and why."""


def _together(group: Any, part: Callable[[], bytes]) -> list[bytes]:
    """Do `part` on every rank and exchange what they return.

    Raises:
        _Refused: on every rank, if it failed on any.
    """
    try:
        answer = b"+" + part()
    except (OSError, RuntimeError) as error:
        answer = f"-{error}".encode()
    mine = torch.zeros(256, dtype=torch.uint8)
    mine[: len(answer)] = torch.frombuffer(bytearray(answer[: mine.numel()]), dtype=torch.uint8)
    theirs = [torch.empty_like(mine) for _ in range(group.size())]
    group.allgather([theirs], [mine]).wait()
    answers = [bytes(each.tolist()) for each in theirs]
    for rank, each in enumerate(answers):
        if each[:1] != b"+":
            text = each[1:].rstrip(b"\0").decode(errors="replace")
            raise _Refused(f"rank {rank}: {text}")
    return [each[1:] for each in answers]


def _make_segment(num_ranks: int) -> int:
    """A file descriptor. All of its pages are set aside now, so that no later write can fail."""
    fd = os.memfd_create("accel-collectives", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, torch.ops.accel._shared_memory_bytes(num_ranks))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError:
        os.close(fd)
        raise
    return fd


def _place() -> bytes:
    """What ranks must have in common: the running system, the view of its processes, the user, the
    build."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read()
    facts = (
        platform.node(),
        boot,
        os.readlink("/proc/self/ns/pid"),
        os.geteuid(),
        torch.__version__,
        torch.ops.accel._shared_memory_bytes(MAX_RANKS),
    )
    return hashlib.sha256(repr(facts).encode()).digest()


def _timeout_milliseconds(group: Any) -> int:
    timeout = group._get_backend(torch.device("cpu")).options._timeout
    return int(timeout.total_seconds() * 1000)


def take_timeout(group: Any) -> None:
    """The time-out of `group` has changed."""
    if (made := _CHANNELS.get(group)) is not None:
        made.set_timeout(_timeout_milliseconds(group))


def _spin_microseconds(num_ranks: int) -> int:
    """0 where ranks outnumber the cores: whoever spins keeps another rank from its work."""
    ranks = max(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return SPIN_MICROSECONDS if ranks <= len(os.sched_getaffinity(0)) else 0
