"""A pytest plugin for tests that need several ranks, from plain pytest or under torchrun.

    @pytest.mark.distributed(world_size=2)
    def test_something(): ...  # runs on every rank

Under plain pytest the marked tests of a module are run by one launch (:mod:`accel.testing.ranks`), the first
time that one of them is due: each rank is a pytest of its own, reports every test to a file, and a test fails
here if it failed on any rank. A crash or a hang costs the test in which it happened; the rest is launched
again. Under ``torchrun --nproc-per-node N -m pytest tests/distributed`` (real GPUs) the tests simply run; one
that wants another number of ranks is skipped and says so.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accel.testing import ranks
from accel.testing.ranks import Launcher

__all__ = ["MEASURED", "SECONDS_PER_TEST", "attempt", "free_port", "launch", "under_torchrun"]

SECONDS_PER_TEST = 600
"""Says that a rank hangs, so it is many times what the longest test needs on a quiet machine."""
MEASURED = "measured: "
"""What a test prints before something that is to be read though it has passed."""
_TAIL_LINES = 60
_REPORTS = "ACCEL_TEST_REPORTS"


def under_torchrun() -> bool:
    """Whether this process is one rank of a torchrun launch."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(
    world_size: int,
    command: Sequence[str],
    seconds: float = SECONDS_PER_TEST,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run ``python COMMAND`` on ``world_size`` ranks of this machine and return what they printed.

    One thread for each rank, a free rendezvous port. Fails the test, with the end of the output, when
    a rank fails or after ``seconds``.
    """
    status, output = attempt(world_size, command, seconds, environment)
    if status != 0:
        why = f"not done after {seconds} s" if status is None else f"exit status {status}"
        pytest.fail(f"{world_size} ranks: {why}\n{_tail(output)}", pytrace=False)
    return output


def attempt(
    world_size: int,
    command: Sequence[str],
    seconds: float = SECONDS_PER_TEST,
    environment: Mapping[str, str] | None = None,
) -> tuple[int | None, str]:
    """As `launch`, but returns the exit status (``None``: the time was over) and the output in any case."""
    with tempfile.NamedTemporaryFile(prefix="accel-launch-") as output:
        of_ranks = ranks.environment(**(environment or {}))
        status = _LAUNCHER.run(world_size, command, of_ranks, output.name, seconds)
        return status, output.read().decode(errors="replace")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "distributed(world_size): runs on several ranks")


def pytest_unconfigure() -> None:
    _LAUNCHER.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not under_torchrun():
        for item in items:
            if item.get_closest_marker("distributed"):
                # the first test of a module pays for all of them; the launch has a limit of its own
                item.add_marker(pytest.mark.timeout(0))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("distributed")
    if marker is None:
        return None
    world_size: int = marker.kwargs["world_size"]
    if under_torchrun():
        if int(os.environ["WORLD_SIZE"]) != world_size:
            pytest.skip(f"needs {world_size} ranks, torchrun gave {os.environ['WORLD_SIZE']}")
        return None
    batches = pyfuncitem.session.stash.setdefault(_BATCHES, {})
    batch = batches.setdefault((pyfuncitem.path, world_size), Batch(world_size))
    first = pyfuncitem.nodeid not in batch.outcomes
    if first:
        batch.run(_siblings(pyfuncitem, world_size))
    found = batch.outcomes[pyfuncitem.nodeid]
    elsewhere = sum(other.seconds for other in batch.outcomes.values())
    pyfuncitem.stash[_LATER] = found.seconds - (elsewhere if first else 0.0)
    if found.result == "skipped":
        pytest.skip(found.text)
    if found.result != "passed":
        pytest.fail(found.text, pytrace=False)
    print(found.text)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """``--durations`` shows what each test took on its ranks, and the launch with the first."""
    report = yield
    if report.when == "call":
        report.duration += item.stash.get(_LATER, 0.0)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """On a rank: a test that passed waits for the other ranks before it is torn down.

    Rank 0 holds the store of the process groups, which another rank may still be asking.
    """
    if not under_torchrun() or item.get_closest_marker("distributed") is None:
        return (yield)
    store, key = _agent_store(item.session), f"accel-testing/{item.nodeid}/over"
    try:
        yield
    finally:  # one that failed or was skipped does not wait, and nobody waits for it
        if store.add(f"{key}/ranks", 1) == int(os.environ["WORLD_SIZE"]):
            store.set(key, "")
    store.wait([key], timedelta(seconds=SECONDS_PER_TEST))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On a rank: one JSON line for each phase of each test."""
    if _REPORTS not in os.environ or not under_torchrun():
        return
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    row = {
        "test": report.nodeid,
        "when": report.when,
        "outcome": report.outcome,
        "text": text,
        "printed": report.capstdout,
        "seconds": report.duration,
    }
    with open(Path(os.environ[_REPORTS]) / f"rank{os.environ['RANK']}.jsonl", "a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Show what tests that passed have measured, which pytest captures: lines that begin so."""
    passed = terminalreporter.getreports("passed")
    lines = [
        f"{report.nodeid}: {line.removeprefix(MEASURED)}"
        for report in passed
        for line in report.capstdout.splitlines()
        if line.startswith(MEASURED)
    ]
    if lines:
        terminalreporter.section("measured")
        terminalreporter.write_line("\n".join(lines))


@pytest.fixture(autouse=True)
def _first_store(request: pytest.FixtureRequest) -> None:
    """On a rank: a store of its own for each test."""
    if under_torchrun() and request.node.get_closest_marker("distributed") is not None:
        request.getfixturevalue("fresh_store")()


@pytest.fixture
def fresh_store(request: pytest.FixtureRequest) -> Callable[[], None]:
    """On a rank: call it before the second and any further process group of a test.

    torchrun's store outlives a process group, and a second group that meets the keys of the first
    hangs; rank 0 therefore picks a free port and tells the others through that store.
    """
    calls = itertools.count()

    def call() -> None:
        store = _agent_store(request.session)
        key = f"accel-testing/{request.node.nodeid}/{next(calls)}"
        if os.environ["RANK"] == "0":
            store.set(key, str(free_port(store.host)))
        os.environ["MASTER_PORT"] = store.get(key).decode()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"

    return call


_RESERVED: list[socket.socket] = []


def free_port(host: str) -> int:
    """Below those that the system gives to connections, which might take it before a store listens there.

    That may be seconds later. No other process gets the same port from here before this one ends: a name in
    Linux's abstract namespace, which needs no file, says that it is taken.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with socket.socket() as probe:
                probe.bind((host, port))
            name.bind(f"\0accel-testing-port-{port}")
        except OSError:
            name.close()
            continue
        _RESERVED.append(name)
        return port


def _agent_store(session: pytest.Session) -> Any:
    """torchrun's store, whatever a test has put into the environment."""
    from torch import distributed as dist

    if _AGENT not in session.stash:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        session.stash[_AGENT] = dist.TCPStore(address, port, is_master=False)  # type: ignore[attr-defined]
    return session.stash[_AGENT]


@dataclass(frozen=True)
class Outcome:
    """Of one test on all its ranks."""

    result: str
    """``passed``, ``failed`` or ``skipped``."""
    text: str
    """Of the first rank that was not fine, or what rank 0 printed."""
    seconds: float = 0.0
    """Of the rank that took longest."""


@dataclass
class Batch:
    """The marked tests of one module, and what became of them."""

    world_size: int
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    def run(self, tests: Sequence[str]) -> None:
        """Launch until every test has an outcome."""
        left = [t for t in tests if t not in self.outcomes]
        while left:
            with tempfile.TemporaryDirectory() as reports:
                command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *left]
                # a rank that waits in C++ never sees a signal: the thread ends the process
                command += [f"--timeout={SECONDS_PER_TEST}", "--timeout-method=thread"]
                # one more than the tests: the rank that hangs ends itself and says where it was
                seconds = SECONDS_PER_TEST * (len(left) + 1)
                status, output = attempt(self.world_size, command, seconds, {_REPORTS: reports})
                self._read(Path(reports), left)
            left = [t for t in left if t not in self.outcomes]
            if left:  # the ranks died in the first test that has no outcome
                why = "hung" if status is None else f"ended with exit status {status}"
                self.outcomes[left.pop(0)] = Outcome("failed", f"a rank {why}\n{_tail(output)}")

    def _read(self, reports: Path, tests: Sequence[str]) -> None:
        """A test has failed if it has on one rank; it was skipped or has passed once all are done with it."""
        files = [reports / f"rank{rank}.jsonl" for rank in range(self.world_size)]
        rows = [
            (rank, json.loads(line))
            for rank, file in enumerate(files)
            for line in (file.read_text().splitlines(keepends=True) if file.exists() else ())
            if line.endswith("\n")  # else the rank ended as it wrote
        ]
        for test in tests:
            phases = [(rank, row) for rank, row in rows if row["test"] == test]
            seconds = max(
                (row["seconds"] for _, row in phases if row["when"] == "call"), default=0.0
            )
            ended = sum(row["when"] == "teardown" for _, row in phases) == self.world_size
            for outcome in ("failed", "skipped") if ended else ("failed",):
                bad = [(rank, row) for rank, row in phases if row["outcome"] == outcome]
                if bad:
                    rank, row = bad[0]
                    self.outcomes[test] = Outcome(outcome, f"rank {rank}: {row['text']}", seconds)
                    break
            else:
                if ended:
                    printed = [
                        r["printed"] for rank, r in phases if (rank, r["when"]) == (0, "call")
                    ]
                    self.outcomes[test] = Outcome("passed", "".join(printed), seconds)


_LAUNCHER = Launcher()
_AGENT: pytest.StashKey[Any] = pytest.StashKey()
_LATER: pytest.StashKey[float] = pytest.StashKey()
"""What a test's own time is more than its call's here."""
_BATCHES: pytest.StashKey[dict[tuple[Path, int], Batch]] = pytest.StashKey()


def _siblings(item: pytest.Function, world_size: int) -> list[str]:
    """The selected tests of the same module that run on as many ranks, ``item`` among them."""
    marked = [(i, i.get_closest_marker("distributed")) for i in item.session.items]
    return [
        i.nodeid
        for i, marker in marked
        if marker is not None and i.path == item.path and marker.kwargs["world_size"] == world_size
    ]


def _tail(output: str) -> str:
    """The last lines that the ranks printed."""
    return "\n".join(output.splitlines()[-_TAIL_LINES:])
