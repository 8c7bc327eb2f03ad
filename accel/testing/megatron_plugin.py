"""pytest plugin of one rank: no downloads, and each test's outcome into a file.

Rank r writes `<ACCEL_UPSTREAM_RESULTS>.r`, JSON lines: a test's id and "started", then its id, its outcome,
and for what did not pass the reason. `<ACCEL_UPSTREAM_RESULTS>.done` lists the tests not to run again, and
`ACCEL_UPSTREAM_MOST` is how many these ranks run.
"""

from __future__ import annotations

import builtins
import functools
import json
import multiprocessing
import os
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

import accel

RESULTS = "ACCEL_UPSTREAM_RESULTS"
MOST = "ACCEL_UPSTREAM_MOST"
OPTIONS: dict[str, Any] = {"device": "cpu", "preset": "fast"}
"""Of `accel.enable`, in this run."""
APART = 4
"""Exit status of a rank that met another rank in another collective."""


def show_device_to(package: str) -> None:
    """Upstream's tests ask torch.cuda for devices, as Megatron does."""
    from accel.device.audience import AUDIENCE

    AUDIENCE.add(package)


def show_layers_to(package: str) -> None:
    """Upstream's tests import Transformer Engine themselves, for a probe or an `isinstance`, and ask for its
    version. In this run alone they find what Megatron's extension finds, and flash-linear-attention's empty
    package; everybody else is told the truth."""
    from accel.patches._te_execution import import_with_layers
    from accel.patches._te_versions import EXTENSION, VERSIONS

    VERSIONS[package] = VERSIONS[EXTENSION]
    find = builtins.__import__

    @functools.wraps(find)
    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> Any:
        asks = str((globals or {}).get("__name__", "")).partition(".")[0]
        if asks == package and name.partition(".")[0] == "transformer_engine":
            return import_with_layers(name, globals, locals, fromlist, level)
        if asks == package and name == "fla":
            return types.ModuleType(name)
        return find(name, globals, locals, fromlist, level)

    builtins.__import__ = import_


def have_no_flash_attention() -> None:
    """Upstream asks the version of flash-attn where test classes are made, and has no answer where it is not
    installed: 0, so that what needs it is skipped and the rest of the file runs."""
    from megatron.core import utils

    utils._fa_version = Version("0")


def forbid_downloads() -> None:
    """Upstream's conftest fetches data for tests that are not run here; this is the function it asks."""
    name = "tests.test_utils.python_scripts.download_unit_tests_dataset"
    module: Any = types.ModuleType(name)

    def refuse(**_: object) -> None:
        raise ImportError("no downloads in this run")

    module.download_and_extract_asset = refuse
    sys.modules[name] = module


def spawn_from_a_server() -> None:
    """Let processes that tests spawn, such as the writers of checkpoints, be forked from one that each rank
    starts once, as clean as a spawned one. It has accel, which takes longer to import than a test runs."""
    get_context = multiprocessing.get_context

    @functools.wraps(get_context)
    def get(method: str | None = None) -> Any:
        return get_context("forkserver" if method == "spawn" else method)

    multiprocessing.get_context = torch.multiprocessing.get_context = get
    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async"
    multiprocessing.set_forkserver_preload(["accel.megatron_adaptor", writer])


def reuse_groups() -> None:
    """Let a model parallel state take the process groups of an earlier one, which upstream only forgets.

    Each gloo group keeps threads, sockets and ports; with the thousands that a file of a hundred tests
    forgets, or opens and closes within a minute, gloo connects no more. What all ranks ask for in one order,
    they find in one order.
    """
    from megatron.core import parallel_state

    create_group, destroy = parallel_state.create_group, parallel_state.destroy_model_parallel
    free: dict[str, list[Any]] = {}
    taken: list[tuple[str, Any]] = []
    world: list[Any] = []
    """The default group that they were made under."""

    @functools.wraps(create_group)
    def create_or_take(*args: Any, **kwargs: Any) -> Any:
        if world != [dist.group.WORLD]:
            free.clear()
            taken.clear()
            world[:] = [dist.group.WORLD]
        name = repr((args, sorted(item for item in kwargs.items() if item[0] != "pg_options")))
        found = free.get(name)
        if found:
            group = found.pop(0)
            if isinstance(group, dist.ProcessGroup):
                known = parallel_state._global_process_group_list or [None]
                parallel_state._global_process_group_list = [*known, group]
        else:
            group = create_group(*args, **kwargs)
        taken.append((name, group))
        return group

    @functools.wraps(destroy)
    def destroy_and_keep(*args: Any, **kwargs: Any) -> None:
        with mock.patch.object(
            dist, "destroy_process_group"
        ):  # of its gloo groups: they are kept too
            destroy(*args, **kwargs)
        for name, group in taken:
            free.setdefault(name, []).append(group)
        taken.clear()

    parallel_state.create_group = create_or_take
    parallel_state.destroy_model_parallel = destroy_and_keep


def pytest_runtest_setup() -> None:
    """A test whose flags accel refuses has taken accel back: outside of tests the process ends there."""
    from accel.session import SESSION

    if SESSION.device is None:
        accel.enable(**OPTIONS)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(json.loads(Path(os.environ[RESULTS] + ".done").read_text()))
    items[:] = [item for item in items if item.nodeid.partition("::")[2] not in done]
    recorder: Any = config.pluginmanager.get_plugin("accel-recorder")
    recorder.write("", "collected", str(len(items)))
    del items[int(os.environ[MOST]) :]
    if done:
        _initialize_as_earlier_tests_did()
    _keep_folders_that_rank_0_removes()


def _initialize_as_earlier_tests_did() -> None:
    """Many of upstream's tests count on the default group of those before them."""
    utilities: Any = sys.modules.get("tests.unit_tests.test_utilities")
    if utilities is not None:
        utilities.Utils.initialize_distributed()


def _keep_folders_that_rank_0_removes() -> None:
    """Upstream's temporary folder of all ranks has a finalizer on each: a late one removes that of the next
    test, which has the same name."""
    helpers: Any = sys.modules.get("tests.unit_tests.dist_checkpointing")
    if helpers is not None and os.environ["RANK"] != "0":
        helpers.TempNamedDir._cleanup = classmethod(lambda *args, **kwargs: None)


class Recorder:
    def __init__(self, path: Path) -> None:
        self.file = path.open("w", buffering=1)

    def write(self, test: str, outcome: str, reason: str = "") -> None:
        self.file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            reason = _reason(report)
            if "shared-memory collectives" in reason and " of this group, but rank " in reason:
                # most likely an earlier test has left a rank behind: begin anew with this one
                os._exit(APART)
            self.write(report.nodeid, "failed", reason)
        elif report.skipped:
            self.write(report.nodeid, "skipped", _reason(report))
        elif report.when == "call":
            self.write(report.nodeid, "passed")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(report.nodeid, "failed", "at collection: " + _reason(report))
        elif report.skipped:
            self.write(report.nodeid, "skipped", _reason(report))


def _reason(report: Any) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is None:
        return " ".join(str(report.longrepr).strip().splitlines()[-1].split())[:200]
    return f"{' '.join(crash.message.split())[:200]} ({Path(crash.path).name}:{crash.lineno})"


def pytest_sessionstart(session: pytest.Session) -> None:
    rank = os.environ["RANK"]
    recorder = Recorder(Path(f"{os.environ[RESULTS]}.{rank}"))
    session.config.pluginmanager.register(recorder, "accel-recorder")
