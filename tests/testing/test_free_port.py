"""Ports for the stores of tests: free, and nobody else's until this process ends."""

import random
import socket
from types import SimpleNamespace

from accel.testing import distributed
from accel.testing.distributed import free_port

HOST = "127.0.0.1"


def draws(monkeypatch, *ports: int) -> None:
    """What chance gives next."""
    left = iter(ports)
    drawing = SimpleNamespace(randrange=lambda *_: next(left))
    monkeypatch.setattr(random, "SystemRandom", lambda: drawing)


def test_a_port_is_given_once(monkeypatch):
    given, other = free_port(HOST), free_port(HOST)
    distributed._RESERVED.pop().close()
    draws(monkeypatch, given, given, other)
    assert free_port(HOST) == other


def test_a_port_where_somebody_listens_is_not_given(monkeypatch):
    other = free_port(HOST)
    distributed._RESERVED.pop().close()
    with socket.create_server((HOST, 0)) as server:
        draws(monkeypatch, server.getsockname()[1], other)
        assert free_port(HOST) == other
