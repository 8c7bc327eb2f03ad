"""Megatron's optimizers on master weights that the inner optimizer keeps, for the features that want it so.

Megatron has such a path, the one of ``--use-precision-aware-optimizer``: with the distributed optimizer and
Transformer Engine's Adam. Here it is taken with an Adam of accel's, and without the distributed optimizer
too (`SharedWeightsOptimizer`). Three features want it, each for a reason of its own; what they want is in
``WANTED`` while they are on, and their patches are the same.
"""

from __future__ import annotations

import functools
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from accel.memory.host_adam import REPLICATED, HostAdam
from accel.memory.precision_aware_adam import MASTER, PrecisionAwareAdam
from accel.patches._params_norm import PARAMS_NORM, Master, keep_master_of
from accel.patches._settings import first_given
from accel.patches._told import told
from accel.patching import Patch, around
from accel.upstream import flag_of, fused_adam_library, te_installed

__all__ = [
    "CLIPPING",
    "ELSEWHERE",
    "INNER_MASTERS",
    "NOT_WITH_FSDP",
    "WANTED",
    "reads_any_dtype",
    "refused",
    "want",
]

_log = logging.getLogger("accel")
_HERE = "accel.patches._inner_masters"
_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"

WANTED: dict[str, Any] = {}
"""Name of a feature that is on -> what it was given."""

FLAG, SHARED, HOST = "precision_aware_optimizer", "shared_weights", "host_optimizer"
CLIPPING = "fused_adamw"
"""Not one that wants masters kept: it clips gradients as they are read."""

ELSEWHERE = "it writes or keeps the fp32 masters itself"
NOT_WITH_FSDP = (
    "--use-precision-aware-optimizer and --use-megatron-fsdp need Transformer Engine: accel's Adam takes no "
    "shards of FSDP; leave one out"
)
_EXCLUDED = {
    "optimizer_cpu_offload": ELSEWHERE,
    "use_layer_wise_distributed_optimizer": ELSEWHERE,
    "use_megatron_fsdp": ELSEWHERE,
    "use_torch_fsdp2": ELSEWHERE,
    "fp8_param_gather": "its weights are fp8",
    "fp4_param_gather": "its weights are fp4",
    "optimizer_cuda_graph": "the optimizer cannot be captured",
    "rl_offload_optimizer_during_inference": "it takes the parameters out of the buffer that is stepped",
    "qk_clip": ELSEWHERE,
}
"""Option of Megatron's -> why the inner optimizer cannot keep the masters with it. Not `conflicts` of a
feature: an optimizer's configuration is asked too, and one of these is the name of a feature that is always
on."""


def want(name: str, given: Any) -> Callable[[], None]:
    """Returns what takes the wish back."""
    WANTED[name] = given
    return functools.partial(WANTED.__delitem__, name)


def without_masters(options: Any) -> str | None:
    """Why there are none to keep under Megatron's arguments, or its ``OptimizerConfig``."""
    if not getattr(options, "bf16", False):
        dtype = "fp16" if getattr(options, "fp16", False) else "fp32"
        return f"parameters are {dtype}; it serves bf16 parameters (--bf16) and their fp32 masters"
    if options.optimizer != "adam":
        return f"--optimizer {options.optimizer} is not served, only adam"
    return None


def refused(options: Any) -> str | None:
    """Why the inner optimizer cannot keep the masters under these."""
    if reason := without_masters(options):
        return reason
    option = first_given(_EXCLUDED, options)
    return option and f"{flag_of(option)}: {_EXCLUDED[option]}"


def _wanted(config: Any, *, any_way: bool = False) -> list[str]:
    """The features that want the inner optimizer to keep the masters, where it can, or any way.

    Where Transformer Engine is installed, its own Adam serves Megatron's flag, and has its own checkpoints.
    """
    theirs = config.use_precision_aware_optimizer and te_installed()
    names = (HOST,) if theirs else (SHARED, HOST)
    return [name for name in names if name in WANTED and (any_way or not refused(config))]


