"""What works without Transformer Engine whichever spec is asked for."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch

import accel
from accel.patches.local_spec import LISTS_OF_TYPES
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on


def check_lists_of_types() -> None:
    """`isinstance` takes them, with accel's layers in them where they serve, and none in the local spec."""
    accel.enable(preset="off", device="cpu", te_layers=False, local_spec=False)
    names = [name for name in LISTS_OF_TYPES if importlib.util.find_spec(name) is not None]
    assert names
    modules = [importlib.import_module(name) for name in names]
    before = [module.LINEAR_TYPES for module in modules]
    assert any(not isinstance(kind, type) for kinds in before for kind in kinds)
    try:
        for te_layers in (False, True):
            accel.enable(preset="off", device="cpu", te_layers=te_layers)
            from accel.layers.linear import Linear

            for module in modules:
                assert isinstance(torch.nn.Linear(1, 1), module.LINEAR_TYPES)
                assert not isinstance(torch.nn.ReLU(), module.LINEAR_TYPES)
                ours = [kind for kind in module.LINEAR_TYPES if issubclass(kind, Linear)]
                assert bool(ours) is te_layers
    finally:
        accel.disable()
    for module, kinds in zip(modules, before, strict=True):
        assert module.LINEAR_TYPES is kinds


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_layers_whose_gradients_and_activations_are_saved_are_types(version: str) -> None:
    run_on(version, check_lists_of_types)
