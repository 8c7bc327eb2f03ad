"""Checkpoints of Megatron's optimizers resume with torch's Adam.

Without Apex and Transformer Engine, Megatron runs torch's Adam, whose step count is a tensor of each
parameter's state. The checkpoint code has eight faults with it:

* the distributed optimizer asks its states for the step count. Before a load there are none, and on a rank
  whose shards are empty there never are (experts of few parameters): it fails on ``assert len(steps) == 1``.
  Here an unstarted optimizer has done 0 steps, and the steps of a rank without parameters are counted;
* its load gives *one* step tensor to all parameters, which each of them then increments, and with
  ``torch_dist`` overwrites it by that of the unstarted optimizer: Adam's bias correction would be
  silently wrong; here each parameter gets the saved step count, as a tensor of its own;
* an fp32 model's weights are views that require a gradient, into which the load copies with autograd on;
  here it copies under ``no_grad``;
* the states that Megatron makes ahead of a load have moments, but no step count, and a step from there stops
  at ``KeyError: 'step'``; here it is that of the other parameters, or 0;
* likewise for what was saved so, by the optimizers that are not distributed; here it is that of the
  parameter's group, where Apex's and Transformer Engine's Adam keep it, or 0, if the moments are 0 too;
* a save before the first step (``--fp16`` skips steps until its loss scale fits) stops, since there are no
  moments, unless it is of the default kind of ``torch_dist``, whose checkpoint then lacks them; here moments
  of 0 are saved, and a precision-aware optimizer makes its masters;
* Megatron-FSDP saves the states that a rank has. Ranks split the parameters end to end, so that a rank may
  hold nothing of a norm, and Adam makes no state of that: saving waits for ever, each rank in the collectives
  of other states. Here every rank saves states of all parameters, some of them empty;
* Megatron-FSDP makes states ahead of a load by a step, with gradients of 0, also where ``--load`` finds no
  checkpoint, as at the start of most scripts: weights decay, and Adam's bias correction goes on from step 1,
  so that a training with ``--load`` is another one than without, also with Apex and Transformer Engine. Here
  these states come without a step.

An optimizer of accel's counts by parameter beside Transformer Engine too, whose own counts by group: there
the groups are saved with that count.

An optimizer without a step count, as Lion beside Muon, is asked for it as well, and fails; here it is saved
and loaded without one, as with Apex.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from accel.feature import Feature
from accel.memory.precision_aware_adam import MOMENTS, PrecisionAwareAdam
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

FEATURE = Feature(
    name="adam_resume",
    summary="resume checkpoints with torch's Adam",
    preset="off",
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    patches=(
        Patch(
            target=f"{_TARGET}.__init__",
            replacement="accel.patches.adam_resume:counting_steps",
            how="wrap",
            why="A rank whose shards are empty has no state that knows how many steps were done.",
        ),
        Patch(
            target=f"{_TARGET}.state_dict",
            replacement="accel.patches.adam_resume:with_a_step_count",
            how="wrap",
            why="Upstream asks optimizers that have no step count, or no states yet, for it, and stops.",
        ),
        Patch(
            target=f"{_TARGET}._set_main_param_and_optimizer_states",
            replacement="accel.patches.adam_resume:step_count_kept",
            how="wrap",
            why="Upstream copies with autograd on, and an unstarted step count over the loaded one.",
        ),
        Patch(
            target=f"{_TARGET}._get_main_param_and_optimizer_states",
            replacement="accel.patches.adam_resume:with_moments_of_0",
            how="wrap",
            why="Upstream saves moments that an optimizer lacks before its first step, and stops.",
        ),
        Patch(
            target=f"{_TARGET}.sharded_param_state_fsdp_dtensor",
            replacement="accel.patches.adam_resume:with_empty_states",
            how="wrap",
            why="Upstream's ranks save different parameters' states, and wait for each other for ever.",
        ),
        Patch(
            target=f"{_TARGET}._init_optimizer_states_with_dummy_values",
            replacement="accel.patches.adam_resume:without_a_step",
            how="wrap",
            why="Upstream steps the optimizer to make its states, and nothing takes the step back.",
        ),
        Patch(
            target=f"{_TARGET}.load_state_dict",
            replacement="accel.patches.adam_resume:step_counts_apart",
            how="wrap",
            why="Upstream shares one step count between all parameters, and copies with autograd on.",
        ),
        *(
            Patch(
                target=f"megatron.core.optimizer.optimizer:{optimizer}.load_state_dict",
                replacement="accel.patches.adam_resume:unstarted_loads_step_0",
                how="wrap",
                why="What was saved before the first step has no step count, which torch's Adam asks for.",
            )
            for optimizer in ("Float16OptimizerWithFloat16Params", "FP32Optimizer")
        ),
        Patch(
            target="megatron.core.optimizer.optimizer:MegatronOptimizer.__init__",
            replacement="accel.patches.adam_resume:with_step_counts_from_the_start",
            how="wrap",
            why="States that are made ahead of a load have no step count, which torch's Adam asks for.",
        ),
    ),
)


@around
def counting_steps(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    if isinstance(self.optimizer, torch.optim.Adam):
        self.accel_step_count = 0
        self.optimizer.register_step_post_hook(functools.partial(_count, self))


def _count(self: Any, *_: object) -> None:
    self.accel_step_count += 1


@around
def with_a_step_count(state_dict: Callable[[Any], Any], self: Any) -> Any:
    optimizer = self.optimizer
    started = any("step" in state for state in optimizer.state.values())
    if started or not _is_asked(optimizer):
        return counted_by_group(optimizer, state_dict(self))
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    # upstream looks at all states for the count, and passes none of them on
    steps = 0 if parameters else getattr(self, "accel_step_count", 0)
    for key in parameters or ["accel"]:
        optimizer.state[key]["step"] = torch.tensor(float(steps))
    try:
        saved = state_dict(self)
    finally:
        for key in parameters or ["accel"]:
            del optimizer.state[key]["step"]
            if not optimizer.state[key]:
                del optimizer.state[key]
    if not _counts_steps(optimizer):  # with Apex or Transformer Engine it would have none
        for group in saved["optimizer"]["param_groups"]:
            group.pop("step", None)
        return saved
    return counted_by_group(optimizer, saved, steps)


def counted_by_group(optimizer: Any, saved: Any, steps: float = 0) -> Any:
    """As the Adam of Apex or Transformer Engine has it, where one is installed and this one is torch's: the
    step count is in groups, in no state, and groups have `bias_correction`."""
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE and isinstance(optimizer, torch.optim.Adam):
        counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
        step = int(max(counts, default=steps))
        inner = saved["optimizer"]
        for group in inner["param_groups"]:
            group["step"] = step if counts else group.get("step", step)
            group.setdefault("bias_correction", True)
        if "state" in inner:
            inner["state"] = {
                key: {name: value for name, value in state.items() if name != "step"}
                for key, state in inner["state"].items()
            }
    return saved


def _is_asked(optimizer: Any) -> bool:
    """Whether upstream asks it for each parameter's step count; those of Apex and TE count by group."""
    from megatron.core.optimizer import distrib_optimizer

    return not distrib_optimizer.HAVE_APEX_OR_TE or isinstance(optimizer, torch.optim.Adam)


