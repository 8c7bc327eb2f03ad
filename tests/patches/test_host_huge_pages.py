"""The CPU runtime's blocks ask for huge pages, and the same numbers are in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import accel
from accel.device.cpu import memory
from accel.feature import Context
from accel.patches import host_huge_pages
from tests.ops.contract import needs_native

pytestmark = [
    needs_native,
    pytest.mark.skipif(memory.source() != "allocator", reason="needs the allocator that counts"),
]
HERE = Context("cpu", "0.19.2")
MIB = 2**20


def mapping(tensor: torch.Tensor) -> str:
    """What the kernel says of the memory in the middle of a tensor."""
    address, found = tensor.data_ptr() + tensor.nbytes // 2, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition("-")
        try:
            start, end = int(first, 16), int(rest.split(" ")[0], 16)
        except ValueError:
            found += line + "\n" if found else ""
            continue
        if found:
            return found
        found = line + "\n" if start <= address < end else ""
    return found


def asked(tensor: torch.Tensor) -> bool:
    (flags,) = (line for line in mapping(tensor).splitlines() if line.startswith("VmFlags:"))
    return "hg" in flags.split()


@pytest.mark.skipif(
    not host_huge_pages._ENABLED.exists(), reason="a kernel without transparent huge pages"
)
def test_blocks_ask_for_huge_pages_while_it_is_on() -> None:
    before = torch.empty(64 * MIB, dtype=torch.uint8)
    accel.enable(preset="off", host_huge_pages=True)
    try:
        if accel.status()["features"]["host_huge_pages"]["state"] != "active":
            memory.huge_pages(True)  # this kernel needs no asking, but may be asked
        block = torch.empty(64 * MIB, dtype=torch.uint8)
        small = torch.full((MIB,), 3, dtype=torch.uint8)
        counted = memory.memory_allocated()
        assert not asked(before)
        assert asked(block)
        block.fill_(7)
        assert block.long().sum() == 7 * block.numel()
        assert small.long().sum() == 3 * small.numel()
        assert memory.memory_allocated() == counted
    finally:
        memory.huge_pages(False)
        accel.disable()
    del block
    assert not asked(torch.empty(64 * MIB, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("modes", "reason"),
    [
        ("always [madvise] never", None),
        ("[always] madvise never", "gives huge pages unasked"),
        ("always madvise [never]", "the kernel has none"),
        (None, "the kernel has none"),
    ],
)
def test_idle_where_nobody_need_ask(
    modes: str | None, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    if modes is not None:
        file.write_text(modes + "\n")
    monkeypatch.setattr(host_huge_pages, "_ENABLED", file)
    found = host_huge_pages.FEATURE.idle(HERE)
    assert found is None if reason is None else reason in (found or "")
