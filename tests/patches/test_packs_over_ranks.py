"""Who tells Megatron which tokens of a pack a rank holds: this feature, `te_layers` or both, in any order."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

import accel
from accel.feature import Context
from accel.layers import stand_in
from accel.patches import context_parallel, packs_over_ranks, te_layers
from accel.patches._te_packs import PARTITION, version_for_packs, with_starts
from accel.patches._te_remade import MOCKS_BY_VALUE
from accel.patches._te_versions import EXTENSION, get_version
from tests.patches.test_te_layers import asked_by

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None,
    reason="transformer_engine is installed",
)

EITHER = {
    "packs": {"te_layers": False},
    "te": {"packs_over_ranks": False},
    "both": {},
}
FLAGS = {
    "megatron.core.models.mimo.partition.utils": "_HAVE_TEX",
    "megatron.core.models.multimodal.llava_model": "HAVE_TEX",
}


def state() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in (*PARTITION, MOCKS_BY_VALUE[0]):
        names = vars(importlib.import_module(name))
        found |= {f"{name}.{key}": value for key, value in names.items() if key[:2] != "__"}
    return found


@pytest.mark.parametrize("order", permutations(EITHER), ids="-".join)
def test_each_serves_alone_and_with_the_other_and_gives_everything_back(
    order: tuple[str, ...],
) -> None:
    before = state()
    try:
        for who in order:
            accel.enable(preset="off", device="cpu", **EITHER[who])
            for name in PARTITION:
                assert vars(importlib.import_module(name))["tex"] is stand_in.tex
                assert asked_by(name, "1.10.0")
            for name, flag in FLAGS.items():
                assert vars(importlib.import_module(name))[flag] is True
            served = who != "packs"
            assert asked_by(EXTENSION, "2.9.0") is served
            assert asked_by("megatron.core.transformer.attention", "2.2.0") is served
            assert not asked_by("megatron.core.fp8_utils", "1.0.0")
    finally:
        accel.disable()
    after = state()
    assert [name for name in before if after[name] is not before[name]] == []
    assert after.keys() == before.keys()


@pytest.mark.parametrize("wraps", permutations([get_version, version_for_packs]))
def test_both_know_who_asks_whichever_is_the_outer_one(
    wraps: tuple[Callable[..., Any], ...],
) -> None:
    told = wraps[1](wraps[0](lambda: Version("0")))
    asked = {
        EXTENSION: "2.9.0",
        PARTITION[2]: "2.9.0",
        "megatron.core.fp8_utils": "0",
    }
    for module, version in asked.items():
        assert eval("told()", {"__name__": module, "told": told}) == Version(version)


def test_lengths_with_padding_are_those_without_where_no_others_are_given() -> None:
    """0.17's loader gives none, and upstream would look for a rank's tokens by them."""

    def split(batch: object, *given: object) -> object:
        return given

    starts, padded, longest = torch.tensor([0, 4]), torch.tensor([0, 8]), torch.tensor([4])
    split_ours = with_starts(split)
    assert split_ours({}, starts, None, longest) == (starts, starts, longest, None, None)
    assert split_ours({}, starts, padded, longest, 2, 1) == (starts, padded, longest, 2, 1)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (None, None),
        ({"transformer_impl": "local", "context_parallel_size": 2}, None),
        (
            {"transformer_impl": "local", "context_parallel_size": 1},
            "--context-parallel-size is 1",
        ),
        (
            {"transformer_impl": "transformer_engine", "context_parallel_size": 2},
            "te_layers has it",
        ),
    ],
)
def test_where_it_is_idle(args: dict | None, reason: str | None) -> None:
    given = None if args is None else SimpleNamespace(**args)
    context = Context("cpu", "0.19.2", given)
    assert packs_over_ranks.FEATURE.idle(context) == reason
    if args is not None and args["context_parallel_size"] > 1:
        assert (te_layers.FEATURE.idle(context) is None) is (reason is not None)


def test_it_is_idle_beside_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accel.upstream.te_installed", lambda: True)
    found = packs_over_ranks.FEATURE.idle(Context("cpu", "0.19.2", None))
    assert found == "transformer_engine is installed"


@pytest.mark.parametrize(
    ("by_batch", "reason"), [(False, "--context-parallel-size is 1"), (True, None)]
)
def test_attention_is_split_where_batches_bring_groups(by_batch: bool, reason: str | None) -> None:
    """`--hybrid-context-parallel`, with ranks that hold whole sequences otherwise."""
    given = {"transformer_impl": "local", "context_parallel_size": 1}
    args = SimpleNamespace(**given, hybrid_context_parallel=by_batch)
    assert context_parallel.FEATURE.idle(Context("cpu", "0.19.2", args)) == reason
