"""Fixtures that every test may use."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

import accel
from accel.testing.distributed import _agent_store, under_torchrun

if not torch.cuda.is_available():  # Triton reads it once, at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")


# A busy machine is no finding, and CI judges a change by the same examples each time it does; other ones are
# drawn by --hypothesis-profile=explore.
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("explore", _PATIENT)
settings.register_profile("accel", _PATIENT, derandomize=True)
settings.load_profile("accel")


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist share the cores: with a thread for each core in each, threads wait for each other."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // workers))


@pytest.fixture(scope="session", autouse=True)
def megatron_behind_accel() -> None:
    """For workers, which run many tests. On a CPU accel lets Megatron's fusers compile nothing, if it comes
    first; a test that imports Megatron by itself would leave them to inductor in the tests after it."""
    if "PYTEST_XDIST_WORKER" not in os.environ or torch.cuda.is_available():
        return
    accel.enable(preset="off")
    importlib.import_module("megatron.core.jit")
    accel.disable()


@pytest.fixture(scope="session", autouse=True)
def reference_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Where the single-rank reference runs are kept, for this session and the ranks it starts."""
    if "ACCEL_TEST_REFERENCE" in os.environ:
        yield
        return
    if under_torchrun():
        yield from _folder_of_this_launch(request.session)
        return
    # xdist gives each worker a folder below a common one: share the references between workers
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    os.environ["ACCEL_TEST_REFERENCE"] = str(root)
    yield
    del os.environ["ACCEL_TEST_REFERENCE"]


def _folder_of_this_launch(session: pytest.Session) -> Iterator[None]:
    """A fresh one, for all ranks of this host; the last of them removes it."""
    store, key = _agent_store(session), f"accel-testing/reference/{os.environ['GROUP_RANK']}"
    if os.environ["LOCAL_RANK"] == "0":
        store.set(key, tempfile.mkdtemp(prefix="accel-reference-"))
    folder = store.get(key).decode()
    os.environ["ACCEL_TEST_REFERENCE"] = folder
    yield
    del os.environ["ACCEL_TEST_REFERENCE"]
    if store.add(f"{key}/over", 1) == int(os.environ["LOCAL_WORLD_SIZE"]):
        shutil.rmtree(folder, ignore_errors=True)