@around
def configured(post_init: Callable[[Any], None], self: Any) -> None:
    """``OptimizerConfig.__post_init__`` that finds an optimizer for the flag. What accel wants beside it is
    no part of a configuration, which programs read, copy and write down: `built` sees to that."""
    wanted = _wanted(self, any_way=True)
    if wanted and (reason := refused(self)):
        names = " and ".join(wanted)
        nothing_lost = wanted == [SHARED] and without_masters(self)
        level = logging.INFO if nothing_lost else logging.WARNING
        _log.log(level, "%s: this optimizer keeps its own masters: %s", names, reason)
        wanted = []
    by_flag = self.use_precision_aware_optimizer and self.use_distributed_optimizer
    served = by_flag and (wanted or FLAG in WANTED)
    (_checking(post_init) if served else post_init)(self)


def _asked_of(model_chunks: Any) -> str | None:
    """Which of these options a model's configuration has, or its wrapper's; an optimizer's has not all, and
    FSDP2 is in none but the command line."""
    if any(hasattr(p, "_local_tensor") for chunk in model_chunks for p in chunk.parameters()):
        return "use_torch_fsdp2"
    owners = [getattr(c, name, None) for c in model_chunks for name in ("config", "ddp_config")]
    return first_given(_EXCLUDED, *owners)


_CHAINING: ContextVar[bool] = ContextVar("accel_chaining_optimizers", default=False)


