"""What the layers share: how parameters are made and initialised, the group, and the extra state.

`_extra_state` is where Transformer Engine keeps its FP8 scales. Here it is always the empty tensor that
it writes without FP8: checkpoints have the same keys, loading never asks for it, and one that holds
FP8 scales is refused.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel.log import log_once
from accel.parallel import linear_overlap
from accel.parallel.linear import DelayedGradients, Layout

__all__ = ["ExtraState", "ParallelLayer", "refuse_options"]

EXTRA_STATE = "_extra_state"


def refuse_options(layer: str, options: Mapping[str, Any]) -> None:
    """Raise for whatever of `options` is set: Transformer Engine has it, accel does not.

    Raises:
        NotImplementedError: it names the option and its value.
    """
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(
                f"{layer}: accel's layer has no {name} (got {value!r}); install Transformer Engine, "
                "or turn off the Megatron option behind it"
            )


class ExtraState(torch.nn.Module):
    """Writes an empty `_extra_state`, and loads with or without one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_load_state_dict_pre_hook(_add_missing_extra_state)

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        """Raises ValueError for a state that holds FP8 scales, or that may."""
        if held := _held(state):
            raise ValueError(
                f"{type(self).__name__}: the checkpoint's _extra_state holds FP8 scales ({held}), and accel "
                "has no FP8 yet; load it where Transformer Engine is installed"
            )


