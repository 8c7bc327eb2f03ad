"""Megatron's chunks in a V: with p pipeline ranks, chunk 1 of rank r is stage 2p - 1 - r.

    rank              0   1   2   3
    chunk 0           0   1   2   3
    chunk 1, loop     4   5   6   7       Megatron's own: stage p + r
    chunk 1, V        7   6   5   4       rank 0 holds the embedding and the loss

What Megatron's functions say of chunk 1 on rank p - 1 - r is what chunk 1 of rank r has to be in a V. So it
is built, fed, saved and loaded as if that were its pipeline rank:

    model             its pipeline group has this rank, and is the real one else (`MirroredGroup`)
    parallel_state    answers with this rank where `vp_stage` is 1, and while chunk 1 is built or run

Checkpoints of the format ``torch_dist`` name layers by their number in the model and go from any placement to
any other. Without ``--dist-ckpt-optim-fully-reshardable`` the distributed optimizer's states are by the order
of a rank's parameters, and `spec_checkpoints` refuses them in another placement. The files of the format
``torch`` are those of a rank, and Megatron reads what does not fit without an error: a V neither writes nor
reads them.

All of it is inert until `switch_on` is called. Features of schedules that want a V list `PATCHES`, and refuse
what `refusal` has a line for.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from accel.patching import Patch, around
from accel.upstream import flag_of

__all__ = ["IN_A_V", "PATCHES", "MirroredGroup", "refusal", "running", "switch_on"]

IN_A_V = "accel_in_a_v"
"""Of Megatron's arguments, which checkpoints keep: that chunks lie in one."""

_HERE = "accel.patches._v_placement"


class _State:
    """Whether chunks lie in a V, and which one Megatron is asked about."""

    def __init__(self) -> None:
        self.on = False
        self.chunk = 0

    def mirrored(self) -> bool:
        """The chunk's pipeline rank is counted from the other end."""
        return self.on and self.chunk % 2 == 1


_STATE = _State()


def switch_on() -> Callable[[], None]:
    """From now on chunks lie in a V; returns the function that undoes it. Models that are there stay as they
    are."""
    _STATE.on = True
    return functools.partial(setattr, _STATE, "on", False)


@contextlib.contextmanager
def running(chunk: int | None) -> Iterator[None]:
    """Within, Megatron's pipeline rank is that of a chunk of this rank; None: of the one that it was."""
    before = _STATE.chunk
    if chunk is not None:
        _STATE.chunk = chunk
    try:
        yield
    finally:
        _STATE.chunk = before


class MirroredGroup:
    """A process group whose ranks are counted from the other end.

    It is equal to the real one, by which ``torch.distributed`` finds it in its tables: a collective that is
    given it is the real group's. What insists on a ``ProcessGroup``, C++ and object collectives, raises.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def rank(self) -> int:
        return int(self._group.size() - 1 - self._group.rank())

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_group"), name)

    def __eq__(self, other: object) -> bool:
        return bool(self._group == (other._group if isinstance(other, MirroredGroup) else other))

    def __hash__(self) -> int:
        return hash(self._group)


def _with_mirrored_pipeline(groups: Any) -> Any:
    """A ``ProcessGroupCollection`` for chunk 1."""
    if isinstance(getattr(groups, "pp", None), (MirroredGroup, type(None))):
        return groups
    groups = copy.copy(groups)
    groups.pp = MirroredGroup(groups.pp)
    return groups


def refusal(args: Any) -> str | None:
    """Why a model cannot lie in a V, with the way out; `args`: Megatron's, validated or not."""
    chunks = _num_chunks(args)
    first = getattr(args, "decoder_first_pipeline_num_layers", None)
    last = getattr(args, "decoder_last_pipeline_num_layers", None)
    if args.pipeline_model_parallel_size < 2 or chunks != 2:
        return (
            "a V has two chunks on each of at least two pipeline ranks, got "
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} with {chunks}: give "
            "--num-virtual-stages-per-pipeline-rank 2"
        )
    if not args.untie_embeddings_and_output_weights:
        return _TIED
    if getattr(args, "mtp_num_layers", None):
        return _NOT_MTP
    if getattr(args, "defer_embedding_wgrad_compute", False):
        return (
            "--defer-embedding-wgrad-compute is the last pipeline rank's, and the output layer of a V is on "
            "the first: leave it out"
        )
    if first != last:
        return (
            f"--decoder-first-pipeline-num-layers {first} and --decoder-last-pipeline-num-layers {last} "
            "differ, and a rank of a V has a chunk of either end: give --pipeline-model-parallel-layout"
        )
    for option in ("ckpt_format", "ckpt_convert_format"):
        if getattr(args, option, None) == "torch":
            flag = flag_of(option)
            return (
                f"{flag} torch writes files that other placements would read without an error: give "
                f"{flag} torch_dist"
            )
    if any(getattr(args, name, None) for name in _HYBRID):
        return _NOT_HYBRID
    return None


