"""What attention saves for its backward pass waits in host memory while later layers run.

``--accel-swap-attention`` (MindSpeed's ``--swap-attention``): the tensors that autograd saves in a layer's
norm before attention, in attention, and in the norm before the MLP are copied to pinned host memory, and let
go on the device one layer later; the backward pass of a layer fetches those of the layer before it.
``--accel-swap-attention-modules`` names which of the three (``input_norm``, ``self_attention``,
``post_attention_norm``; MindSpeed's ``--swap-modules``).

Only what hides is swapped: in the third micro-batch the kernels of each layer are timed, the link to the host
is measured, and a layer is swapped if its copies end before the kernels come to wait for them
(``accel/memory/swap_plan.py``). Before that, and with ``--accel-swap-attention all`` for good, every layer is
but the last, whose backward pass comes first. What was chosen is told in one line.

Gradients are those of stock, bit for bit, with pipelines, virtual stages, any order of micro-batches, and
recomputation: what is recomputed is not swapped. Parameters, tensors under 1 MiB and small parts of larger
ones stay. On an H200 (Llama 3 8B, 4 layers, vocabulary 32,000, 65,536 tokens a step) a step took 1.005 times
that of preset fast, with the same losses, digit for digit, and the same peak of memory: little hid behind
that machine's bus.
On the CPU device runtime the host is the device, so nothing hides: ``all`` does there what it does elsewhere,
and what is swapped does not count as the device's.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from accel.feature import Context, Feature, Setting
from accel.log import log_once
from accel.memory.host_split import measure_copies
from accel.memory.swap import MIN_BYTES, Chain, Swap
from accel.memory.swap_plan import History
from accel.patches._layers import HYBRID_STACKS, TRANSFORMER_LAYER
from accel.patches._linear import LINEAR
from accel.patching import Patch, around
from accel.slot import Slot
from accel.start_up import say
from accel.upstream import SUPPORTED_RANGE, te_layers_asked

_HERE = "accel.patches.swap_attention"
_log = logging.getLogger("accel")

MODULES = {
    "input_norm": "input_layernorm",
    "self_attention": "self_attention",
    "post_attention_norm": "pre_mlp_layernorm",
}
"""MindSpeed's name -> the attribute of Megatron's layer."""


class Swapping:
    """The chains of every block, and the one that is being run."""

    def __init__(self, modules: Sequence[str]) -> None:
        self.modules = modules
        self._swaps: dict[torch.device, Swap] = {}
        self.chains: list[Chain] = []
        """Of the blocks whose forward pass is running, the innermost last."""
        self.groups: list[AbstractContextManager[None]] = []
        """Of the modules whose forward pass is running."""

    def swap(self, device: torch.device) -> Swap:
        if device not in self._swaps:
            self._swaps[device] = Swap(device, min_bytes=MIN_BYTES)
        return self._swaps[device]

    def running(self, block: torch.nn.Module) -> AbstractContextManager[None]:
        """Around a forward pass of a block that records gradients."""
        raise NotImplementedError

    @contextmanager
    def inside(self, chain: Chain) -> Iterator[None]:
        self.chains.append(chain)
        try:
            yield
        finally:
            self.chains.pop()


class WhatHides(Swapping):
    """Or everything, with `everything`."""

    def __init__(self, everything: bool, modules: Sequence[str]) -> None:
        super().__init__(modules)
        self.everything = everything
        self._histories: weakref.WeakKeyDictionary[Any, History] = weakref.WeakKeyDictionary()

    @contextmanager
    def running(self, block: torch.nn.Module) -> Iterator[None]:
        history = self._history(block)
        if history is None:
            yield
            return
        chain = history.chain()
        try:
            with self.inside(chain):
                yield
        except BaseException:
            chain.close()  # with a part of the layers: nothing to plan by
            raise
        if history.close(chain):
            _tell(history)

    def _history(self, block: torch.nn.Module) -> History | None:
        """None without parameters: there is no layer."""
        if block not in self._histories:
            first = next(block.parameters(), None)
            if first is None:
                return None
            swap = self.swap(first.device)
            rate = None if self.everything else functools.partial(rate_of, swap)
            self._histories[block] = History(swap, len(self.modules), rate)
        return self._histories[block]


ON = Slot[Swapping]()
"""Filled while this feature is on, or ``memory_budget``."""


def rate_of(swap: Swap) -> float:
    """Bytes per second of the link, the slower way; none that is free where the host is the device."""
    return 0.0 if swap.lanes.shares_host_memory else min(measure_copies(swap.device))


@around
def swapping(forward: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """``TransformerBlock.forward``, or that of a hybrid model's stack, of which each call is a chain."""
    if not torch.is_grad_enabled():
        return forward(self, *args, **kwargs)
    with ON.value.running(self):
        return forward(self, *args, **kwargs)


def _tell(history: History) -> None:
    assert history.plan is not None
    if not any(history.plan):
        _log.warning("swap_attention: no copy hides behind the kernels here; nothing is swapped")
        return
    swapped = sum(n for n, chosen in zip(history.sizes, history.plan, strict=True) if chosen)
    say(
        f"swap_attention: {sum(history.plan)} of {len(history.plan)} modules are swapped, "
        f"{swapped / 2**20:.1f} of {sum(history.sizes) / 2**20:.1f} MiB of a micro-batch"
    )