def _held(state: Any) -> str | None:
    """What there is in Transformer Engine's extra state; None for nothing."""
    if isinstance(state, io.BytesIO):  # of its versions before 2.0
        state.seek(0)
        try:
            state = torch.load(state, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            return f"{state.getbuffer().nbytes} bytes, more than tensors"
    if isinstance(state, Tensor):
        return f"{state.numel()} bytes" if state.numel() else None
    return None if state is None else type(state).__name__


def _add_missing_extra_state(
    module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any
) -> None:
    state_dict.setdefault(prefix + EXTRA_STATE, torch.empty(0, dtype=torch.uint8))


class ParallelLayer(ExtraState):
    """A linear layer, or several, with weights split over a tensor-parallel group. A subclass registers them.

    Args:
        in_features, out_features: of the whole layer; the attributes are those of this rank.
        tp_group: None until `set_tensor_parallel_group` gives one; `tp_size` counts until then.
        parallel_mode: `column`, `row`, or None for a layer that is not split.
        get_rng_state_tracker: returns Megatron's tracker; weights are drawn in its fork
            `rng_tracker_name`, or in its own one.
        init_method: fills a weight in place; a normal distribution if None.
        fuse_wgrad_accumulation: add weight gradients to `main_grad`.
        delay_wgrad_compute: compute weight gradients in `backward_dw` instead of in the backward.
        bias, return_bias: whether there is one; return it beside the result instead of adding it.
        params_dtype, device: of the parameters; device "meta" leaves them without values.
        ub_name: kept for Megatron, which reads it; there are no userbuffers.
        ub_overlap_ag, ub_overlap_rs, ub_overlap_rs_dgrad: whether a product may overlap with the gather
            before it, with the reduction of a row layer, and of a column layer's input gradient, where
            `accel.parallel.linear_overlap` is on.
        ub_bulk_wgrad, ub_bulk_dgrad: collectives beside a product that needs them not; that is always so.
        options: what else Transformer Engine takes (userbuffers, symmetric memory, ...): refused if set.
    """

    communicates = True
    """Whether its operands and results go between tensor-parallel ranks."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        rng_tracker_name: str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = None,
        ub_name: str | None = None,
        ub_overlap_ag: bool = True,
        ub_overlap_rs: bool = True,
        ub_overlap_rs_dgrad: bool = True,
        ub_bulk_wgrad: bool = True,
        ub_bulk_dgrad: bool = True,
        delay_wgrad_compute: bool = False,
        **options: Any,
    ) -> None:
        refuse_options(type(self).__name__, options)
        super().__init__()
        if parallel_mode not in ("column", "row", None):
            raise ValueError(f"parallel_mode={parallel_mode!r}: use 'column', 'row' or None")
        self.tp_size = tp_size if tp_group is None else tp_group.size()
        self.tp_group = tp_group
        self.sequence_parallel = sequence_parallel and self.tp_size > 1
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.get_rng_state_tracker = get_rng_state_tracker
        if rng_tracker_name is not None:
            self.rng_tracker_name = rng_tracker_name
        self.init_method = init_method or draw_normal
        self.parallel_mode = parallel_mode
        self.in_features, self.out_features = in_features, out_features
        if parallel_mode == "column":
            self.out_features = self._per_rank("out_features")
        elif parallel_mode == "row":
            self.in_features = self._per_rank("in_features")
        self.use_bias, self.return_bias = bias, return_bias
        self.where = {"device": device, "dtype": params_dtype}
        self.delayed = DelayedGradients() if delay_wgrad_compute else None
        self.ub_name = ub_name
        if ub_name is not None and self.communicates and linear_overlap.current() is None:
            log_once(
                "tp_comm_overlap",
                "the configuration asks for it, and nothing overlaps; accel.enable(tp_overlap=True) does it",
            )
        self.overlap_gather = ub_overlap_ag
        self.overlap_reduce = ub_overlap_rs if parallel_mode == "row" else ub_overlap_rs_dgrad
        self.save_original_input = False  # without FP8 it is always the original
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self.fp8 = self.fp8_calibration = False
        self._gradient_hooks: list[Callable[[], None]] = []
        self._initial: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {}
        """Parameter -> what gives it its first values, and the attributes that Megatron reads."""

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Nothing to do without FP8."""

    def set_tensor_parallel_group(self, tp_group: dist.ProcessGroup | None) -> None:
        """The group to communicate in, if it was not there when the layer was made."""
        self.tp_group = tp_group

    @property
    def layout(self) -> Layout:
        if self.parallel_mode is not None and self.tp_size > 1 and self.tp_group is None:
            raise RuntimeError(
                f"{type(self).__name__}: tp_size is {self.tp_size}, but there is no tensor-parallel "
                "group; call set_tensor_parallel_group first"
            )
        return Layout(
            self.parallel_mode,  # type: ignore[arg-type]  # checked above
            self.tp_group,
            self.sequence_parallel,
            self.fuse_wgrad_accumulation,
            self.delayed,
            overlap_gather=self.overlap_gather,
            overlap_reduce=self.overlap_reduce,
        )

    def _per_rank(self, name: str) -> int:
        """Raises ValueError if the ranks do not divide it."""
        features: int = getattr(self, name)
        if features % self.tp_size:
            raise ValueError(
                f"{type(self).__name__}: {name}={features} is no multiple of the {self.tp_size} ranks "
                "of the tensor-parallel group"
            )
        return features // self.tp_size

    def new_weight(self, name: str) -> None:
        """Register a weight `[N, K]`, split as `parallel_mode` says, and draw its values.

        Marked as this rank's own whatever the mode, as Transformer Engine's: Megatron passes no mode for
        experts, and clears the mark of what each rank has the same of.
        """
        self.new_parameter(
            name,
            (self.out_features, self.in_features),
            self._draw,
            tensor_model_parallel=True,
            partition_dim=1 if self.parallel_mode == "row" else 0,
            partition_stride=1,
            skip_backward_post_hook=self.delayed is not None,
        )

    def new_bias(self, name: str) -> None:
        """Register a bias `[N]` of zeros: split in a column layer, whole in a row layer, where every
        rank sees its own rows under sequence parallelism."""
        marks: dict[str, Any] = {}
        if self.parallel_mode == "row":
            marks = {"sequence_parallel": self.sequence_parallel}
        elif self.parallel_mode == "column":
            marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
        self.new_parameter(name, (self.out_features,), torch.nn.init.zeros_, **marks)

    def new_parameter(
        self, name: str, size: tuple[int, ...], fill: Callable[[Tensor], Any], **marks: Any
    ) -> None:
        """Register a parameter with `marks`, attributes that Megatron reads, and `fill` it."""
        self.register_parameter(name, torch.nn.Parameter(torch.empty(size, **self.where)))
        self._initial[name] = fill, marks
        self._reset(name)

    def reset_parameters(self) -> None:
        """Give all parameters their first values anew, and the attributes that `to_empty` drops; others may
        have changed those that are there."""
        for name in self._initial:
            self._reset(name)

    @torch.no_grad()
    def _reset(self, name: str) -> None:
        parameter, (fill, marks) = self.get_parameter(name), self._initial[name]
        for mark, value in marks.items():
            if not hasattr(parameter, mark):
                setattr(parameter, mark, value)
        if not parameter.is_meta:
            fill(parameter)

    def _draw(self, weight: Tensor) -> None:
        with self._fork():
            self.init_method(weight)

    @contextlib.contextmanager
    def _fork(self) -> Iterator[None]:
        if self.get_rng_state_tracker is None:
            yield
            return
        name = getattr(self, "rng_tracker_name", None)
        with self.get_rng_state_tracker().fork(*([name] if name else [])):
            yield

    def need_backward_dw(self) -> bool:
        return self.delayed is not None

    def backward_dw(self) -> None:
        """Compute the weight gradient of the oldest backward that has none yet; then call the hooks.

        Raises:
            RuntimeError: no backward has left one.
        """
        if self.delayed is None:
            return
        if not len(self.delayed):
            raise RuntimeError(f"{type(self).__name__}.backward_dw: no backward is left to finish")
        self.delayed.compute_next()
        self._trigger_wgrad_accumulation_and_reduce_hooks()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Called after each `backward_dw`: Megatron's data parallelism adds and reduces there."""
        self._gradient_hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._gradient_hooks:
            hook()


def draw_normal(weight: Tensor) -> Tensor:
    """Draw the values of a weight from the normal distribution that is Transformer Engine's default."""
    return torch.nn.init.normal_(weight, mean=0.0, std=0.023)
