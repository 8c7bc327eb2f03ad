"""The pipeline's passes in the order of a named schedule, zero-bubble ones among them.

``--accel-schedule NAME`` with ``--pipeline-model-parallel-size P``:

    interleaved   Megatron's own order (1F1B where a rank has one chunk)
    zb-h1         1F1B with the weights' gradients put off into the bubble, in 1F1B's memory
    zb-v          two chunks of a rank in a V: hardly a bubble, in 1F1B's memory
    v-half        the same with about half of the memory, and half of 1F1B's bubble
    v-min         the same with about a third of the memory, and two thirds of 1F1B's bubble
    dualpipev     DeepSeek's DualPipe, cut in half: forwards and backwards of two chunks in turn; at least 2 P
                  micro-batches
    FILE.json     one that `python -m accel schedule --write` wrote, or that was edited by hand

Sends leave their rank free and receives are posted ahead, warm-up and cool-down included, so transfers hide
behind the passes. A schedule is checked before its first step: bad counts are one error, never a hang. In its
third and fourth step the passes and a transfer are timed, and two lines say what the schedule takes by these
times beside Megatron's own order, and which memory it needs more or less.

**Numbers.** Each weight adds up its gradients in the order of the micro-batches, as in Megatron's schedules,
from the same products: losses and gradients are the same, bit for bit, for the same weights in the same
chunks. In a V, ranks hold other layers: weights begin from other random numbers (a checkpoint gives the
same), dropout draws others, and sums over chunks (gradient norms) are in another order.

**Weights' gradients** are put off by Megatron's linear layers, by accel's, and by grouped experts; those of
norms, embeddings, biases and routers are formed with the input's. What a layer keeps for its weights (its
input, and the gradient of its output) is kept until then.

**In a V**, chunk 0 of rank r is stage r and chunk 1 stage 2 P - 1 - r, so rank 0 has the embedding and the
loss; ``--num-virtual-stages-per-pipeline-rank 2`` is set if nothing else is said, and weights must not be
tied (``--untie-embeddings-and-output-weights``). Checkpoints of the format ``torch_dist`` go from any layout
to any other, those of the distributed optimizer with ``--dist-ckpt-optim-fully-reshardable`` (without it,
from and to a V is an error); files of the format ``torch``, which other layouts would read as theirs, are
neither written nor read. Not in a V: multi-token prediction, and first and last stages with another number of
layers each (a ``--pipeline-model-parallel-layout`` does that).

**Not with** CUDA graphs, ``--overlap-moe-expert-parallel-comm`` (Megatron's own combined passes),
distillation (``adjust_tensor_shapes_fn``) and several models in one pipeline; those of two parts not with
FSDP, ``--delay-wgrad-compute`` and ``--defer-embedding-wgrad-compute``. Not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from accel.feature import Context, Feature, Setting
from accel.parallel.schedule.names import (
    INTERLEAVED,
    NAMED,
    has_parts,
    is_file,
    is_v,
    read,
)
from accel.patches import _linear, _split_backward, _v_placement
from accel.patches._pipeline import DRIVER, WANTED, refused
from accel.patches._settings import first_given, needs_flags
from accel.upstream import SUPPORTED_RANGE, flag_of, te_layers_asked

NAMES = (INTERLEAVED, *NAMED)


def parse_name(given: Any) -> str:
    """One of `NAMES`, or a file with a schedule."""
    if is_file(str(given)):
        try:
            read(Path(given))
        except OSError as error:
            raise ValueError(f"{given}: {error.strerror}") from None
        return str(given)
    name = str(given).lower()
    if name not in NAMES:
        raise ValueError(
            f"{given!r} is no schedule: give one of {', '.join(NAMES)}, or a .json file"
        )
    return name


def _asked(context: Context) -> str | None:
    """The name; None in programs without a command line, or where it is none."""
    try:
        return parse_name(getattr(context.args, "accel_schedule", None))
    except ValueError:
        return None  # said where flags are read


def _prepare(context: Context) -> Sequence[str]:
    name, args = _asked(context), context.args
    chunks = (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
        "pipeline_model_parallel_layout",
    )
    if name is None or not is_v(name) or getattr(args, "pipeline_model_parallel_size", None) == 1:
        return []
    setattr(args, _v_placement.IN_A_V, True)
    if any(getattr(args, c, None) for c in chunks):
        return []
    needs_flags(
        args,
        f"--accel-schedule {name}",
        "set num_layers_per_virtual_pipeline_stage there, so that each rank has two chunks",
    )
    args.num_virtual_stages_per_pipeline_rank = 2
    return [f"--accel-schedule {name}: --num-virtual-stages-per-pipeline-rank 2 is used"]


def _refuses(context: Context) -> str | None:
    name, args = _asked(context), context.args
    if name is None:
        return None
    if reason := refused(name, args):
        return reason
    if has_parts(name):
        reason = _parts_refused(args)
    if reason is None and is_v(name):
        reason = _v_placement.refusal(args)
    return reason


def _parts_refused(args: Any) -> str | None:
    """Why backward passes cannot be in two parts."""
    excluded = {
        "use_megatron_fsdp": "FSDP frees weights behind each backward",
        "use_torch_fsdp2": "FSDP frees weights behind each backward",
        "delay_wgrad_compute": "it puts off the same gradients",
        "defer_embedding_wgrad_compute": "it puts off the same gradients",
    }
    if option := first_given(excluded, args):
        return f"not with {flag_of(option)}: {excluded[option]}"
    for size, flag in {
        "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
        "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
    }.items():
        if (getattr(args, size, 1) or 1) > 1:
            return f"not with {flag}: weights are gathered for each pass"
    if te_layers_asked(args):
        return "Transformer Engine's layers put off no gradients: give --transformer-impl local"
    return None


def _idle(context: Context) -> str | None:
    ranks = getattr(context.args, "pipeline_model_parallel_size", None)
    return "there is one pipeline rank" if ranks == 1 else None


def switch_on(value: str) -> Callable[[], None]:
    undo = ExitStack()
    undo.callback(WANTED.want(name=value))
    if has_parts(value):
        undo.callback(_linear.switch_on())
    if is_v(value):
        undo.callback(_v_placement.switch_on())
    return undo.close


FEATURE = Feature(
    name="schedule",
    summary=f"the order of the pipeline's passes: {', '.join(NAMES)}",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    benchmarks=("pipeline",),
    prepare=_prepare,
    refuses=_refuses,
    idle=_idle,
    settings=(
        Setting(
            name="",
            metavar="NAME",
            summary=f"one of {', '.join(NAMES)}, or a .json file",
            parse=parse_name,
        ),
    ),
    switch_on=switch_on,
    patches=(DRIVER, _linear.LINEAR, _split_backward.HOOK, *_v_placement.PATCHES),
)