@around
def choosing(init: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """``TransformerLayer.__init__``: the chosen modules are groups of the chain that runs them."""
    init(self, *args, **kwargs)
    if getattr(self.config, "overlap_moe_expert_parallel_comm", False):
        log_once(
            "swap_attention",
            "nothing is swapped with overlap_moe_expert_parallel_comm: layers run in pieces there",
        )
    if _all_recomputed(self.config):
        log_once(
            "swap_attention or memory_budget",
            "nothing is swapped in layers that are computed again as a whole "
            "(recompute_granularity='full' in the configuration)",
        )
    if reason := _graphs(self.config, "cuda_graph_impl="):
        raise ValueError(f"swap_attention: {reason}")
    for module in modules_of(self, ON.value.modules):
        module.register_forward_pre_hook(_enter)
        module.register_forward_hook(_leave, always_call=True)


def _all_recomputed(given: Any) -> bool:
    """By arguments or a configuration."""
    whole = getattr(given, "recompute_granularity", None) == "full"
    return whole and getattr(given, "recompute_method", None) != "block"


def modules_of(layer: Any, names: Sequence[str] = tuple(MODULES)) -> list[torch.nn.Module]:
    """Those of a ``TransformerLayer``; a ``MambaLayer`` has none."""
    return [getattr(layer, MODULES[name]) for name in names if hasattr(layer, MODULES[name])]


def _enter(module: torch.nn.Module, args: Any) -> None:
    if not ON:
        return
    chains = ON.value.chains
    group = chains[-1].group(module.parameters()) if chains else nullcontext()
    group.__enter__()
    ON.value.groups.append(group)


def _leave(module: torch.nn.Module, args: Any, output: Any) -> None:
    if ON:
        ON.value.groups.pop().__exit__(None, None, None)


def parse_extent(given: Any) -> bool:
    """Whether all is swapped."""
    words = given if isinstance(given, list | tuple) else [given]
    if list(words) not in ([], ["all"]):
        raise ValueError(f"{given!r}: give `all`, or nothing, for what hides")
    return "all" in words


def parse_modules(given: Any) -> tuple[str, ...]:
    """Names, separated by commas or spaces."""
    words = given if isinstance(given, list | tuple) else [given]
    names = [name for word in words for name in str(word).replace(",", " ").split()]
    for name in names:
        if name not in MODULES:
            raise ValueError(f"{name!r} is none of {', '.join(MODULES)}")
    if not names:
        raise ValueError(f"no module: give some of {', '.join(MODULES)}")
    return tuple(name for name in MODULES if name in names)


def switch_on(value: bool, modules: Sequence[str]) -> Callable[[], None]:
    return ON.set(WhatHides(value, modules))


LAYER_INIT = Patch(
    target=f"{TRANSFORMER_LAYER}.__init__",
    replacement=f"{_HERE}:choosing",
    how="wrap",
    why="The modules whose saved tensors are swapped are known when a layer is built.",
)
_BLOCK = "megatron.core.transformer.transformer_block:TransformerBlock"

BLOCK_FORWARD = tuple(
    Patch(
        target=f"{block}.forward",
        replacement=f"{_HERE}:swapping",
        how="wrap",
        why="One forward pass through a block is what its backward pass will go through.",
        optional=block != _BLOCK,
    )
    for block in (_BLOCK, *HYBRID_STACKS)
)


def refuses_graphs(context: Context) -> str | None:
    return _graphs(context.args, "--cuda-graph-impl ")


def _refuses(context: Context) -> str | None:
    return refuses_graphs(context) or _loses_gradients(context.args)


def _loses_gradients(args: Any) -> str | None:
    """Transformer Engine's layers look for ``main_grad`` on the weight that they have saved, and under any
    hook of saved tensors get another object, so that data parallelism's hooks miss its gradient."""
    if not (te_layers_asked(args) and getattr(args, "overlap_grad_reduce", False)):
        return None
    return (
        "not in Transformer Engine's layers with --overlap-grad-reduce, which lose the gradients of their "
        "weights: leave one out, or take --transformer-impl local"
    )


def _graphs(given: Any, option: str) -> str | None:
    """A graph has the copies of its capture, and cannot wait for what comes and goes outside of it.

    Args:
        given: arguments or a configuration, in which the option is called `option`.
    """
    impl = getattr(given, "cuda_graph_impl", None) or "none"
    scopes = {
        getattr(each, "name", each) for each in getattr(given, "cuda_graph_scope", None) or ()
    }
    if impl == "none" or scopes == {"full_iteration_inference"}:
        return None
    return f"not with {option}{impl}: use none"


def _idle(context: Context) -> str | None:
    if _all_recomputed(context.args):
        return "--recompute-granularity full: layers that are computed again save nothing to swap"
    return None


FEATURE = Feature(
    name="swap_attention",
    summary="keep what attention saves for its backward pass in host memory, as far as the copies hide",
    preset=None,
    numerics="bit-identical",
    megatron=SUPPORTED_RANGE,
    benchmarks=("activation_memory",),
    conflicts={
        "overlap_moe_expert_parallel_comm": "layers run in pieces of Megatron's there",
        "fine_grained_activation_offloading": "both move what attention saves",
        "cpu_offloading_num_layers": "both move what attention saves",
    },
    refuses=_refuses,
    idle=_idle,
    settings=(
        Setting(
            name="",
            metavar="all",
            summary="all: whether or not the copies hide",
            parse=parse_extent,
            default=False,
            many=True,
        ),
        Setting(
            name="modules",
            metavar="MODULE,...",
            summary=f"of {', '.join(MODULES)} (default: all three)",
            parse=parse_modules,
            default=tuple(MODULES),
        ),
    ),
    switch_on=switch_on,
    patches=(LAYER_INIT, *BLOCK_FORWARD, LINEAR),
)
