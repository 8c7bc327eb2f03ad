"""Memory that a process may use: the machine's, or that of the tightest control group it is in."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from accel import machine

MIB = 2**20
NAMES = {
    2: ("", ("memory.max", "memory.current", "inactive_file")),
    1: ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")),
}


def group(at: Path, version: int, limit: int | str, used: int = 0, files: int = 0) -> None:
    _, (limit_file, usage_file, droppable) = NAMES[version]
    at.mkdir(parents=True, exist_ok=True)
    (at / limit_file).write_text(f"{limit}\n")
    (at / usage_file).write_text(f"{used}\n")
    (at / "memory.stat").write_text(f"anon 4096\n{droppable} {files}\n")


def mounted(tmp_path: Path, version: int) -> Path:
    return tmp_path / "cgroup" / NAMES[version][0]


def said(tmp_path: Path, own: str) -> tuple[int, int]:
    (tmp_path / "own").write_text(own)
    return machine.memory(tmp_path / "cgroup", tmp_path / "own")


OWN = {2: "0::/slurm/job_7/step_0\n", 1: "9:cpu,cpuacct:/\n4:memory:/slurm/job_7/step_0\n0::/\n"}


@pytest.mark.parametrize("version", [1, 2])
class TestGroups:
    def test_files_that_may_be_dropped_are_free(self, tmp_path: Path, version: int) -> None:
        at = mounted(tmp_path, version) / "slurm/job_7/step_0"
        group(at, version, 64 * MIB, used=48 * MIB, files=16 * MIB)
        assert said(tmp_path, OWN[version]) == (32 * MIB, 64 * MIB)

    def test_the_tightest_above_counts(self, tmp_path: Path, version: int) -> None:
        at = mounted(tmp_path, version)
        group(at / "slurm/job_7/step_0", version, "max" if version == 2 else 2**63 - 4096)
        group(at / "slurm/job_7", version, 96 * MIB, used=90 * MIB)
        group(at / "slurm", version, 128 * MIB, used=127 * MIB)
        assert said(tmp_path, OWN[version]) == (MIB, 96 * MIB)

    def test_a_container_sees_its_own_as_the_root(self, tmp_path: Path, version: int) -> None:
        group(mounted(tmp_path, version), version, 64 * MIB, used=80 * MIB)
        assert said(tmp_path, OWN[version]) == (0, 64 * MIB)


@pytest.mark.parametrize("own", ["", OWN[1], OWN[2]])
def test_without_limits_it_is_the_machines(tmp_path: Path, own: str) -> None:
    free, total = said(tmp_path, own)
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total


def test_this_process_has_some(tmp_path: Path) -> None:
    assert machine.memory(own=tmp_path / "missing")[1] == psutil.virtual_memory().total
    free, total = machine.memory()
    assert 0 < free <= total <= psutil.virtual_memory().total
