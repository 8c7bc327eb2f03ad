"""Preset ``off`` is stock Megatron: bit for bit, against a redirect of ``torch.cuda`` that shares
no code.

Both sides run ``examples/pretrain_gpt.py``; the stock side with ``import accel.megatron_adaptor``
replaced by the import of ``stock_redirect``. Compared are the log (loss and gradient norm of each
iteration) and every tensor of the checkpoint, weights and optimizer state.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accel.testing.distributed import launch, under_torchrun

from .training import MODEL, SCRIPT, losses

STOCK = """
    --transformer-impl local --no-persist-layer-norm --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --ckpt-format torch --train-iters 5 --save-interval 5
""".split()
CASES = {
    "one_rank_fp32": (1, ""),
    "one_rank_bf16_dropout": (1, "--bf16 --attention-dropout 0.1 --hidden-dropout 0.1"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "dp2": (2, "--use-distributed-optimizer"),
    "ep2": (
        2,
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2"
        " --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type aux_loss"
        " --moe-aux-loss-coeff 0.01",
    ),
}


@pytest.mark.skipif(under_torchrun(), reason="launches its own ranks on the CPU")
@pytest.mark.parametrize("case", CASES)
def test_off_is_bit_identical_to_stock(case: str, tmp_path: Path) -> None:
    ranks, flags = CASES[case]
    stock_script = tmp_path / "stock_pretrain_gpt.py"
    text, replaced = re.subn(
        "import accel.megatron_adaptor", "import stock_redirect", SCRIPT.read_text()
    )
    assert replaced == 1
    stock_script.write_text(text)
    env = {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "ACCEL_DEVICE": "cpu",
        "PYTHONPATH": f"{Path(__file__).parent}:{Path(__file__).parents[2]}",
    }
    flags_of_both = [*MODEL, *STOCK, *flags.split()]
    sides = {
        "accel": [str(SCRIPT), *flags_of_both, "--accel-preset", "off"],
        "stock": [str(stock_script), *flags_of_both],
    }
    logs, states = {}, {}
    for side, command in sides.items():
        save = tmp_path / side
        logs[side] = launch(ranks, [*command, "--save", str(save)], environment=env)
        states[side] = checkpoint_tensors(save)
    assert "[accel]" not in logs["stock"]
    assert len(losses(logs["stock"])) == 5
    assert numbers(logs["accel"]) == numbers(logs["stock"])
    assert states["accel"].keys() == states["stock"].keys()
    assert len(states["stock"]) > 20
    for name, tensor in states["stock"].items():
        if name.endswith("/torch_rng_state"):
            continue  # the host's random stream, which nobody draws from; the redirect has only one
        assert torch.equal(states["accel"][name], tensor), name


def numbers(log: str) -> list[tuple[str, str]]:
    """Loss and gradient norm of each iteration, as printed."""
    return re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", log)


def checkpoint_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor in every file of a ``--ckpt-format torch`` checkpoint, by its path."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.rglob("*.pt")):
        state = torch.load(file, map_location="cpu", weights_only=False)  # written by this test
        _collect(state, str(file.relative_to(folder)), found)
    return found


def _collect(value: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[path] = value
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(item, f"{path}/{key}", found)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _collect(item, f"{path}/{i}", found)
    elif isinstance(value, argparse.Namespace):
        assert not [v for v in vars(value).values() if type(v).__module__.startswith("accel")]
