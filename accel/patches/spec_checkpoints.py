"""Checkpoints of the local layer spec load in Transformer Engine's, and the reverse.

Megatron gives the same name to most weights of both (``--ckpt-format torch_dist``). What differs is bridged
when a checkpoint is loaded, nothing is changed when one is saved:

* the norm before experts is ``mlp.linear_fc1.layer_norm_weight`` in the local spec and
  ``pre_mlp_layernorm.weight`` in the other, and the norms of multi-latent attention (``--qk-layernorm``) are
  ``q_layernorm.weight`` and ``linear_q_up_proj.layer_norm_weight``, likewise of ``kv``: whichever the
  checkpoint has is read, with its optimizer state;
* an ``_extra_state`` that the checkpoint lacks, because the local spec wrote it, is not asked for;
* under ``--ckpt-format torch`` the norms before attention and MLP differ as well, and so do experts one by
  one and grouped (``--moe-grouped-gemm``); Megatron skips what it does not find and trains on with first
  weights. Here they are read under either name, and an ``_extra_state`` that nobody here has is left out;
* unless it was saved with ``--dist-ckpt-optim-fully-reshardable``, the distributed optimizer's state lies
  in the order of the parameters, which is another one in the other spec, and another one for grouped experts.
  Loaded there, moments and master weights would go to the wrong parameters without a word; here that is an
  error that says what to do. Under ``--ckpt-format torch`` other optimizers' states are in that order too,
  and under Muon those of norms, biases and embeddings. Experts' states are refused likewise where
  ``--expert-model-parallel-size`` or ``--expert-tensor-parallel-size`` has changed, as by
  ``--moe-tp-extend-ep``: as many elements of other experts would fit; and the distributed optimizer's between
  pipelines whose chunks lie in a V (``--accel-schedule``) and others, where those of other layers would.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from accel.feature import Feature
from accel.patches._v_placement import IN_A_V
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_BEFORE_MLP = ("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
_LATENTS = tuple(
    (f"self_attention.{name}_layernorm.", f"self_attention.linear_{name}_up_proj.layer_norm_")
    for name in ("q", "kv")
)
SHARDED_NORMS = (_BEFORE_MLP, *_LATENTS)
"""A norm's two names in a sharded state dict, without ``weight`` or ``bias``; a key map turns some around."""
NORMS = (("input_layernorm.", "self_attention.linear_qkv.layer_norm_"), *SHARDED_NORMS)
"""A norm's names in a module, of the local spec and of Transformer Engine's."""
_EXPERT = (
    re.compile(r"\bexperts\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$"),
    r"experts.\2.\3\1",
)
_GROUPED = (
    re.compile(r"\bexperts\.(linear_fc[12])\.(weight|bias)(\d+)$"),
    r"experts.local_experts.\3.\1.\2",
)


