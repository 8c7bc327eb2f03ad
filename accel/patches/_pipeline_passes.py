"""The passes of a schedule through Megatron's own ``forward_step`` and ``backward_step``.

Gradients are synchronized by the last backward of each chunk, parameters before the first forward, as in
Megatron's own schedules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from accel.parallel.schedule import Action, Kind, Schedule
from accel.parallel.schedule.in_order import BACKWARDS, completing
from accel.parallel.split_backward import WeightPart, input_part

__all__ = ["Passes"]


@dataclass(kw_only=True)
class Passes:
    """`runtime.Stages` of one step, through Megatron's own steps."""

    schedule: Schedule
    rank: int
    model: Sequence[Any]
    """The chunks."""
    config: Any
    step: Callable[..., tuple[Tensor, Tensor]]
    """Megatron's ``forward_step``, with the user's function."""
    iterators: Sequence[Any]
    options: Mapping[str, Any]
    """Of all forward steps."""
    begins: Callable[[bool], bool]
    """Whether a first micro-batch is one for Megatron, too."""
    results: list[Any] = field(default_factory=list)
    """What the loss function gave for each micro-batch, on the rank with the last stage."""

    def __post_init__(self) -> None:
        own = [action for action in self.schedule.ranks[self.rank] if action.kind.computes]
        backwards = [action for action in own if action.kind in BACKWARDS]
        self.completing = completing(backwards)
        self.last = {action.chunk: action for action in backwards}
        self.turns = {a: at for at, a in enumerate(a for a in own if a.kind is Kind.FORWARD)}
        self.outstanding = own.index(backwards[0]) if backwards else len(own)
        """Forwards before the first backward."""
        self.device = next(self.model[0].parameters()).device
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.later: dict[tuple[int, int], WeightPart] = {}
        """What first parts of backward passes left."""
        self.gradients = _Gradients(self.config, self.model)
        self.interleaved = self.config.virtual_pipeline_model_parallel_size is not None

    @contextlib.contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Around all passes."""
        self.gradients.hold()
        try:
            for chunk in range(min(2, len(self.model))):
                self._gather_parameters(chunk)
            yield
        finally:
            self.gradients.release()

    def forward(self, action: Action, taken: Tensor | None) -> Tensor:
        chunk, first = action.chunk, action.micro_batch == 0
        if first and 1 < chunk + 1 < len(self.model):
            self._gather_parameters(chunk + 1)
        kept = self.config.num_microbatches_with_partial_activation_checkpoints
        whole = None if kept is None else self.turns[action] % self.outstanding >= kept
        made, tokens = self.step(
            self.iterators[chunk],
            self.model[chunk],
            self.schedule.num_micro_batches,
            taken,
            self.results,
            self.config,
            checkpoint_activations_microbatch=whole,
            is_first_microbatch=self.begins(first),
            current_microbatch=action.micro_batch,
            vp_stage=chunk if self.interleaved else None,
            is_last_stage=self.schedule.stage(self.rank, chunk) == self.schedule.num_stages - 1,
            **self.options,
        )
        self.tokens += tokens
        return made

    def backward(
        self, action: Action, taken: Tensor | None, made: Tensor, grad: Tensor | None
    ) -> Tensor | None:
        from megatron.core.pipeline_parallel import schedules

        with self._completing(action), contextlib.ExitStack() as stack:
            if action.kind is Kind.BACKWARD_INPUT:
                part = stack.enter_context(input_part())
                self.later[action.micro_batch, action.chunk] = part
            of_input: Tensor | None = schedules.backward_step(taken, made, grad, self.config)
        return of_input

    def backward_weight(self, action: Action) -> None:
        with self._completing(action):
            self.later.pop((action.micro_batch, action.chunk)).compute()

    def sent(self, made: Tensor) -> None:
        from megatron.core.pipeline_parallel import schedules

        if not self.schedule.forward_only:
            schedules.deallocate_output_tensor(made, self.config.deallocate_pipeline_outputs)

    @contextlib.contextmanager
    def _completing(self, action: Action) -> Iterator[None]:
        """Gradients that a backward completes are reduced by its hooks, or by a function behind the last."""
        by_hooks = self.config.grad_sync_func is None
        if by_hooks and action in self.completing:
            self.gradients.release()
        yield
        if not by_hooks and action == self.last[action.chunk]:
            self.gradients.release()
            self.gradients.reduce(action.chunk)
        self.gradients.hold()

    def _gather_parameters(self, chunk: int) -> None:
        """As Megatron does in interleaved schedules: two chunks ahead, where it does not at first use."""
        functions = self.config.param_sync_func
        if functions is None or len(self.model) == 1 or self.schedule.forward_only:
            return
        function = functions[chunk] if isinstance(functions, list) else functions
        function(self.model[chunk].parameters())


class _Gradients:
    """Megatron's ``no_sync``, held around everything but what completes gradients."""

    def __init__(self, config: Any, model: Sequence[Any]) -> None:
        self.config, self.model = config, model
        self._held: contextlib.ExitStack | None = None

    def hold(self) -> None:
        if self._held is not None:
            return
        functions = self.config.no_sync_func or []
        self._held = contextlib.ExitStack()
        for function in functions if isinstance(functions, list) else [functions]:
            self._held.enter_context(function())

    def release(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def reduce(self, chunk: int) -> None:
        functions = self.config.grad_sync_func
        function = functions[chunk] if isinstance(functions, list) else functions
        function(self.model[chunk].parameters())