def _counts_steps(optimizer: Any) -> bool:
    """torch's Adam does, Lion does not; Megatron's hybrid optimizer consists of others."""
    parts = getattr(optimizer, "sub_optimizers", [optimizer])
    return any(isinstance(part, torch.optim.Adam) for part in parts)


@around
def step_count_kept(
    set_states: Callable[..., None], self: Any, model_param: Any, tensors: Any
) -> None:
    kept = {**tensors, "step": None}  # upstream skips what is no tensor
    with torch.no_grad():
        set_states(self, model_param, kept)


@around
def with_moments_of_0(get_states: Callable[..., dict], self: Any, model_param: Any) -> dict:
    group, place = self.model_param_group_index_map[model_param]
    shard = self.optimizer.param_groups[group]["params"][place]
    if isinstance(self.optimizer, PrecisionAwareAdam) and not self.optimizer.state.get(shard):
        self.optimizer.initialize_state(shard)
    states = get_states(self, model_param)
    if isinstance(self.optimizer, torch.optim.Adam):
        for moment in MOMENTS:
            if moment not in states:
                states[moment] = torch.zeros_like(states["param"])
    return states


@around
def with_empty_states(get_states: Callable[..., dict], self: Any, is_loading: bool = False) -> dict:
    saved = get_states(self, is_loading)
    if isinstance(self.optimizer, torch.optim.Adam):
        saved["state"] = _of_all_parameters(self, saved["state"])
    return saved


def _of_all_parameters(self: Any, states: dict[str, dict]) -> dict[str, dict]:
    """Those of shards that are not empty, and moments of 0 for the other parameters, with the others' step
    count: an empty shard's own, if it was loaded, is never increased."""
    groups = self.optimizer.param_groups
    parameters = {self._param_name(p): p for group in groups for p in group["params"]}
    kept = {n: states[n] for n, p in parameters.items() if n in states and _held(p)}
    count = getattr(self, "accel_step_count", 0)  # of an optimizer that was built before
    steps = max((float(state["step"]) for state in kept.values()), default=count)
    for name, parameter in parameters.items():
        if name not in kept:
            kept[name] = {m: torch.zeros_like(parameter) for m in MOMENTS}
            kept[name]["step"] = torch.tensor(float(steps))
    return kept


