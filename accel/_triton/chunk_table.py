"""Many tensors as one range of work: a table on the device that tells a kernel where they lie.

Optimizers have hundreds of tensors, of 1 to 10^9 elements. Each is cut into chunks from its start,
and one launch has a program for every chunk of all of them. The table is one int64 tensor:

    words[c]                             chunk c: (row << 32) | the number of the chunk in its tensor
    words[num_chunks + row * width ...]  row: elements, position in the lists, address in list 0, 1, ...
    width                                2 + number of lists

A launcher and its kernel:

    for table in chunk_tables([sources, targets], CHUNK):
        launch(_scale, (table.num_chunks,), table.words, table.num_chunks, factor,
               ALIGNED=table.is_aligned, SOURCE=TRITON_DTYPES[...], CHUNK=CHUNK, BLOCK=1024)

    row, start, end = find_chunk(words, num_chunks, 2, CHUNK)     # elements start <= i < end are its
    x = list_pointer(row, 0, SOURCE, ALIGNED)                     # of element 0 of the tensor
    whole = start + (end - start) // BLOCK * BLOCK
    for first in range(start, whole, BLOCK): ...                  # without a mask
    if whole < end: ...                                           # with one

A thread loads 16 bytes at once only where the compiler knows that addresses are multiples of 16 and
that a mask does not change within 16 elements. So tensors that are aligned in all lists get one table,
all others another: one launch as a rule, two at most. And only the last block has a mask.

Cache and safety. A table is built and copied to the device (asynchronously, from pinned memory) when
it is new, and found again by all that it says: addresses, sizes, chunk. Where the caching allocator
hands out an address anew the table that says so is right for the new tensor too. Another stream than
the one that wrote it waits for that, and the allocator is told that it reads. A CUDA graph reads the
table at every replay: one that is used during a capture is kept for good, and it must have been there
before, since a capture cannot wait for host memory. So what a graph holds has to run once before, on
the same tensors, which must stay where they are, as in any CUDA graph.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from accel._triton.launch import ceil_div

__all__ = [
    "TRITON_DTYPES",
    "ChunkTable",
    "address_table",
    "chunk_tables",
    "find_chunk",
    "is_capturing",
    "list_pointer",
    "numbers_on",
    "upload",
]

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.int16: tl.int16,
}
ALIGNMENT = 16
"""Bytes that one thread loads at once."""
HEAD = tl.constexpr(2)
"""Words of a row before its addresses."""
MAX_CACHED = 64 << 20
"""Bytes: a few tables for each optimizer, of which that of 10^9 elements has 0.5 MB, and four for each layer
of experts, 94 of them or more. A cache smaller than what a step goes through never finds anything."""
LEAST_CACHED = 4 << 10
"""What the smallest counts for: the host keeps addresses, too, and the device's memory comes in pieces."""


class ChunkTable(NamedTuple):
    """The chunks of some of the tensors."""

    words: Tensor
    """int64, on the tensors' device; laid out as above."""
    num_chunks: int
    is_aligned: bool
    """Whether every address is a multiple of `ALIGNMENT`."""


class _Entry(NamedTuple):
    tables: Sequence[ChunkTable]
    written: tuple[torch.cuda.Stream, torch.cuda.Event] | None
    """By which stream, and what comes when that is done."""

    @property
    def nbytes(self) -> int:
        return sum(max(t.words.nbytes, LEAST_CACHED) for t in self.tables)


class _Cache:
    """The entry that rested longest goes first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self.nbytes = 0

    def get(self, key: tuple) -> _Entry | None:
        with contextlib.suppress(KeyError):  # another device's thread may drop it meanwhile
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def put(self, key: tuple, entry: _Entry) -> None:
        self.entries[key] = entry
        self.nbytes += entry.nbytes
        while self.nbytes > MAX_CACHED and len(self.entries) > 1:
            _, oldest = self.entries.popitem(last=False)
            self.nbytes -= oldest.nbytes


_cached = _Cache()
_captured: list[_Entry] = []


@triton.jit
def find_chunk(words, num_chunks, NUM_LISTS: tl.constexpr, CHUNK: tl.constexpr):
    """-> this program's row, and its first and last + 1 element."""
    word = tl.load(words + tl.program_id(0))
    row = words + num_chunks + (word >> 32) * (HEAD + NUM_LISTS)
    start = (word & 0xFFFFFFFF) * CHUNK
    return row, start, tl.minimum(start + CHUNK, tl.load(row))