@around
def chained(build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What chains Muon, SOAP or Lion with an Adam for the other parameters. It calls that Adam's own
    configuration one of ``adam``, and gives it the chain's afterwards, which knows nothing of ours: its
    gradients would be in no norm."""
    token = _CHAINING.set(True)
    try:
        return build(*args, **kwargs)
    finally:
        _CHAINING.reset(token)


@around
def built(
    build: Callable[..., Any], config: Any, model_chunks: Any, *args: Any, **kwargs: Any
) -> Any:
    """``_get_megatron_optimizer_based_on_param_groups`` that takes an Adam of ours."""
    by_flag = config.use_precision_aware_optimizer
    wanted = [] if _CHAINING.get() else _wanted(config)
    option = _asked_of(model_chunks)
    if option and HOST in wanted:
        raise ValueError(f"--accel-host-optimizer and {option}: {_EXCLUDED[option]}")
    why = f"{option}: {_EXCLUDED[option]}" if option else _programs_adam(build)
    if why and wanted:
        names = " and ".join(wanted)
        _log.warning("%s: this optimizer keeps its own masters: %s", names, why)
        wanted = []
    served = wanted or (by_flag and FLAG in WANTED)
    if not served or config.optimizer_cpu_offload:
        return build(config, model_chunks, *args, **kwargs)
    if option == "use_megatron_fsdp":
        raise ValueError(NOT_WITH_FSDP)
    adam = functools.partial(HostAdam, host=WANTED[HOST]()) if HOST in wanted else None
    seen = config if by_flag else _with_inner_masters(config, remainders=SHARED in wanted)
    return _building(build, adam or PrecisionAwareAdam, plain=bool(wanted))(
        seen, model_chunks, *args, **kwargs
    )


def _programs_adam(build: Callable[..., Any]) -> str | None:
    """That a program has put an Adam of its own into Megatron."""
    names = inspect.unwrap(build).__globals__
    adam = names["Adam"]
    known = adam.__module__.partition(".")[0] in ("torch", "transformer_engine", "apex")
    if known or names["USING_PYTORCH_OPTIMIZER"]:  # which takes torch's, whatever the name is
        return None
    return f"Megatron was given {adam.__module__}.{adam.__qualname__}"


def _with_inner_masters(config: Any, *, remainders: bool) -> Any:
    """The configuration as an optimizer of ours is to see it, now and after changes."""
    kind: Any = type(config)
    seen = object.__new__(_seeing(kind, remainders))
    seen.__dict__ = config.__dict__
    return seen


@functools.cache
def _seeing(kind: Any, remainders: bool) -> Any:
    """`kind`, but the inner optimizer keeps the masters, with or without the distributed one; upstream's
    checks of a new configuration refuse the latter."""
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__post_init__": lambda self: None,
        "use_precision_aware_optimizer": _always(True),
        "use_precision_aware_optimizer_no_fp8_or_ds_fp8": _always(True),
        "store_param_remainders": _always(remainders),
    }
    return type(kind.__name__, (kind,), members)


def _always(value: bool) -> property:
    """Whatever it is set to."""
    return property(lambda self: value, lambda self, given: None)


def _building(build: Callable[..., Any], adam: Any, *, plain: bool) -> Callable[..., Any]:
    """Upstream's function, told of our Adam; `plain`: its mixed-precision optimizer knows it too."""
    names: dict[str, Any] = {}
    if plain:
        from accel.patches.shared_weights_optimizer import SharedWeightsOptimizer

        names["Float16OptimizerWithFloat16Params"] = SharedWeightsOptimizer
    return told(
        build, _te(adam), USING_PYTORCH_OPTIMIZER=False, Adam=adam, is_te_min_version=_yes, **names
    )


def _checking(post_init: Callable[[Any], None]) -> Callable[[Any], None]:
    """``OptimizerConfig.__post_init__`` that finds an optimizer for the flag."""
    return told(post_init, _te(PrecisionAwareAdam), is_te_min_version=_yes)


def _te(adam: Any) -> dict[str, Any]:
    """Where Megatron looks for the optimizer."""
    return {"transformer_engine.pytorch.optimizers": types.SimpleNamespace(FusedAdam=adam)}


def _yes(*args: Any, **kwargs: Any) -> bool:
    return True


@around
def without_main_params(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    init(self, *args, **kwargs)
    if isinstance(self.optimizer, PrecisionAwareAdam) and not self.is_stub_optimizer:
        for param in (p for buffer in self.buffers for p in buffer.params):
            if getattr(param, "main_param", self) is None:
                del param.main_param
            keep_master_of(param, None)
        for weight, shard in _weights_and_shards(self):
            keep_master_of(weight, Master.of(self.optimizer, shard, sharded=True))
            replicated = any(getattr(weight, name, False) for name in REPLICATED)
            setattr(shard, REPLICATED[-1], replicated)


def _weights_and_shards(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Of a distributed optimizer: parameters of the model, and this rank's views of them."""
    weights = optimizer.model_float16_groups + optimizer.model_fp32_groups
    shards = optimizer.shard_float16_groups + optimizer.shard_fp32_groups
    for of_model, of_rank in zip(weights, shards, strict=True):
        yield from zip(of_model, of_rank, strict=True)


@around
def masters_too(copy: Callable[..., None], self: Any, state_dict: Any = None) -> None:
    copy(self, state_dict)
    if not isinstance(self.optimizer, PrecisionAwareAdam):
        return
    if state_dict is None:
        self.optimizer.reload_masters()
        return
    given = self._build_model_param_to_state_dict_param_map(state_dict)
    for weight, shard in _weights_and_shards(self):
        part = self._get_model_param_range_map(weight)["param"]
        master = given[weight].detach().view(-1)[part.start : part.end]
        self.optimizer.set_scaled_state(shard, MASTER, master.to(shard.device).float())


@around
def in_the_dtype_of_main_grads(copy: Callable[[Any], None], self: Any) -> None:
    copy(self)
    wide = self.config.main_grads_dtype == torch.float32 and not self.ddp_config.use_megatron_fsdp
    if wide and isinstance(self.optimizer, PrecisionAwareAdam) and not reads_any_dtype(self):
        for param in (p for group in self.optimizer.param_groups for p in group["params"]):
            if getattr(param, "decoupled_grad", None) is not None:
                param.decoupled_grad = param.decoupled_grad.float()


def reads_any_dtype(optimizer: Any) -> bool:
    """Whether nobody writes gradients between their reduction and the step of this optimizer of Megatron's,
    which reads them in fp32 and clips what it has read. Clipping writes where parameters of one optimizer
    have norms of their own (`mtp_detach_heads`); Transformer Engine's and Apex's norms are of one dtype."""
    inner = optimizer.optimizer
    if type(inner) is not PrecisionAwareAdam or optimizer.grad_scaler is not None:
        return False
    params = (p for group in inner.param_groups for p in group["params"])
    one_norm = all(getattr(p, "grad_norm_group", None) is None for p in params)
    return CLIPPING in WANTED and one_norm and not fused_adam_library()


@around
def states_alone(offload: Callable[[Any], None], self: Any) -> None:
    inner = getattr(self, "optimizer", None)
    if isinstance(inner, HostAdam):
        raise ValueError(
            "offload_to_cpu(): --accel-host-optimizer keeps states in host memory already; leave one out"
        )
    if not isinstance(inner, PrecisionAwareAdam):
        offload(self)
        return
    for state in inner.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                state[name] = value.cpu()
    torch.cuda.empty_cache()


@around
def into_states_that_are_there(
    load: Callable[[Any, Any], None], self: Any, state_dict: Any
) -> None:
    if isinstance(self.optimizer, PrecisionAwareAdam):
        self.optimizer.initialize_all_states()
    load(self, state_dict)


INNER_MASTERS = (
    Patch(
        target="megatron.core.optimizer.optimizer_config:OptimizerConfig.__post_init__",
        replacement=f"{_HERE}:configured",
        how="wrap",
        why="Megatron follows its configuration to an optimizer that keeps masters, which it looks for in "
        "Transformer Engine.",
    ),
    Patch(
        target="megatron.core.optimizer:_get_megatron_optimizer_based_on_param_groups",
        replacement=f"{_HERE}:built",
        how="wrap",
        why="Upstream would take torch's AdamW, which keeps no masters and knows no dtypes of states.",
    ),
    Patch(
        target="megatron.core.optimizer:_get_megatron_emerging_optimizer",
        replacement=f"{_HERE}:chained",
        how="wrap",
        why="The Adam in its chain gets a configuration that tells it nothing of masters within it.",
        optional=True,
    ),
    Patch(
        target="megatron.core.optimizer.muon:get_megatron_muon_optimizer",
        replacement=f"{_HERE}:chained",
        how="wrap",
        why="The Adam in Megatron 0.17's chain gets a configuration of another class than the chain.",
        optional=True,
    ),
    Patch(
        target=f"{_DISTRIBUTED}.__init__",
        replacement=f"{_HERE}:without_main_params",
        how="wrap",
        why="Upstream leaves a main parameter of None, whose norm --log-params-norm takes for 0.",
    ),
    Patch(
        target=f"{_DISTRIBUTED}._copy_model_params_to_main_params",
        replacement=f"{_HERE}:masters_too",
        how="wrap",
        why="Upstream leaves the masters as they were when other weights are loaded into the model.",
    ),
    Patch(
        target=f"{_DISTRIBUTED}._copy_model_grads_to_main_grads",
        replacement=f"{_HERE}:in_the_dtype_of_main_grads",
        how="wrap",
        why="Upstream would clip gradients in bf16 where they were reduced in bf16.",
    ),
    Patch(
        target=f"{_DISTRIBUTED}.load_state_dict",
        replacement=f"{_HERE}:into_states_that_are_there",
        how="wrap",
        why="Where there are no states yet upstream makes some for the load, beside those it loads into.",
    ),
    PARAMS_NORM,
    Patch(
        target="megatron.core.optimizer.optimizer:MegatronOptimizer.offload_to_cpu",
        replacement=f"{_HERE}:states_alone",
        how="wrap",
        why="Upstream takes the parameters along, which here are the model's own.",
    ),
)
"""All that the three features change."""
