"""Checkpoints of the local layer spec load in Transformer Engine's, and the reverse.

Megatron gives the same name to most weights of both (``--ckpt-format torch_dist``). Three differences are
bridged when a checkpoint is loaded, nothing is changed when one is saved:

* the norm before experts is ``mlp.linear_fc1.layer_norm_weight`` in the local spec and
  ``pre_mlp_layernorm.weight`` in the other: whichever the checkpoint has is read, with its optimizer state;
* an ``_extra_state`` that the checkpoint lacks, because the local spec wrote it, is not asked for;
* unless it was saved with ``--dist-ckpt-optim-fully-reshardable``, the distributed optimizer's state lies
  in the order of the parameters, which is another one in the other spec. Loaded there, moments and master
  weights would go to the wrong parameters without a word; here that is an error that says what to do.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator
from typing import Any

from accel.feature import Feature
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE

NORM_BEFORE_EXPERTS = ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
"""Its name in the local spec and in Transformer Engine's, without ``weight`` or ``bias``."""


def load_either(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``dist_checkpointing.load``."""

    @functools.wraps(original)
    def load(sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.serialization import load_sharded_metadata

        if any(_may_differ(leaf) for leaf in _leaves(sharded_state_dict)):
            saved = load_sharded_metadata(checkpoint_dir).keys()
            sharded_state_dict = as_saved(sharded_state_dict, saved)
        return original(sharded_state_dict, checkpoint_dir, *args, **kwargs)

    return load


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
    for ours, theirs in (NORM_BEFORE_EXPERTS, NORM_BEFORE_EXPERTS[::-1]):
        renamed = tree.key.replace(ours, theirs)
        if renamed != tree.key and renamed in saved:
            tree = copy.copy(tree)
            tree.key = renamed
            break
    return tree


def _leaves(tree: Any) -> Iterator[Any]:
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, (dict, list)):
            yield from _leaves(value)
        else:
            yield value


def _may_differ(leaf: Any) -> bool:
    key = getattr(leaf, "key", None)
    return isinstance(key, str) and any(n in key for n in ("_extra_state", *NORM_BEFORE_EXPERTS))


def _is_missing(leaf: Any, saved: Collection[str]) -> bool:
    """Whether it is an ``_extra_state`` that the checkpoint lacks."""
    if isinstance(leaf, (dict, list)) or "_extra_state" not in getattr(leaf, "key", ""):
        return False
    return leaf.unique_key not in saved


def refuse_other_order(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``check_checkpoint_args``."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *rest: Any, **options: Any) -> Any:
        from megatron.training import checkpointing

        wanted = checkpointing.get_args()  # as upstream's module finds them
        if problem := other_order(checkpoint_args, wanted):
            raise ValueError(problem)
        return original(checkpoint_args, *rest, **options)

    return check_checkpoint_args


def other_order(saved: Any, wanted: Any) -> str | None:
    """Why the optimizer's state of a checkpoint cannot be loaded into this run; None if it can.

    Args:
        saved, wanted: Megatron's arguments, of the checkpoint and of this run.
    """
    specs = [getattr(args, "transformer_impl", None) for args in (saved, wanted)]
    loads = wanted.use_distributed_optimizer and not (wanted.no_load_optim or wanted.finetune)
    by_order = getattr(saved, "use_distributed_optimizer", False) and not getattr(
        saved, "dist_ckpt_optim_fully_reshardable", False
    )
    if not loads or not by_order or None in specs or specs[0] == specs[1]:
        return None
    return (
        f"the checkpoint's optimizer state is in the order of --transformer-impl {specs[0]}, this run has "
        f"--transformer-impl {specs[1]}: save it with --dist-ckpt-optim-fully-reshardable, load it with "
        f"--transformer-impl {specs[0]}, or leave it out (--no-load-optim)"
    )


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
            target="megatron.training.checkpointing:check_checkpoint_args",
            replacement="accel.patches.spec_checkpoints:refuse_other_order",
            how="wrap",
            why="Upstream loads states in the order of one layer spec into the parameters of the other.",
        ),
    ),
)