@triton.jit
def list_pointer(row, LIST: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the row's tensor in this list begins."""
    pointer = tl.load(row + HEAD + LIST).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being recorded."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def upload(host: Tensor, device: torch.device) -> Tensor:
    """A small CPU tensor on the device, without waiting for it.

    Raises:
        ValueError: a CUDA graph is being recorded; it would see the same numbers at every replay.
    """
    if device.type != "cuda":
        return host.to(device)
    if is_capturing(device):
        raise ValueError(
            f"a CUDA graph cannot hold numbers that are on the CPU: move them to {device}, or run "
            "once on the same tensors before the graph is captured"
        )
    return host.pin_memory().to(device, non_blocking=True)


def chunk_tables(lists: Sequence[Sequence[Tensor]], chunk: int) -> Sequence[ChunkTable]:
    """The tables of the chunks of `chunk` elements, at most two; none where all is empty.

    Args:
        lists: of as many contiguous tensors each, on one device; `lists[k][i]` has as many elements
            as `lists[0][i]`, which is not checked here.
        chunk: elements of a chunk; each tensor's last may have fewer.
    """
    if not lists or not lists[0]:
        return []
    numels = tuple([t.numel() for t in lists[0]])
    addresses = tuple([tuple([t.data_ptr() for t in tensors]) for tensors in lists])
    return _on_device(
        (chunk, numels, addresses),
        lists[0][0].device,
        lambda: _host_tables(numels, addresses, chunk),
    )


def address_table(tensors: Sequence[Tensor]) -> ChunkTable:
    """Only the addresses of tensors on one device: `words[i]` is that of `tensors[i]`; no chunks."""
    addresses = [t.data_ptr() for t in tensors]

    def host_table() -> list[ChunkTable]:
        is_aligned = all(a % ALIGNMENT == 0 for a in addresses)
        return [ChunkTable(torch.tensor(addresses, dtype=torch.int64), 0, is_aligned)]

    return _on_device(tuple(addresses), tensors[0].device, host_table)[0]


def numbers_on(device: torch.device, numbers: Tensor) -> Tensor:
    """Some int64 of the host on the device, found again by their values: a CUDA graph may hold what was
    there before."""
    content = ("numbers", *numbers.tolist())
    (table,) = _on_device(content, device, lambda: [ChunkTable(numbers, 0, False)])
    return table.words


def _on_device(
    content: tuple, device: torch.device, build: Callable[[], list[ChunkTable]]
) -> Sequence[ChunkTable]:
    """The tables that `build` makes in host memory of `content`, on the device; found again if need be."""
    entry = _cached.get((device, content))
    if entry is None:
        tables = [t._replace(words=upload(t.words, device)) for t in build()]
        written = None
        if device.type == "cuda":
            written = torch.cuda.current_stream(device), torch.cuda.Event()
            written[1].record(written[0])
        _cached.put((device, content), _Entry(tables, written))
        return tables
    _keep_order(entry, device)
    return entry.tables


def _keep_order(entry: _Entry, device: torch.device) -> None:
    """Let the current stream read the tables."""
    if entry.written is None:
        return
    writer, done = entry.written
    stream = torch.cuda.current_stream(device)
    if is_capturing(device):
        _captured.append(entry)  # written long ago: torch.cuda.graph waits for the device
    elif stream != writer:
        stream.wait_event(done)
        for table in entry.tables:
            table.words.record_stream(stream)


def _host_tables(
    numels: tuple[int, ...], addresses: tuple[tuple[int, ...], ...], chunk: int
) -> list[ChunkTable]:
    """The tables in host memory."""
    rows = torch.tensor([numels, range(len(numels)), *addresses], dtype=torch.int64).t()
    counts = torch.tensor([ceil_div(n, chunk) for n in numels])
    is_aligned = (rows[:, int(HEAD) :] % ALIGNMENT == 0).all(1)
    tables = []
    for aligned in (True, False):
        wanted = (is_aligned == aligned) & (counts > 0)
        num_chunks = int(counts[wanted].sum())
        if num_chunks == 0:
            continue
        numbers = torch.arange(int(wanted.sum()))
        last = counts[wanted].cumsum(0)
        row = numbers.repeat_interleave(counts[wanted])
        within = torch.arange(num_chunks) - (last - counts[wanted])[row]
        words = torch.cat([(row << 32) | within, rows[wanted].flatten()])
        tables.append(ChunkTable(words, num_chunks, aligned))
    return tables
