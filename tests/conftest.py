"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from accel.testing.distributed import under_torchrun

if not torch.cuda.is_available():  # Triton reads it once, at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist share the cores: with a thread for each core in each, threads wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(scope="session", autouse=True)
def reference_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where the single-rank reference runs are kept, for this session and the ranks it starts."""
    if under_torchrun() or "ACCEL_TEST_REFERENCE" in os.environ:
        yield
        return
    # xdist gives each worker a folder below a common one: share the references between workers
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    os.environ["ACCEL_TEST_REFERENCE"] = str(root)
    yield
    del os.environ["ACCEL_TEST_REFERENCE"]
