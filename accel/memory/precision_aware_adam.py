"""Adam whose master weights and moments have dtypes of their own choice.

    param  master_weight_dtype    kept                                   bytes beside the param
    bf16   fp32, remainders       int16: the master is param + remainder  2
    any    fp32                   the master; an fp32 param is its own    4 (0)
    any    fp16                   the master over a scale                 2

    moment dtype   kept                               bytes
    fp32           itself                             4
    bf16           rounded                            2
    fp16, fp8      over a scale, one for each tensor  2, 1

The interface is that of Transformer Engine's ``FusedAdam``, which Megatron's distributed optimizer asks for
its states; these are told in fp32, whatever they are kept in, the master too. Where all is fp32 or a
remainder, a step is one pass of `accel.ops.adamw` over memory; other states go through fp32 tensors of one
parameter.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from accel.memory.clip_in_step import ClipsInStep
from accel.memory.pinned import not_on_device
from accel.ops import adamw, join_remainder, split_remainder

__all__ = ["PrecisionAwareAdam"]

MASTER = "master_param"
MOMENTS = ("exp_avg", "exp_avg_sq")
FP8 = torch.float8_e4m3fn
_TINY = torch.finfo(torch.float32).tiny
LARGEST = {torch.float16: torch.finfo(torch.float16).max / 2, FP8: torch.finfo(FP8).max}
"""Dtype -> what the largest value of a tensor is stored as."""


def step_at_once(rows: Sequence[tuple[Tensor, ...]], options: dict[str, Any]) -> None:
    """`accel.ops.adamw` with moments in fp32.

    Args:
        rows: weight, gradient, master, both moments and step count of each parameter; weights, gradients and
            masters of one dtype each. A master is an int16 remainder, in fp32 beside its weight, or the fp32
            weight itself.
    """
    weights, grads, masters, exp_avgs, exp_avg_sqs, steps = zip(*rows, strict=True)
    beside: dict[str, Any] = {}
    if masters[0].dtype == torch.int16:
        masters, beside = weights, {"remainders": masters}
    elif weights[0].dtype != torch.float32:
        beside = {"copies": weights}
    adamw(masters, grads, exp_avgs, exp_avg_sqs, steps, **beside, **options)


class PrecisionAwareAdam(ClipsInStep, torch.optim.AdamW):
    """AdamW, or Adam, on parameters in fp32, bf16 or fp16.

    An AdamW of torch's by class, for beside Transformer Engine or Apex Megatron's distributed optimizer takes
    that or their own.

    State of each parameter: ``step``, ``exp_avg``, ``exp_avg_sq`` as in ``torch.optim.Adam``,
    ``master_param``, and for a scaled one ``<name>_scale``, a float.

    Args:
        params, lr, betas, eps, weight_decay: as in ``torch.optim.Adam``.
        adam_w_mode: decay the weight itself (AdamW).
        capturable: refused.
        master_weights: keep a master weight in ``master_weight_dtype``, fp32 or fp16.
        exp_avg_dtype, exp_avg_sq_dtype: fp32, bf16, fp16, or uint8, which means fp8 (e4m3).
        use_decoupled_grad: gradients are ``param.decoupled_grad``, whose dtype is free.
        store_param_remainders: of bf16 params with fp32 masters keep remainders.

    Raises:
        ValueError: a dtype that is not among these, ``capturable``, or no master weights.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = True,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if capturable or not master_weights:
            raise ValueError(
                f"PrecisionAwareAdam: capturable={capturable}, master_weights={master_weights}: it keeps "
                "master weights and cannot be captured in a graph"
            )
        self._check_dtype(
            "master_weight_dtype", master_weight_dtype, {torch.float32, torch.float16}
        )
        moment_dtypes = {torch.float32, torch.bfloat16, torch.float16, torch.uint8}
        self._check_dtype("exp_avg_dtype", exp_avg_dtype, moment_dtypes)
        self._check_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype, moment_dtypes)
        torch.optim.Adam.__init__(  # AdamW's has no choice of `decoupled_weight_decay`
            self,
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            decoupled_weight_decay=adam_w_mode,
        )
        moments = zip(MOMENTS, (exp_avg_dtype, exp_avg_sq_dtype), strict=True)
        self._dtypes = {name: FP8 if dtype == torch.uint8 else dtype for name, dtype in moments}
        self._dtypes[MASTER] = master_weight_dtype
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = (
            store_param_remainders and master_weight_dtype == torch.float32
        )
        self.can_clip_in_step()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """As torch's AdamW does: Transformer Engine's groups do not say how weights decay."""
        torch.optim.Adam.__setstate__(self, state)
        if self.defaults["decoupled_weight_decay"]:
            for group in self.param_groups:
                group["decoupled_weight_decay"] = True

    @staticmethod
    def _check_dtype(name: str, dtype: torch.dtype, allowed: set[torch.dtype]) -> None:
        if dtype not in allowed:
            listed = ", ".join(sorted(map(str, allowed)))
            raise ValueError(f"PrecisionAwareAdam: {name}={dtype}: use one of {listed}")

    def initialize_all_states(self) -> None:
        """Of every parameter that has none yet."""
        for param in (p for group in self.param_groups for p in group["params"]):
            if not self.state[param]:
                self.initialize_state(param)

    def initialize_state(self, param: Tensor) -> None:
        """Moments of 0 and a master that is the parameter."""
        own = self._is_own_master(param)
        memory = {n: self._allocate(param, n) for n in (*MOMENTS, *([] if own else [MASTER]))}
        state = self.state[param]
        state["step"] = torch.tensor(0.0)
        for name in MOMENTS:
            state[name] = memory[name].zero_()
            if self._dtypes[name] in LARGEST:
                state[f"{name}_scale"] = 0.0
        if own:
            state[MASTER] = param.detach()
        else:
            state[MASTER] = memory[MASTER]
            self._reload_master(param)

    def _complete_state(self, param: Tensor) -> None:
        """A new state, or one that somebody has begun: with moments of any dtype, as for torch's Adam."""
        given = self.state[param]
        if {"step", *MOMENTS, MASTER} <= given.keys():
            return
        del self.state[param]
        self.initialize_state(param)
        self.state[param]["step"] = given.get("step", self.state[param]["step"])
        for name in given.keys() & {*MOMENTS, MASTER}:
            self.set_scaled_state(param, name, given[name].float())

    def _allocate(self, param: Tensor, name: str) -> Tensor:
        """Memory for a state of `param`, with anything in it."""
        return torch.empty_like(param, dtype=self._dtype_of(param, name))

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A state in fp32: itself if it is kept so, else joined or scaled back in host memory, where a
        checkpoint wants it; the device has no room for all of them."""
        if state_name == MASTER and self._is_own_master(param):
            return param.detach()
        self._complete_state(param)
        if self.state[param][state_name].dtype == torch.float32:
            return self.state[param][state_name]
        with not_on_device(param.device):
            return self._in_fp32(param, state_name, torch.device("cpu"))

    def master_of(self, param: Tensor) -> Tensor:
        """In fp32 and on the device of the parameter; before its first step the parameter."""
        if self._is_own_master(param) or not self.state.get(param):
            return param.detach().float()
        self._complete_state(param)
        return self._in_fp32(param, MASTER, param.device)

    def _in_fp32(self, param: Tensor, name: str, device: torch.device) -> Tensor:
        kept = self.state[param][name].to(device)
        if kept.dtype == torch.int16:
            return join_remainder(param.detach().to(device), kept)
        return kept.float().mul_(self.state[param].get(f"{name}_scale", 1.0))

    @torch.no_grad()
    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Take a state in fp32, or int16 for the remainder itself. A master in fp32 writes the parameter too,
        as what it is kept as: so a resumed run has the parameters of the uninterrupted one."""
        self._complete_state(param)
        if unscaled_state.dtype == torch.int16:
            self.state[param][state_name].copy_(unscaled_state)
            return
        self._keep(param, state_name, unscaled_state.detach())
        if state_name == MASTER and not self._has_remainder(param):  # which keeps both
            kept = self.state[param][MASTER]
            param.copy_(
                kept if kept.dtype == torch.float32 else self.get_unscaled_state(param, MASTER)
            )

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Make the masters what the parameters are, after these were written by somebody else."""
        for param, state in list(self.state.items()):
            if state and not self._is_own_master(param):
                self._complete_state(param)
                self._reload_master(param)

    def _reload_master(self, param: Tensor) -> None:
        kept = self.state[param][MASTER]
        if kept.dtype == torch.int16:
            kept.zero_()
        elif kept.dtype == torch.float32:
            kept.copy_(param.detach().to(kept.device))
        else:
            self._keep(param, MASTER, param.detach().float())

    def _has_remainder(self, param: Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def _is_own_master(self, param: Tensor) -> bool:
        return param.dtype == self._dtypes[MASTER] == torch.float32

    def _keep(self, param: Tensor, name: str, value: Tensor) -> None:
        """Store fp32 `value` in the state's own dtype; a remainder needs its weight beside it."""
        state = self.state[param]
        kept = state[name]
        if kept.dtype == torch.int16:
            weight, remainder = split_remainder(value)
            param.copy_(weight)
            kept.copy_(remainder)
        elif kept.dtype in LARGEST:
            largest = value.abs().max().item() if value.numel() else 0.0
            # a smaller divisor than any normal number would round to 0, or have no reciprocal
            scale = max(largest / LARGEST[kept.dtype], _TINY) if largest else 0.0
            state[f"{name}_scale"] = scale
            kept.copy_(value / scale if scale else value)
        elif kept.data_ptr() != value.data_ptr():
            kept.copy_(value)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for group in self.param_groups if self.use_decoupled_grad else ():
            for param in group["params"]:
                if set_to_none:
                    param.decoupled_grad = None
                elif getattr(param, "decoupled_grad", None) is not None:
                    param.decoupled_grad.zero_()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        self.has_clipped()
        return loss

    def _take_step(self) -> None:
        for rows, options in self._rows_of_groups():
            self._step_params(rows, options)

    def _rows_of_groups(self) -> Iterator[tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]]:
        """Parameters with their gradients, and the options of their group."""
        attribute = "decoupled_grad" if self.use_decoupled_grad else "grad"
        grad_scale = self.grad_scale()
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            options["grad_scale"] = grad_scale
            options["decoupled"] = group["decoupled_weight_decay"]
            rows = [(p, getattr(p, attribute, None)) for p in group["params"]]
            started = [(p, grad) for p, grad in rows if grad is not None]
            for param, _ in started:
                self._ready_state(param)
            yield started, options

    def _ready_state(self, param: Tensor) -> None:
        """Whatever others have put into its state, or done to its data."""
        self._complete_state(param)
        state = self.state[param]
        if not isinstance(state["step"], Tensor) or state["step"].device.type != "cpu":
            state["step"] = torch.tensor(float(state["step"]))
        if self._is_own_master(param):
            state[MASTER] = param.detach()

    def _step_params(self, rows: list[tuple[Tensor, Tensor]], options: dict[str, Any]) -> None:
        """A step of parameters, each with its gradient."""
        at_once = collections.defaultdict[tuple, list](list)
        for param, grad in rows:
            state = self.state[param]
            kinds = [state[name].dtype for name in (*MOMENTS, MASTER)]
            if all(kind in (torch.float32, torch.int16) for kind in kinds):
                row = (param.detach(), grad, *(state[n] for n in (MASTER, *MOMENTS, "step")))
                at_once[grad.dtype, kinds[-1], param.dtype].append(row)
            else:
                self._step_through_fp32(param, grad, options)
        for same in at_once.values():
            step_at_once(same, options)

    def _step_through_fp32(self, param: Tensor, grad: Tensor, options: dict[str, Any]) -> None:
        names = (*MOMENTS, MASTER)
        kept = (self.state[param][name] for name in names)
        values = {
            name: value
            if value.dtype == torch.float32
            else self._in_fp32(param, name, param.device)
            for name, value in zip(names, kept, strict=True)
        }
        exp_avg, exp_avg_sq, master = values.values()
        adamw([master], [grad], [exp_avg], [exp_avg_sq], [self.state[param]["step"]], **options)
        for name, value in values.items():
            self.set_scaled_state(param, name, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but states keep their own dtypes: torch would cast them to the parameter's.

        Raises:
            ValueError: a tensor has another shape or dtype than what is kept; nothing is loaded.
        """
        params = [p for group in self.param_groups for p in group["params"]]
        numbers = [n for group in state_dict["param_groups"] for n in group["params"]]
        given = dict(zip(params, map(state_dict["state"].get, numbers), strict=True))
        for number, (param, state) in enumerate(given.items()):
            self._check_state(number, param, state or {})
        before = self.state
        super().load_state_dict({**state_dict, "state": {}})
        for param, state in given.items():
            if state is not None:
                self.state[param] = before.get(param, {})  # `state` may hold its tensors
                self._complete_state(param)
                self._load(param, state)

    def _check_state(self, number: int, param: Tensor, given: dict[str, Any]) -> None:
        for name in given.keys() & {MASTER, *MOMENTS}:
            value, dtype = given[name], self._dtype_of(param, name)
            dtypes = {dtype, torch.uint8} if dtype == FP8 else {dtype}
            if self._is_placeholder(param, name, value):
                continue
            if value.dtype not in dtypes or value.shape != param.shape:
                raise ValueError(
                    f"PrecisionAwareAdam: {name} of parameter {number}, {list(param.shape)}, is kept as "
                    f"{dtype}; the state dict has {value.dtype} of {list(value.shape)}"
                )

    def _dtype_of(self, param: Tensor, name: str) -> torch.dtype:
        return torch.int16 if name == MASTER and self._has_remainder(param) else self._dtypes[name]

    def _is_placeholder(self, param: Tensor, name: str, value: Tensor) -> bool:
        """Megatron takes every parameter for one with a remainder."""
        return name == MASTER and value.dtype == torch.int16 != self._dtype_of(param, name)

    @torch.no_grad()
    def _load(self, param: Tensor, given: dict[str, Any]) -> None:
        state = self.state[param]
        for name, value in given.items():
            if name == "step":  # others keep an int, or a tensor elsewhere
                state[name] = torch.tensor(float(value))
            elif not isinstance(value, Tensor):
                state[name] = value
            elif not self._is_placeholder(param, name, value):
                kept = param if name == MASTER and self._is_own_master(param) else state[name]
                kept.copy_(value.view(kept.dtype) if value.dtype == torch.uint8 else value)
