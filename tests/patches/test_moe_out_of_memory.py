"""An MoE layer without memory says which it is, how many tokens came, and what bounds them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from accel.device.cpu import memory
from accel.feature import Context
from accel.ops import _native
from accel.patches import moe_out_of_memory

from .moe_layer import EXPERTS, TOKENS, build, one_rank, step

needs_native = pytest.mark.skipif(_native.reason() is not None, reason=f"{_native.reason()}")
MANY = 1 << 15
TAKES = MANY * 2
"""Each token goes to two experts."""


@pytest.fixture
def explained() -> Iterator[None]:
    with one_rank("off", moe_out_of_memory=True):
        yield


def no_room(*args: Any) -> None:
    raise torch.OutOfMemoryError("no room for 8 bytes")


@pytest.mark.usefixtures("explained")
@pytest.mark.parametrize("where", ["token_dispatch", "dispatch_postprocess", "experts"])
def test_says_what_came_and_the_flag(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build()
    if where == "experts":
        monkeypatch.setattr(layer.experts, "forward", no_room)
    else:
        monkeypatch.setattr(layer.token_dispatcher, where, no_room)
    says = (
        r"MoE layer 1: no memory for the \d+ tokens of this rank's experts, \d+ of them for expert \d: "
        r"--moe-expert-capacity-factor bounds them\nno room for 8 bytes"
    )
    with pytest.raises(torch.OutOfMemoryError, match=says):
        step(layer)


@needs_native
@pytest.mark.usefixtures("explained")
def test_counts_are_those_of_the_experts() -> None:
    layer = build()
    with (
        pytest.raises(torch.OutOfMemoryError) as caught,
        memory.limit(memory.memory_allocated() + (36 << 20)),
    ):
        step(layer, MANY)
    counts = layer.accel_tokens
    assert sum(counts.tolist()) == TAKES
    hottest = f"{max(counts.tolist())} of them for expert {int(counts.argmax())}:"
    assert f"the {TAKES} tokens of this rank's experts, {hottest}" in str(caught.value)
    assert "no room for" in str(caught.value), "the error itself"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.usefixtures("explained")
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"moe_token_dispatcher_type": "allgather"}, f"the {2 * TOKENS} tokens .* bounds them"),
        (
            {"moe_expert_capacity_factor": 1.5},
            r"a --moe-expert-capacity-factor below 1\.5 takes fewer",
        ),
    ],
)
def test_other_layers(options: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = build(**options)
    monkeypatch.setattr(layer.experts, "forward", no_room)
    with pytest.raises(torch.OutOfMemoryError, match=says):
        step(layer)


@pytest.mark.usefixtures("explained")
def test_layers_of_multi_token_prediction_come_behind_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = build()
    layer.set_layer_number(1)
    layer.router.is_mtp_layer = True
    monkeypatch.setattr(layer.experts, "forward", no_room)
    with pytest.raises(torch.OutOfMemoryError, match=f"MoE layer {layer.config.num_layers + 1}: "):
        step(layer)


@pytest.mark.usefixtures("explained")
def test_words_of_pytorchs_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
        )

    layer = build()
    monkeypatch.setattr(layer.experts, "forward", fails)
    with pytest.raises(
        torch.OutOfMemoryError, match=r"MoE layer 1(.|\n)*tried to allocate 8 bytes"
    ):
        step(layer)


@pytest.mark.usefixtures("explained")
def test_another_error_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    def fails(*args: Any) -> None:
        raise error

    layer = build()
    monkeypatch.setattr(layer.experts, "forward", fails)
    with pytest.raises(RuntimeError) as caught:
        step(layer)
    assert caught.value is error


@pytest.mark.usefixtures("explained")
def test_before_the_counts_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the step before are not told."""

    def fails(*args: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    layer = build()
    step(layer)
    layer.token_dispatcher.tokens_per_expert = None
    monkeypatch.setattr(layer.token_dispatcher, "token_dispatch", fails)
    monkeypatch.setattr(
        layer.token_dispatcher, "dispatch_preprocess", lambda hidden, map, p: (hidden, p)
    )
    wanted = "MoE layer 1: no memory for the tokens of this rank's experts: --moe-expert"
    with pytest.raises(torch.OutOfMemoryError, match=wanted):
        step(layer)


def test_the_numbers_are_stocks() -> None:
    with one_rank("off", moe_out_of_memory=False):
        stock = step(build())
    with one_rank("off", moe_out_of_memory=True):
        ours = step(build())
    for name, expected in stock.items():
        assert torch.equal(ours[name], expected), name


def test_idle_without_experts() -> None:
    def why(num_experts: int | None) -> str | None:
        return moe_out_of_memory.FEATURE.idle(
            Context("cpu", "0.19.2", SimpleNamespace(num_experts=num_experts))
        )

    assert why(None) == "there are no experts"
    assert why(EXPERTS) is None
