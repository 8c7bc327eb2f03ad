"""Hosts on one machine: network namespaces behind a bridge, each with a link of a chosen rate.

    host 0: eth0 10.77.0.1 --- port0 \\
                                      bridge, in a namespace of its own
    host 1: eth0 10.77.0.2 --- port1 /

A token bucket (`tc ... tbf`) shapes what leaves a host; what enters it is as fast as its senders are. The
rate is that of Ethernet frames: of it 95.6 % is TCP's payload at an MTU of 1500. Latency is the kernel's own.
The machine's own namespace gets no interface, and its own are left alone.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

__all__ = ["Network", "hosts", "reason", "remove_leftovers"]

PREFIX = "accel-lab"
INTERFACE = "eth0"
MAX_HOSTS = 250
GSO_BYTES = 64 << 10
"""TCP hands the interface packets of up to so many bytes, as it does to a network card, which cuts them into
frames itself: a host's own work is by packets. They fit the bucket, so that tbf need not split them."""
BURST_BYTES = (72 << 10, 128 << 10)
"""The bucket's least and largest size. What it holds passes at once after a pause."""
BURST_SECONDS = 2e-4
"""Between the two, the bucket holds what the link passes in this time: a timer may be as late."""
QUEUE_BYTES = 32 << 20
"""More than TCP keeps in flight, so that nothing is dropped."""
_SERIAL = itertools.count()


class Network:
    """The hosts of one lab; :func:`hosts` makes them."""

    interface = INTERFACE
    """Of every host."""

    def __init__(self, name: str, count: int) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"{count} hosts: from 1 to {MAX_HOSTS} are possible")
        self.name = name
        self.count = count
        self.bytes_per_second: float | None = None

    @property
    def kind(self) -> str:
        """For a result's method."""
        if self.bytes_per_second is None:
            return "veth"
        return f"shaped veth (tbf, {GSO_BYTES >> 10} KiB packets)"

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{self.name}-switch"

    def namespace(self, host: int) -> str:
        return f"{self.name}-host{host}"

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def shape(self, bytes_per_second: float | None) -> None:
        """Give every link this rate in each direction, also while data flows; ``None``: no limit."""
        for host in range(self.count):
            _call(shape_command(self.namespace(host), bytes_per_second))
        self.bytes_per_second = bytes_per_second


@contextmanager
def hosts(count: int, bytes_per_second: float | None = None) -> Iterator[Network]:
    """Hosts with links of a rate, which are gone at the end, however it comes. Needs root.

    A lab that was killed leaves its namespaces; the next one removes them and ends what runs in them.

    Raises:
        RuntimeError: a command failed; :func:`reason` says so beforehand.
    """
    remove_leftovers()
    network = Network(f"{PREFIX}-{os.getpid()}-{next(_SERIAL)}", count)
    try:
        for command in make_commands(network):
            _call(command)
        if bytes_per_second is not None:
            network.shape(bytes_per_second)
        yield network
    finally:
        _remove([network.switch, *map(network.namespace, range(count))])


def reason() -> str | None:
    """Why there can be no hosts here, in one line; ``None``: there can. Makes one to find out."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            return f"`{program}` is missing (apt-get install iproute2)"
    try:
        with hosts(1, 1e6):
            return None
    except RuntimeError as error:
        return f"no network namespaces: {error}"


def make_commands(network: Network) -> list[list[str]]:
    """The bridge, then each host.

    Reno instead of the machine's own congestion control: BBR probes for a rate, and so never holds one.
    """
    switch = network.switch
    commands = [
        f"ip netns add {switch}",
        f"ip -n {switch} link add bridge type bridge",
        f"ip -n {switch} link set bridge up",
    ]
    for host in range(network.count):
        there = network.namespace(host)
        commands += [
            f"ip netns add {there}",
            f"ip -n {switch} link add port{host} type veth peer name {INTERFACE} netns {there}",
            f"ip -n {switch} link set port{host} master bridge up",
            f"ip -n {there} link set lo up",
            # no IPv6: nothing speaks but the ranks
            f"ip -n {there} link set {INTERFACE} addrgenmode none gso_max_size {GSO_BYTES} up",
            f"ip -n {there} address add {network.address(host)}/24 dev {INTERFACE}",
        ]
    settings = {"tcp_congestion_control": "reno", "tcp_slow_start_after_idle": "0"}
    script = "; ".join(f"echo {value} > /proc/sys/net/ipv4/{k}" for k, value in settings.items())
    return [
        *(command.split() for command in commands),
        *(
            ["ip", "netns", "exec", network.namespace(host), "sh", "-ec", script]
            for host in range(network.count)
        ),
    ]


def shape_command(namespace: str, bytes_per_second: float | None) -> list[str]:
    """For `tc`, whose ``bps`` is bytes per second."""
    command = f"tc -n {namespace} qdisc replace dev {INTERFACE} root"
    if bytes_per_second is None:
        return [*command.split(), "noqueue"]
    if bytes_per_second < 1:
        raise ValueError(f"{bytes_per_second} bytes per second: at least 1")
    least, largest = BURST_BYTES
    burst = min(max(least, round(bytes_per_second * BURST_SECONDS)), largest)
    shape = f"tbf rate {round(bytes_per_second)}bps burst {burst} limit {QUEUE_BYTES}"
    return [*command.split(), *shape.split()]


def remove_leftovers() -> None:
    """Remove the namespaces of labs whose process is gone."""
    _remove([name for name in _call(["ip", "netns", "list"]).split() if is_leftover(name)])


def is_leftover(namespace: str) -> bool:
    prefix, _, rest = namespace.partition(f"{PREFIX}-")
    pid = rest.partition("-")[0]
    return not prefix and pid.isdecimal() and not os.path.exists(f"/proc/{pid}")


def _remove(namespaces: Sequence[str]) -> None:
    """And end what runs in them. One that is not there, or that another lab removes, is no error."""
    there = {line.split()[0] for line in _call(["ip", "netns", "list"]).splitlines()}
    for namespace in namespaces:
        if namespace in there:
            with suppress(RuntimeError):
                for pid in _call(["ip", "netns", "pids", namespace]).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
            with suppress(RuntimeError):
                _call(["ip", "netns", "delete", namespace])


def _call(command: Sequence[str]) -> str:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}`: {' '.join(done.stderr.split())}")
    return done.stdout
