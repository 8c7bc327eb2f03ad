"""benchmarks/lab: hosts with links of a rate, nothing left of them, and ranks that are ended together."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from accel.testing.distributed import under_torchrun
from benchmarks.lab import launch, network
from benchmarks.lab.__main__ import table
from benchmarks.lab.link import Link
from benchmarks.lab.probe import Measured, measure

pytestmark = pytest.mark.skipif(under_torchrun(), reason="launches its own ranks")
RATE = 20e6
FRAME = 1448 / 1514
"""TCP's payload of a full Ethernet frame: what a link of a rate gives at most."""
TELLS = """
import os, socket
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "WHO")
print(*(os.environ[name] for name in names), *sorted(name for _, name in socket.if_nameindex()))
"""
ONE_FAILS = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
(folder / os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1":
    while not (folder / "0").exists() or not (folder / "0").read_text():
        time.sleep(0.01)
    raise ValueError("the rank's own words")
time.sleep(1000)
"""
KILLED = """
import os, signal, subprocess
from benchmarks.lab import network
with network.hosts(1) as lab:
    command = ["ip", "netns", "exec", lab.namespace(0), "sleep", "100"]
    quiet = subprocess.DEVNULL
    sleeper = subprocess.Popen(command, stdout=quiet, stderr=quiet)
    print(lab.name, sleeper.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def namespaces() -> None:
    if why := network.reason():
        pytest.skip(why)


@pytest.fixture
def two_hosts(namespaces: None) -> Iterator[network.Network]:
    with network.hosts(2, RATE) as lab:
        yield lab


def left() -> list[str]:
    """Namespaces of labs of this process."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    return [line for line in names.splitlines() if line.startswith(f"accel-lab-{os.getpid()}-")]


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is there still"
        time.sleep(0.01)


def test_names_and_addresses() -> None:
    lab = network.Network("accel-lab-7-0", 2)
    assert [lab.namespace(0), lab.switch] == ["accel-lab-7-0-host0", "accel-lab-7-0-switch"]
    assert [lab.address(0), lab.address(1)] == ["10.77.0.1", "10.77.0.2"]
    assert lab.kind == "veth"
    with pytest.raises(ValueError, match="300 hosts"):
        network.Network("n", 300)


def test_commands_name_a_namespace_of_the_lab() -> None:
    lab = network.Network("accel-lab-7-0", 3)
    for command in network.make_commands(lab):
        where = command[3] if command[1] == "netns" else command[2]
        assert command[0] == "ip"
        assert where.startswith("accel-lab-7-0-"), command


@pytest.mark.parametrize(("rate", "burst"), [(1e6, 73728), (500e6, 100000), (5e9, 131072)])
def test_bucket_holds_a_packet_and_not_a_message(rate: float, burst: int) -> None:
    command = " ".join(network.shape_command("there", rate))
    assert command == (
        f"tc -n there qdisc replace dev eth0 root tbf rate {rate:.0f}bps burst {burst} limit 33554432"
    )
    assert network.GSO_BYTES * 1.1 < burst <= 256 << 10


def test_no_rate() -> None:
    assert network.shape_command("there", None)[-1] == "noqueue"
    with pytest.raises(ValueError, match="at least 1"):
        network.shape_command("there", 0)


def test_full_speed_after_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(network, "_call", lambda command: called.append(command[-1]))
    monkeypatch.setattr(launch, "run", lambda *_: ["{}"])
    link = Link("nothing", 2, network.Network("accel-lab-7-0", 2), None)
    assert link.run(["x"], True, 1e6)[1] == "shaped veth (tbf, 64 KiB packets) of 1.0 MB/s"
    assert called == [str(network.QUEUE_BYTES)] * 2
    assert link.run(["x"], True)[1] == "full speed"
    assert called[2:] == ["noqueue"] * 2


def test_leftovers_are_those_of_dead_processes() -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    assert network.is_leftover(f"accel-lab-{dead.pid}-0-host0")
    assert not network.is_leftover(f"accel-lab-{os.getpid()}-0-host0")
    for name in ("accel-lab-x-0", f"my-accel-lab-{dead.pid}-0", "accel-lab", str(dead.pid)):
        assert not network.is_leftover(name)


def test_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("`ip netns add`: Operation not permitted")

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert network.reason() == "network namespaces need root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda name: None if name == "tc" else f"/sbin/{name}")
    assert network.reason() == "`tc` is missing (apt-get install iproute2)"
    monkeypatch.setattr(shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(network, "_call", fails)
    assert network.reason() == "no network namespaces: `ip netns add`: Operation not permitted"


def test_table() -> None:
    found = Measured([19e6, 18e6, 19e6], [17e6], [17e6], [16e6], [0.9], [1e-4])
    assert table({20e6: found}).split("\n")[1].split() == [
        *("20.0", "19.0", "17.0", "17.0", "16.0", "90%", "100", "us")
    ]


def test_a_core_for_each_rank_or_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5, 3})
    assert launch.cores_of(2) == [3, 5]
    assert launch.cores_of(1) == [3]
    assert launch.cores_of(3) is None


def test_ranks_without_a_network() -> None:
    outputs = launch.run(None, ["-c", TELLS], 2, 60, {"WHO": "me"})
    assert [line.split()[:6] for line in outputs] == [
        ["0", "2", "0", "2", "1", "me"],
        ["1", "2", "1", "2", "1", "me"],
    ]


def test_timeout_ends_the_ranks() -> None:
    before = set(psutil.Process().children())
    hangs = (
        "import sys, time; print('its last words', file=sys.stderr, flush=True); time.sleep(1000)"
    )
    said = r"not done in time: rank 0, 1\nrank 0: its last words\nrank 1: its last words"
    with pytest.raises(TimeoutError, match=said):
        launch.run(None, ["-c", hangs], 2, 10)
    assert set(psutil.Process().children()) <= before


def test_rank_that_fails_ends_the_others(two_hosts: network.Network, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"rank 1 ended .*status 1(.|\n)*the rank's own words"):
        launch.run(two_hosts, ["-c", ONE_FAILS, str(tmp_path)], 2, 60)
    for rank in "01":
        wait_until_gone(int((tmp_path / rank).read_text()))


def test_rank_on_its_host(two_hosts: network.Network) -> None:
    outputs = launch.run(two_hosts, ["-c", TELLS], 2, 60, {"WHO": "me"})
    assert [line.split() for line in outputs] == [
        ["0", "2", "0", "1", "1", "me", "eth0", "lo"],
        ["1", "2", "0", "1", "1", "me", "eth0", "lo"],
    ]
    with pytest.raises(ValueError, match="3 ranks need as many hosts"):
        launch.run(two_hosts, ["-c", TELLS], 3, 60)


def test_goodput(two_hosts: network.Network) -> None:
    """The best of a few: who shares the machine makes a link slower, and nothing makes it faster."""
    assert two_hosts.kind == "shaped veth (tbf, 64 KiB packets)"
    found = measure(two_hosts, 2, num_bytes=16 << 20, repeats=5)
    for direction in (found.one_way[::2], found.one_way[1::2]):
        assert 0.7 * RATE <= max(direction) <= 1.05 * RATE * FRAME
    assert 0.65 * RATE <= max(found.both_ways) <= 1.05 * RATE * FRAME
    assert min(found.latency) < 0.01


@pytest.mark.usefixtures("namespaces")
def test_nothing_is_left() -> None:
    def interrupted() -> None:
        with network.hosts(2, RATE):
            assert len(left()) == 3
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left() == []
    with network.hosts(1) as first, network.hosts(1) as second:
        assert first.name != second.name
        first.shape(RATE)
        first.shape(None)
    assert left() == []


@pytest.mark.usefixtures("namespaces")
def test_half_made_lab_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = network.make_commands
    monkeypatch.setattr(network, "make_commands", lambda lab: [*whole(lab)[:5], ["false"]])
    with pytest.raises(RuntimeError, match="`false`"), network.hosts(2):
        pass
    assert left() == []


@pytest.mark.usefixtures("namespaces")
def test_leftovers_of_a_killed_lab() -> None:
    root = Path(network.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", KILLED], cwd=root, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    name, sleeper = done.stdout.split()
    network.remove_leftovers()
    wait_until_gone(int(sleeper))
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
    assert name not in names