@around
def load_either(
    original: Callable[..., Any],
    sharded_state_dict: Any,
    checkpoint_dir: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps ``dist_checkpointing.load``."""
    from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

    if any(_may_differ(leaf) for leaf in _leaves(sharded_state_dict)):
        saved = load_sharded_metadata(checkpoint_dir).keys()
        sharded_state_dict = as_saved(sharded_state_dict, saved)
    return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)


def as_saved(tree: Any, saved: Collection[str]) -> Any:
    """A copy of a sharded state dict that asks for the names in `saved`, where only names differ.

    Args:
        tree: nested dicts and lists of Megatron's sharded tensors and objects, and of anything else.
        saved: the keys of the tensors and the unique keys of the objects in the checkpoint.
    """
    if isinstance(tree, dict):
        return {k: as_saved(v, saved) for k, v in tree.items() if not _is_missing(v, saved)}
    if isinstance(tree, list):
        return [as_saved(value, saved) for value in tree if not _is_missing(value, saved)]
    if not _may_differ(tree) or tree.key in saved:
        return tree
    for renamed in _renamed(tree.key, SHARDED_NORMS):
        if renamed in saved:
            tree = copy.copy(tree)
            tree.key = renamed
            break
    return tree


def _renamed(name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    """What it may be called in the other spec."""
    for pair in pairs:
        for ours, theirs in (pair, pair[::-1]):
            if ours in name:
                yield name.replace(ours, theirs)


@around
def load_either_name(
    original: Callable[..., Any], self: Any, state_dict: Any, *args: Any, **kwargs: Any
) -> Any:
    """Wraps ``MegatronModule.load_state_dict``."""
    return original(self, as_named(state_dict, self.state_dict()), *args, **kwargs)


def as_named(given: dict[str, Any], wanted: Collection[str]) -> dict[str, Any]:
    """A state dict that has the names in `wanted`, where only names differ.

    Args:
        given: of a module of either spec; it is left alone.
        wanted: the names in the module that it is loaded into.
    """
    if all(name in wanted for name in given):
        return given
    found = copy.copy(given)  # with torch's `_metadata`
    found.clear()
    for name, value in given.items():
        if name not in wanted:
            if name.endswith("_extra_state"):
                continue
            others = [*_renamed(name, NORMS), *(p.sub(new, name) for p, new in (_EXPERT, _GROUPED))]
            name = next((n for n in others if n in wanted and n not in given), name)
        found[name] = value
    return found


def _leaves(tree: Any) -> Iterator[Any]:
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, (dict, list)):
            yield from _leaves(value)
        else:
            yield value


def _may_differ(leaf: Any) -> bool:
    key = getattr(leaf, "key", None)
    names = ("_extra_state", *itertools.chain.from_iterable(SHARDED_NORMS))
    return isinstance(key, str) and any(n in key for n in names)


def _is_missing(leaf: Any, saved: Collection[str]) -> bool:
    """Whether it is an ``_extra_state`` that the checkpoint lacks."""
    if isinstance(leaf, (dict, list)) or "_extra_state" not in getattr(leaf, "key", ""):
        return False
    return leaf.unique_key not in saved


class _LastRead:
    """Of the checkpoint whose arguments are checked next."""

    release = False
    legacy = False
    """Its files are of the format ``torch``; checkpoints from before there were others do not say so."""


@around
def noting_releases(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Wraps ``_load_base_checkpoint``."""
    found = original(*args, **kwargs)
    _LastRead.release = bool(found[2])
    _LastRead.legacy = getattr(found[3], "name", None) == "LEGACY"
    return found


@around
def refuse_other_order(
    original: Callable[..., Any], checkpoint_args: Any, *rest: Any, **options: Any
) -> Any:
    """Wraps ``check_checkpoint_args``."""
    from megatron.training import checkpointing

    wanted = checkpointing.get_args()  # as upstream's module finds them
    # of a release upstream loads no optimizer
    problem = other_order(checkpoint_args, wanted, _LastRead.legacy)
    if problem and not _LastRead.release:
        raise ValueError(problem)
    return original(checkpoint_args, *rest, **options)


def other_order(saved: Any, wanted: Any, legacy: bool = False) -> str | None:
    """Why the optimizer's state of a checkpoint cannot be loaded into this run; None if it can.

    Args:
        saved, wanted: Megatron's arguments, of the checkpoint and of this run.
        legacy: the checkpoint's files are of the format ``torch``, whatever its arguments say.
    """
    legacy = legacy or getattr(saved, "ckpt_format", None) == "torch"
    # an evaluation has no optimizer
    evaluates = getattr(wanted, "skip_train", False) and not getattr(
        wanted, "perform_rl_step", False
    )
    if wanted.no_load_optim or wanted.finetune or evaluates or not _by_order(saved, wanted, legacy):
        return None
    theirs, ours = _order(saved), _order(wanted)
    if None in (theirs, ours) or theirs == ours:
        return None
    distributed = ["--dist-ckpt-optim-fully-reshardable"] * _is_distributed(wanted)
    save = " ".join((["--ckpt-format torch_dist"] if legacy else []) + distributed)
    return (
        f"the checkpoint's optimizer state is in the order of {theirs}, this run has {ours}: save it with "
        f"{save}, load it with just that, or leave it out (--no-load-optim)"
    )


def _is_distributed(args: Any) -> bool:
    """Under Muon it has another flag, and norms, biases and embeddings alone."""
    layer_wise = getattr(args, "use_layer_wise_distributed_optimizer", False)
    in_buffers = layer_wise and getattr(args, "use_layer_wise_param_layout", True)
    return bool(getattr(args, "use_distributed_optimizer", False) or in_buffers)


def _by_order(saved: Any, wanted: Any, legacy: bool) -> bool:
    """Whether the state goes to parameters by their order, which differs where the layers do."""
    if _is_distributed(saved) != _is_distributed(wanted):
        return False
    if not getattr(wanted, "use_distributed_optimizer", False):
        # weights are one list; norms, biases and softmax offsets are another
        mixed = getattr(saved, "add_bias_linear", False) or _groups(saved) != _groups(wanted)
        offsets = getattr(saved, "softmax_type", "vanilla") == "learnable"
        moved = _is_distributed(wanted) and _in_a_v(saved) != _in_a_v(wanted)
        if not (mixed or offsets or moved):
            return False
        if not _is_distributed(wanted):
            return legacy
    if legacy:
        return True
    if hasattr(saved, "dist_ckpt_optim_fully_reshardable"):
        return not saved.dist_ckpt_optim_fully_reshardable
    # before that flag, states saved so had the names of their parameters
    return not getattr(saved, "ckpt_fully_parallel_save", False)


def _groups(args: Any) -> bool:
    """Whether experts are one module; those of the local spec never are."""
    has_te = getattr(args, "transformer_impl", None) == "transformer_engine"
    return bool(
        has_te and getattr(args, "num_experts", None) and getattr(args, "moe_grouped_gemm", False)
    )


def _order(args: Any) -> str | None:
    """The flags that decide it; None if they are not known."""
    spec = getattr(args, "transformer_impl", None)
    if spec is None:
        return None
    order = f"--transformer-impl {spec}" + " --moe-grouped-gemm" * _groups(args)
    spread = getattr(args, "expert_model_parallel_size", 1)
    if _is_distributed(args) and getattr(args, "num_experts", None) and spread > 1:
        # as many elements of other experts would fit where experts are split no more
        split = getattr(args, "expert_tensor_parallel_size", None)
        split = args.tensor_model_parallel_size if split is None else split
        order += f" --expert-model-parallel-size {spread} --expert-tensor-parallel-size {split}"
    if _is_distributed(args) and _in_a_v(args):
        order += " and an --accel-schedule whose chunks lie in a V"
    return order


def _in_a_v(args: Any) -> bool:
    return getattr(args, IN_A_V, False)


FEATURE = Feature(
    name="spec_checkpoints",
    summary="load checkpoints of the local layer spec in Transformer Engine's, and the reverse",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    patches=(
        Patch(
            target="megatron.core.dist_checkpointing.serialization:load",
            replacement="accel.patches.spec_checkpoints:load_either",
            how="wrap",
            why="Upstream asks for names that the other layer spec does not write.",
        ),
        Patch(
            target="megatron.core.transformer.module:MegatronModule.load_state_dict",
            replacement="accel.patches.spec_checkpoints:load_either_name",
            how="wrap",
            why="Upstream leaves weights that have another name in the other spec alone, and trains on.",
        ),
        Patch(
            target="megatron.training.checkpointing:_load_base_checkpoint",
            replacement="accel.patches.spec_checkpoints:noting_releases",
            how="wrap",
            why="It finds out whether a checkpoint is a release, whose optimizer upstream does not load.",
        ),
        Patch(
            target="megatron.training.checkpointing:check_checkpoint_args",
            replacement="accel.patches.spec_checkpoints:refuse_other_order",
            how="wrap",
            why="Upstream loads states in the order of one layer spec into the parameters of the other.",
        ),
    ),
)
