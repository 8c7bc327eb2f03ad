"""A CPU trains without the CUDA graphs that its flags ask for."""

from __future__ import annotations

import argparse
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from accel.feature import Context, choose
from accel.patches import cuda_graphs
from accel.upstream import SUPPORTED_MEGATRON
from tests.versions import run_on

SAYS = ": there are no CUDA graphs on a CPU, which trains without them"
MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 99
    --transformer-impl local --num-experts 2
""".split()
GRAPHS = {
    "--cuda-graph-impl local": "",
    "--cuda-graph-impl local --inference-cuda-graph-scope block": "0.18",
    "--cuda-graph-impl local --cuda-graph-scope attn moe_router moe_preprocess": "",
    "--cuda-graph-impl local --cuda-graph-scope full_iteration --no-check-for-nan-in-loss-and-grad": "",
    "--cuda-graph-impl transformer_engine --cuda-graph-modules attn mlp --cuda-graph-warmup-steps 0": "0.18",
    "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad": "0.18",
    "--cuda-graph-modules full_iteration": "0.18",
    "--cuda-graph-scope full_iteration": "0.18",
    "--enable-cuda-graph": "",
    "--external-cuda-graph": "",
    "--optimizer-cuda-graph": "",
}
"""Flags, and the first version that has them."""


def parsed(flags: str) -> argparse.Namespace:
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args([*MODEL, *flags.split()])
    args.rank, args.world_size = 0, 1
    return args


def validated(args: argparse.Namespace) -> dict[str, object]:
    """As Megatron's own validation leaves them; it takes the older spellings away."""
    from megatron.training.arguments import validate_args

    with mock.patch.dict(os.environ, CUDA_DEVICE_MAX_CONNECTIONS="1"):
        validate_args(args, {})
    return {name: value for name, value in vars(args).items() if "cuda_graph" in name}


def check_flags() -> None:
    """Every way to ask for graphs is the command line that does not, once Megatron has validated it."""
    import megatron.core

    import accel

    accel.enable(preset="off", device="cpu")
    version = megatron.core.__version__
    try:
        none = validated(parsed(""))
        assert none["cuda_graph_impl"] == "none"
        for flags, since in GRAPHS.items():
            if version < since:
                continue
            args = parsed(flags)
            (line,) = cuda_graphs.FEATURE.prepare(Context("cpu", version, args))
            first = flags.partition(" --")[0]
            assert line == first + SAYS
            found = validated(args)
            changed = {name for name in none if found[name] != none[name]}
            assert changed <= {"cuda_graph_warmup_steps"}, (flags, changed)
            assert found.keys() == none.keys(), flags
    finally:
        accel.disable()


@pytest.mark.parametrize("version", SUPPORTED_MEGATRON)
def test_flags_for_graphs_are_taken_for_none(version: str) -> None:
    run_on(version, check_flags)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"cuda_graph_impl": "none", "cuda_graph_modules": ["attn"], "optimizer_cuda_graph": False},
        {"model_parallel": SimpleNamespace(cuda_graph_impl="local")},
    ],
)
def test_what_asks_for_no_graphs_is_left_alone(args: dict[str, object]) -> None:
    given = SimpleNamespace(**args)
    assert cuda_graphs.without_graphs(Context("cpu", "0.19.2", given)) == []
    assert vars(given) == args


@pytest.mark.parametrize("device", ["cuda", "npu"])
def test_other_devices_have_graphs(device: str) -> None:
    given = SimpleNamespace(cuda_graph_impl="local", optimizer_cuda_graph=True)
    context = Context(device, "0.19.2", given)
    assert cuda_graphs.FEATURE.prepare(context) == []
    assert (given.cuda_graph_impl, given.optimizer_cuda_graph) == ("local", True)
    (choice,) = choose([cuda_graphs.FEATURE], "off", {}, context)
    assert (choice.state, choice.reason) == ("idle", "concerns cpu only")
