"""What waits for a device while passes run waits for its current stream alone."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from accel.device.streams import finish_current_stream

PACKAGE = Path(__file__).parents[2] / "accel"

WHOLE_DEVICE = {
    "memory/host_split.py": "beside copies in streams of their own, in an optimizer's step",
    "parallel/schedule/link.py": "before a step's passes and behind them",
    "patches/memory_budget.py": "before a step's passes and behind them",
}
"""Files that may wait for all streams: a pipeline schedule has no receive in flight there."""


def test_the_current_stream_is_waited_for_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("stream"))
    module = SimpleNamespace(
        current_stream=lambda device: stream, synchronize=lambda: waited.append("device")
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    finish_current_stream(torch.device("cpu"))
    assert not waited
    finish_current_stream(torch.device("cuda", 0))
    assert waited == ["stream"]


def test_nobody_else_waits_for_the_whole_device() -> None:
    """By the source: ``torch.cuda.synchronize`` and the like, but not a stream's or an event's."""
    found = set()
    for folder in ("memory", "parallel", "patches", "layers", "ops"):
        for file in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Attribute) and node.attr == "synchronize":
                    owner = ast.unparse(node.value)
                    if owner not in ("event", "stream"):
                        found.add(str(file.relative_to(PACKAGE)))
    assert found == set(WHOLE_DEVICE)