@around
def without_a_step(init_states: Callable[[Any], None], self: Any) -> None:
    groups, states = self.optimizer.param_groups, self.optimizer.state
    if all(parameter in states for g in groups for parameter in g["params"] if _held(parameter)):
        return  # they are there
    steps, before = getattr(self, "accel_step_count", None), [dict(group) for group in groups]
    for group in groups:
        group["lr"] = 0.0  # neither gradients of 0 nor the decay move a weight
    try:
        init_states(self)
    finally:
        for group, old in zip(groups, before, strict=True):
            group["lr"] = old["lr"]
            if "step" in group:  # Apex and Transformer Engine count there
                group["step"] = old.get("step", 0)
    for state in states.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
    if steps is not None:
        self.accel_step_count = steps


def _held(parameter: Any) -> int:
    """Number of elements that this rank has."""
    return int(getattr(parameter, "_local_tensor", parameter).numel())


@around
def step_counts_apart(
    load_state_dict: Callable[[Any, Any], None], self: Any, state_dict: Any
) -> None:
    with torch.no_grad():
        if "optimizer" not in state_dict or not _is_asked(self.optimizer):
            load_state_dict(self, state_dict)
            states = state_dict.get("state", {}).values()  # Megatron-FSDP's
            if steps := [float(state["step"]) for state in states if "step" in state]:
                self.accel_step_count = int(max(steps))
            return
        counts, saved = _counts_steps(self.optimizer), state_dict["optimizer"]
        if not counts:  # upstream asks for it all the same
            saved = {**saved, "param_groups": [{**g, "step": 0} for g in saved["param_groups"]]}
        load_state_dict(self, {**state_dict, "optimizer": saved})
    (step,) = {float(group["step"]) for group in saved["param_groups"]}
    self.accel_step_count = int(step)
    for state in self.optimizer.state.values():
        state["step"] = torch.tensor(step)
    if isinstance(self.optimizer, torch.optim.Adam):
        for group in self.optimizer.param_groups:  # nobody counts there
            group.pop("step", None)
    if not counts:
        for uncounted in (*self.optimizer.state.values(), *self.optimizer.param_groups):
            uncounted.pop("step", None)


@around
def unstarted_loads_step_0(
    load_state_dict: Callable[[Any, Any], None], self: Any, state_dict: Any
) -> None:
    if isinstance(self.optimizer, torch.optim.Adam):
        inner = state_dict.get("optimizer", state_dict)
        count_from_0(inner.get("state", {}), inner.get("param_groups", []))
    load_state_dict(self, state_dict)


@around
def with_step_counts_from_the_start(
    init: Callable[..., None],
    self: Any,
    optimizer: Any,
    config: Any,
    init_state_fn: Callable = lambda x: None,
) -> None:
    if isinstance(optimizer, torch.optim.Adam) and init_state_fn is not None:
        init_state_fn = _counting(init_state_fn)
    init(self, optimizer, config, init_state_fn)


@around
def _counting(
    init_states: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any
) -> None:
    init_states(optimizer, *args)
    steps = (state["step"] for state in optimizer.state.values() if "step" in state)
    step = next(steps, torch.tensor(0.0))
    for state in optimizer.state.values():
        if "exp_avg" in state and "step" not in state:
            state["step"] = step.clone()


def count_from_0(states: dict[Any, Any], groups: list[dict[str, Any]]) -> None:
    """Give parameters that lack one the step count of their group, or one of 0.

    Raises:
        ValueError: their group has none, and they have moments.
    """
    counts = {}
    for group in groups:
        count = group.pop("step", None)  # where nobody would count on
        counts.update(dict.fromkeys(group["params"], count))
    if "common_step" in states:
        return
    for number, state in states.items():
        if "exp_avg" in state and "step" not in state:
            if (count := counts.get(number)) is not None:
                state["step"] = torch.tensor(float(count))
                continue
            if state["exp_avg"].any():
                raise ValueError(
                    "the checkpoint's optimizer has moments, but no step count for them, with which Adam's "
                    "bias correction would be resumed: it was saved without, or its parameters are grouped "
                    "otherwise, as with another --expert-model-parallel-size; load it in the layout of the "
                    "run that saved it, or with --no-load-optim"
                )
            state["step"] = torch.tensor(0.0)