_TIED = (
    "tied embeddings are copies on two ranks, and in a V both are on the first: add "
    "--untie-embeddings-and-output-weights"
)
_NOT_MTP = "--mtp-num-layers wants another embedding beside the loss: leave it out"
_NOT_HYBRID = "a hybrid model's chunks cannot be turned: leave out --hybrid-layer-pattern"

_HYBRID = ("hybrid_layer_pattern", "hybrid_override_pattern", "is_hybrid_model")


def _num_chunks(args: Any) -> int:
    """Of each rank, as Megatron's validation finds it."""
    if known := getattr(args, "virtual_pipeline_model_parallel_size", None):
        return int(known)
    if layout := args.pipeline_model_parallel_layout:
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        stages = PipelineParallelLayerLayout.get_num_stages_from_str(layout)
        return int(stages // args.pipeline_model_parallel_size)
    if of_a_chunk := args.num_layers_per_virtual_pipeline_stage:
        layers = args.num_layers + sum(
            bool(getattr(args, f"account_for_{end}_in_pipeline_split", False))
            for end in ("embedding", "loss")
        )
        return int(layers // args.pipeline_model_parallel_size // of_a_chunk)
    return int(args.num_virtual_stages_per_pipeline_rank or 1)


@around
def ranking(get_rank: Callable[[], int]) -> int:
    """``get_pipeline_model_parallel_rank``, for the chunk that is built or run."""
    rank = get_rank()
    if not _STATE.mirrored():
        return rank
    from megatron.core import parallel_state

    return int(parallel_state.get_pipeline_model_parallel_world_size()) - 1 - rank


def of_its_chunk(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that may be told a chunk, ``vp_stage``, and answers for that one."""
    at = list(inspect.signature(function).parameters).index("vp_stage")

    @functools.wraps(function)
    def answer(*args: Any, **kwargs: Any) -> Any:
        with running(args[at] if len(args) > at else kwargs.get("vp_stage")):
            return function(*args, **kwargs)

    return answer


@around
def collecting(
    collect: Callable[..., Any], cls: type, required_pgs: list[str] | None = None
) -> Any:
    """``use_mpu_process_groups``, for the chunk that is built or run."""
    groups = collect(cls, required_pgs)
    return _with_mirrored_pipeline(groups) if _STATE.mirrored() else groups


@around
def getting(
    get_model: Callable[..., Any],
    model_provider_func: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``get_model``, which asks its provider for chunks of a V."""
    if not _STATE.on:
        return get_model(model_provider_func, *args, **kwargs)

    @functools.wraps(model_provider_func)
    def provide(*, pg_collection: Any, **given: Any) -> Any:
        def build(groups: Any, **also: Any) -> Any:
            return model_provider_func(pg_collection=groups, **also)

        return _built(build, pg_collection, given)

    return get_model(provide, *args, **kwargs)


@around
def staging(
    build_stages: Callable[..., Any], build: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """``build_virtual_pipeline_stages``, of a V."""
    if not _STATE.on:
        return build_stages(build, *args, **kwargs)

    def build_chunk(pg_collection: Any, **given: Any) -> Any:
        return _built(build, pg_collection, given)

    return build_stages(build_chunk, *args, **kwargs)


def _built(build: Callable[..., Any], groups: Any, given: dict[str, Any]) -> Any:
    """A chunk of the model; chunk 0 is where Megatron has it."""
    with running(given.get("vp_stage")):
        if _STATE.mirrored():
            groups = _with_mirrored_pipeline(groups)
            given["post_process"] = groups.pp.rank() == groups.pp.size() - 1
        chunk = build(groups, **given)
    if given.get("vp_stage") is not None:
        for module in chunk.modules():
            _check(module, hasattr(module, "layer_type_list"))
    return chunk


def _check(module: Any, hybrid: bool = False) -> None:
    """Of a chunk: on each rank, or those that are content would wait for the others."""
    reason = _NOT_HYBRID if hybrid else None
    if getattr(module, "share_embeddings_and_output_weights", False):
        reason = _TIED
    elif getattr(getattr(module, "config", None), "mtp_num_layers", None):
        reason = _NOT_MTP
    if reason:
        raise ValueError(f"--accel-schedule in a V: {reason}")


@around
def untied(set_up: Callable[[Any], None], self: Any) -> None:
    """``LanguageModule.setup_embeddings_and_output_layer``, for what a command line would have refused:
    upstream adds the copies of two ranks up, one of which waits for ever where both are on one."""
    if _STATE.on and getattr(self, "vp_stage", None) is not None:
        _check(self)
    set_up(self)


@around
def reading(get_format: Callable[..., str], checkpoint_name: Any, args: Any) -> str:
    """``_get_checkpoint_format``, which is asked before a checkpoint is read."""
    found = get_format(checkpoint_name, args)
    if _STATE.on and found == "torch":
        raise ValueError(
            f"{checkpoint_name} is of the format torch, files of ranks whose chunks lie in no V: load it "
            "without this schedule, and save it with --ckpt-format torch_dist"
        )
    return found


@around
def stepping(
    forward_step: Callable[..., Any],
    function: Callable[..., Any],
    iterator: Any,
    model: Any,
    *args: Any,
    **kw: Any,
) -> Any:
    """The schedules' ``forward_step``, which gets the chunk its data."""
    if not _STATE.on:
        return forward_step(function, iterator, model, *args, **kw)
    from megatron.core.utils import get_attr_wrapped_model

    with running(get_attr_wrapped_model(model, "vp_stage")):
        return forward_step(function, iterator, model, *args, **kw)


_OF_A_CHUNK = {
    "parallel_state:is_pipeline_first_stage": ("ignore_virtual", "vp_stage"),
    "parallel_state:is_pipeline_last_stage": ("ignore_virtual", "vp_stage"),
    "transformer.transformer_layer:get_transformer_layer_offset": ("config", "vp_stage", "pp_rank"),
    "transformer.transformer_block:get_num_layers_to_build": ("config", "vp_stage", "pp_rank"),
    **dict.fromkeys(
        (
            "transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.get_layer_offset",
            "transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout"
            ".get_num_layers_to_build",
        ),
        ("self", "layer_type", "vp_stage", "pp_rank"),
    ),
}

PATCHES: tuple[Patch, ...] = (
    Patch(
        target="megatron.core.parallel_state:get_pipeline_model_parallel_rank",
        replacement=f"{_HERE}:ranking",
        how="wrap",
        why="Whoever asks while chunk 1 is built or run is told the rank that chunk 1 of a V is on.",
    ),
    *(
        Patch(
            target=f"megatron.core.{target}",
            replacement=f"{_HERE}:of_its_chunk",
            how="wrap",
            expects=expects,
            why="It is asked about a chunk: chunk 1 of a V is on another rank than Megatron thinks.",
        )
        for target, expects in _OF_A_CHUNK.items()
    ),
    Patch(
        target="megatron.core.process_groups_config:ProcessGroupCollection.use_mpu_process_groups",
        replacement=f"{_HERE}:collecting",
        how="wrap",
        why="Modules that are given no groups take these: chunk 1's pipeline group has its rank.",
    ),
    Patch(
        target="megatron.training.training:get_model",
        replacement=f"{_HERE}:getting",
        how="wrap",
        expects=("model_provider_func", "model_type", "wrap_with_ddp", "config", "pg_collection"),
        why="It tells the provider which chunk has the loss, and hands it the groups.",
    ),
    Patch(
        # not "models.dist_utils:", which would be imported where there is none
        target="megatron.training:models.dist_utils.build_virtual_pipeline_stages",
        replacement=f"{_HERE}:staging",
        how="wrap",
        expects=("build_model_func", "pg_collection", "vp_size", "model_type"),
        optional=True,
        why="As get_model, for the model builders that 0.18 brought; 0.17 has none.",
    ),
    Patch(
        target=(
            "megatron.core.models.common.language_module.language_module:"
            "LanguageModule.setup_embeddings_and_output_layer"
        ),
        replacement=f"{_HERE}:untied",
        how="wrap",
        why="A program without a command line may tie what lies on one rank of a V.",
    ),
    Patch(
        target="megatron.training.checkpointing:_get_checkpoint_format",
        replacement=f"{_HERE}:reading",
        how="wrap",
        why="Files of ranks of Megatron's placement would be read into other layers without an error.",
    ),
    Patch(
        target="megatron.core.pipeline_parallel.schedules:forward_step",
        replacement=f"{_HERE}:stepping",
        how="wrap",
        expects=(
            *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor"),
            *("forward_data_store", "config", "cp_group_size", "collect_non_loss_data"),
            *("checkpoint_activations_microbatch", "is_first_microbatch", "current_microbatch"),
            *("vp_stage", "is_last_stage"),
        ),
        why="A script reads tokens on the first rank and labels on the last, chunk 1's here.",
    ),
)
