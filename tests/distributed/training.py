"""Runs of ``examples/pretrain_gpt.py`` inside a test, and the single-rank runs that layouts are
compared with."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from filelock import FileLock
from torch import Tensor

from accel.testing.distributed import SECONDS_PER_TEST
from accel.testing.megatron_arguments import read_docstrings_once

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain_gpt.py"
ITERATIONS = 10

MODEL = """
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64
    --normalization RMSNorm --swiglu --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --mock-data --tokenizer-type NullTokenizer --vocab-size 255
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant
    --log-interval 1 --eval-interval 1000 --eval-iters 0 --num-workers 0
""".split()

MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
""".split()

LONGER = ["--seq-length", "256", "--max-position-embeddings", "256", "--transformer-impl", "local"]

MLA = """
    --multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --kv-channels 16 --rope-type rope --num-query-groups 4
""".split()

GATED_DELTA = """
    --experimental-attention-variant gated_delta_net --linear-attention-freq 2
    --linear-key-head-dim 16 --linear-value-head-dim 16 --linear-num-key-heads 2 --linear-num-value-heads 4
""".split()

CLIP_AT = 0.01
"""A largest logit that the first weights exceed."""

KINDS = {
    "dense": [],
    "moe": MOE,
    "mtp": ["--mtp-num-layers", "1"],
    "window": ["--window-size", "12,0"],
    "documents": [*LONGER, "--reset-attention-mask", "--reset-position-ids"],
    "dropout": [*LONGER, "--attention-dropout", "0.1"],
    "mla": MLA,
    "clipped": ["--bf16", "--qk-clip", "--qk-clip-threshold", str(CLIP_AT)],
    "offset": ["--softmax-type", "learnable"],
    "off_by_one": ["--softmax-type", "off-by-one"],
    "gated_delta": GATED_DELTA,
    "long": """
        --seq-length 4096 --max-position-embeddings 4096 --num-layers 2 --micro-batch-size 1
        --global-batch-size 1 --transformer-impl local
    """.split(),
}

_LOSS = re.compile(r"iteration\s+(\d+)/.*?lm loss: (\S+) \|")


def losses(output: str) -> list[float]:
    """The losses that Megatron's own log lines show, seven digits each."""
    return [float(loss) for _, loss in _LOSS.findall(output)]


def train(flags: list[str]) -> str:
    """Run the script in this process, as one rank of its launch, and clean up; returns what it
    printed.

    Megatron prints the loss on the last rank; the others return lines without it.
    """
    if "megatron.training" in sys.modules:  # the first run imports it behind accel, as users do
        read_docstrings_once()
    printed = io.StringIO()
    argv, sys.argv = sys.argv, [str(SCRIPT), *model(flags), *flags]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        sys.argv = argv
        _forget_megatron()
        print(printed.getvalue())
    return printed.getvalue()


def reference(kind: str) -> tuple[Path, list[float]]:
    """A checkpoint of the initial weights, and the losses of a single rank that trains from it.

    Made once by whichever rank comes first; the others wait for the lock.
    """
    folder = Path(os.environ["ACCEL_TEST_REFERENCE"]) / f"reference-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, log = folder / "checkpoint", folder / "losses.log"
    with FileLock(folder / "lock", timeout=2 * SECONDS_PER_TEST):
        if not log.exists():
            flags = KINDS[kind]
            _alone(
                [*flags, "--train-iters", "1", "--save", str(checkpoint), "--save-interval", "1"]
            )
            log.write_text(_alone([*flags, *from_checkpoint(checkpoint)]))
    return checkpoint, losses(log.read_text())


def shared_folder(name: str) -> Path:
    """One for all ranks of this launch, not made yet."""
    run = os.environ["TORCHELASTIC_RUN_ID"]
    return Path(os.environ["ACCEL_TEST_REFERENCE"]) / f"{name}-{run}"


def tensors(value: Any, name: str = "") -> dict[str, Tensor]:
    """Of what was saved, the weights and the optimizer's states."""
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, dict):
        rows = [(f"{name}.{key}", each) for key, each in value.items() if key != "rng_state"]
    elif isinstance(value, list | tuple):
        rows = [(f"{name}.{at}", each) for at, each in enumerate(value)]
    else:
        return {}
    return {key: tensor for each in rows for key, tensor in tensors(each[1], each[0]).items()}


def from_checkpoint(checkpoint: Path) -> list[str]:
    """Flags that train from the weights of a checkpoint, with a fresh optimizer."""
    load = ["--load", str(checkpoint), "--finetune", "--no-load-optim", "--no-load-rng"]
    return ["--train-iters", str(ITERATIONS), *load]


def _alone(flags: list[str]) -> str:
    """The script on one rank, in a process of its own."""
    from accel.testing.distributed import launch

    return launch(1, [str(SCRIPT), *model(flags), *flags])


def model(flags: Sequence[str]) -> list[str]:
    """Megatron takes no groups of queries beside multi-latent attention."""
    latent = "--multi-latent-attention" in flags
    return [word for word in MODEL if not (latent and word == "--group-query-attention")]


def _forget_megatron() -> None:
    """Megatron keeps its state in module globals; give the next run in this process a clean start."""
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.core.tensor_parallel import random
    from megatron.training import global_vars

    parallel_state.destroy_model_parallel()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()
    random.initialize_rng_tracker(force_reset=True)
    global_vars.destroy_global_vars()
    if dist.is_initialized():
        dist.destroy_process_group()
    if _drop_graphs():
        gc.collect()
    _pass_modules_by()


@functools.cache
def _pass_modules_by() -> None:
    """What the first run has imported stays, and is most of what there is: to look at it after every run took
    half of a run of four iterations."""
    gc.collect()
    gc.freeze()


def _drop_graphs() -> bool:
    """Those of the last routers, and of shards of fp32 parameters. A graph holds its model, by hooks that the
    collector does not see, and the model its groups, some forty of gloo's with three threads each that wake a
    hundred times a second."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher

    everything = gc.get_objects()
    dispatchers = _instances(MoETokenDispatcher, everything)
    optimizers = _instances(DistributedOptimizer, everything)
    for dispatcher in dispatchers:
        dispatcher.probs = dispatcher.local_probs = None
    for optimizer in optimizers:
        inner = vars(optimizer).get("optimizer")
        if inner is not None:
            inner.state.clear()
            for group in inner.param_groups:
                group["params"] = []
        vars(optimizer).clear()
    return bool(dispatchers or optimizers)


def _instances(kind: type, everything: list[Any]) -> list[Any]:
    """As by `isinstance`, which would wake lazy objects."""
    kinds = {kind}
    while more := {sub for each in kinds for sub in each.__subclasses__()} - kinds:
        kinds |= more
    return [each for each in everything if type(each) in kinds]
