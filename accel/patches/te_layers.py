"""``--transformer-impl transformer_engine``, Megatron's default, where Transformer Engine is not installed.

Megatron's wrappers of Transformer Engine (``TELinear``, ``TENorm``, ``TEDotProductAttention``, ...) are
Megatron's own code: constructor arguments, process groups, sharded state dicts. Without the package they
derive from mocks. Here the same file of the Megatron at hand is executed once more, with an ``import`` of
its own that finds accel's layers under the names of Transformer Engine, and the resulting classes take the
place of the mocks wherever Megatron bound them or left ``None``. So arguments, attributes and checkpoints
are upstream's in every version, and ``import transformer_engine`` still fails for everybody else.

Weights and their keys are those of Transformer Engine: the norm before a linear layer is
``layer_norm_weight`` of that layer, and every layer has an ``_extra_state``, which is empty, may be missing
in what is loaded, and must not hold FP8 scales. The first weights of a dense model are those of the local
spec with the same seed, unless ``--softmax-type learnable`` draws for each layer, as Transformer Engine does;
weights of either spec load in the other, and so do states of optimizers but those that lie in the order of
the parameters (``spec_checkpoints``).

What Megatron asks the version of Transformer Engine for, and what it is told, module by module: 2.9 where
accel's layers serve what the gate guards (grouped linear layers 1.9, q/k norms 1.9, padding masks and context
parallelism 1.10, fused MLPs 1.13, delayed weight gradients 2.3 and 2.8, the softmax with an offset 2.8, the
largest attention logit 2.9); 2.14 in the grouped experts, whose operations for
``--use-transformer-engine-op-fuser`` are there; 0 where FP8 and FP4 tensors, CUDA graphs, userbuffers or an
optimizer of its own are decided. So Megatron itself refuses split attention (2.10), one parameter for all
experts (2.14) and the dense MLP as a group of one (2.14), which computes in FP8 only.

Context parallelism, for which stock needs Transformer Engine, is ``context_parallel``'s, which see.
For the largest logit scores are computed once more, a slice of queries at a time; those of packed sequences
between all tokens of a pack, of which each sequence's own count, its padding included.

Megatron's BERT script takes these layers whatever ``--transformer-impl`` says, unless ``--spec local`` is
given, and imports their spec before arguments are read: what it imports is filled when the feature is on.

FP8, FP4 and userbuffers are not there yet: asking for one, on the command line or in the config of a layer,
is an error that says so. The feature is idle under ``--transformer-impl local``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from accel import patching
from accel.feature import Context, Feature
from accel.log import log_once
from accel.patches._te_awaited import give_awaited
from accel.patches._te_execution import QUANTIZED, UNQUANTIZED
from accel.patches._te_packs import OF_PACKS
from accel.patches._te_remade import make_again
from accel.patches._te_versions import EXPERTS, EXTENSION, VERSION, flagged
from accel.patching import Patch
from accel.upstream import SUPPORTED_RANGE, flag_of, te_installed, te_serves

_CORE = "megatron.core"
MODELOPT = f"{_CORE}.post_training.modelopt.layers"
_ABSORBED_MLA = f"{_CORE}.transformer.experimental_attention_variant.absorbed_mla"
_MLA = f"{_CORE}.transformer.multi_latent_attention"


CLASSES = (
    "TEActivationOp",
    "TEColumnParallelGroupedLinear",
    "TEColumnParallelLinear",
    "TECudaRNGStatesTracker",
    "TEDelayedScaling",
    "TEDotProductAttention",
    "TEFusedMLP",
    "TEFusedMLPWithGroupedLinear",
    "TEFusedResidualRMSNorm",
    "TEGroupedLinear",
    "TELMHeadColumnParallelLinear",
    "TELayerNormColumnParallelLinear",
    "TELinear",
    "TENorm",
    "TERowParallelGroupedLinear",
    "TERowParallelLinear",
    "_get_extra_te_kwargs",
    "set_save_original_input",
    "split_te_layernorm_column_parallel_linear",
    "te_checkpoint",
)
"""What the extension defines; a Megatron that lacks one is not given it."""

GUARDED = {
    f"{_CORE}.extensions.transformer_engine_spec_provider": (
        "TEActivationOp",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ),
    f"{_CORE}.models.T5.t5_spec": (
        "TEColumnParallelLinear",
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TENorm",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.backends": (
        "TEActivationOp",
        "TEColumnParallelGroupedLinear",
        "TERowParallelGroupedLinear",
    ),
    f"{_CORE}.models.bert.bert_layer_specs": (
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.gpt.gpt_layer_specs": (
        "TEFusedMLP",
        "TEFusedMLPWithGroupedLinear",
        "TENorm",
        "TESpecProvider",
    ),
    f"{_CORE}.models.gpt.heterogeneous.heterogeneous_layer_specs": (
        "TEDotProductAttention",
        "TELayerNormColumnParallelLinear",
        "TELayerNormColumnParallelLinearGathered",
        "TENorm",
        "TERowParallelLinear",
    ),
    f"{_CORE}.models.multimodal.llava_model": ("TEDotProductAttention",),
    MODELOPT: ("_get_extra_te_kwargs",),
    f"{_CORE}.transformer.attention": ("TELinear", "TENorm", "set_save_original_input"),
    _ABSORBED_MLA: (
        "TEColumnParallelLinear",
        "TELinear",
        "set_save_original_input",
    ),
    f"{_CORE}.transformer.moe.moe_layer": ("TELinear", "te_checkpoint"),
    f"{_CORE}.transformer.moe.shared_experts": ("TELinear", "set_save_original_input"),
    _MLA: (
        "TEColumnParallelLinear",
        "TELayerNormColumnParallelLinear",
        "TELinear",
        "set_save_original_input",
        "split_te_layernorm_column_parallel_linear",
    ),
    f"{_CORE}.transformer.multi_token_prediction": ("TESpecProvider",),
}
"""Module -> the names that it leaves ``None`` without Transformer Engine."""

UNGUARDED = (f"{EXTENSION}_spec_provider", f"{_CORE}.models.backends")
"""Those that copied ``None`` from the extension and have no ``HAVE_TE`` of their own."""

UNBOUND = {
    f"{_CORE}.models.gpt.experimental_attention_variant_module_specs": (
        "accel.patches.te_extension:TESpecProvider",
    ),
    f"{_CORE}.tensor_parallel.random": (
        "accel.layers.stand_in:FP8GlobalStateManager",
        "accel.layers.stand_in:activation_recompute_forward",
        "accel.layers.stand_in:fp8_autocast",
    ),
}
"""Module -> what it gets under names that it does not bind at all without Transformer Engine. That of random
numbers reads them whenever a layer recomputes its output."""

_OF_LOGITS = ("qk_clip", "log_max_attention_logit")


def told_while_validating(context: Context) -> AbstractContextManager[object]:
    """Megatron's validation of its arguments asks for versions too, before any feature is on."""
    return contextlib.nullcontext() if _idle(context) else patching.apply([VERSION])


def switch_on() -> Callable[[], None]:
    """What no patch does, since an undo would take late copies of ModelOpt's `Linear` with it."""
    modelopt, *mla = map(_imported, (MODELOPT, _MLA, _ABSORBED_MLA))
    before = [(module, vars(module).get("Linear")) for module in mla if module and modelopt]
    if early := asked_before():
        log_once(
            "te_layers",
            f"{', '.join(early)}: HAVE_TE is False there, and layers are None, since it was imported before "
            "Megatron's arguments were final; import it after that",
        )
    undo, take_back = make_again(), give_awaited()
    for module, _ in before:
        vars(module)["Linear"] = vars(modelopt)["Linear"]

    def off() -> None:
        for module, linear in before:
            vars(module)["Linear"] = linear
        take_back()
        undo()

    return off


def asked_before() -> list[str]:
    """Modules of the program's own that have asked for Transformer Engine's layers as Megatron's do, before
    they were there, and hold none."""
    return [
        name
        for name, module in list(sys.modules.items())
        if type(module) is types.ModuleType  # others may import something when they are asked
        and name.partition(".")[0] not in ("megatron", "accel")
        and vars(module).get("HAVE_TE") is False
        and any(vars(module).get(layer, module) is None for layer in CLASSES)
    ]


def _imported(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # of another Megatron
        return None


def refuse_quantized(args: Any) -> None:
    """Raises ValueError where Megatron's arguments ask for FP8 or FP4."""
    for name in QUANTIZED:
        if getattr(args, name, None):
            raise ValueError(f"--{name}-format {getattr(args, name)}: {UNQUANTIZED}")


def prepare(context: Context) -> list[str]:
    """Changes nothing; a line for what these layers do not look at.

    Raises:
        ValueError: accel's layers cannot do what is asked for; so before anything is built.
    """
    args = context.args
    if te_installed() or getattr(args, "transformer_impl", None) != "transformer_engine":
        return []
    refuse_quantized(args)
    of_logits = [flag_of(name) for name in _OF_LOGITS if getattr(args, name, False)]
    if of_logits and not (getattr(args, "bf16", False) or getattr(args, "fp16", False)):
        raise ValueError(
            f"{' '.join(of_logits)} in fp32: Megatron looks for the layers behind the wrapper of its 16 bit "
            "models, and fails in the first step: give --bf16 or --fp16"
        )
    if getattr(args, "reset_attention_mask", False):
        return [
            "--reset-attention-mask does nothing with --transformer-impl transformer_engine: causal "
            "attention takes no mask there, accel's as Transformer Engine's; with local it does"
        ]
    return []


def _idle(context: Context) -> str | None:
    asked = getattr(context.args, "transformer_impl", "transformer_engine")
    return te_serves(context) or (
        None if asked == "transformer_engine" else f"--transformer-impl {asked}"
    )


_WHY = "Without Transformer Engine upstream's class derives from a mock, or is None."


def _class(module: str, name: str) -> Patch:
    return Patch(
        target=f"{module}:{name}",
        replacement=f"accel.patches.te_extension:{name}",
        why=_WHY,
        optional=True,
    )


_FLAGS = (
    *((module, "HAVE_TE") for module in (EXTENSION, EXPERTS, *GUARDED) if module not in UNGUARDED),
    (f"{_CORE}.models.gpt.experimental_attention_variant_module_specs", "HAVE_TE"),
    (f"{_CORE}.transformer.heterogeneous.linear_replacements", "HAVE_TE"),
)


FEATURE = Feature(
    name="te_layers",
    summary="serve --transformer-impl transformer_engine by accel's layers where it is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    prepare=prepare,
    around_validation=told_while_validating,
    switch_on=switch_on,
    patches=(
        *(_class(EXTENSION, name) for name in CLASSES),
        *(_class(module, name) for module, names in GUARDED.items() for name in names),
        *(
            Patch(
                target=f"{module}:{served.partition(':')[2]}",
                replacement=served,
                how="provide",
                why="Without Transformer Engine the name is not bound, and using it is a NameError.",
                optional=True,
            )
            for module, what in UNBOUND.items()
            for served in what
        ),
        *(flagged(module, flag) for module, flag in _FLAGS),
        *OF_PACKS,
        Patch(
            target=f"{MODELOPT}:te",
            replacement="accel.patches._te_norms:modelopt_te",
            optional=True,
            why="Its norms are those of the package.",
        ),
        Patch(
            target=f"{EXPERTS}:te",
            replacement="accel.patches.te_extension:te",
            why="The operations that grouped experts are made of with the op fuser.",
            optional=True,
        ),
        *(
            Patch(
                target=f"{EXPERTS}:{name}",
                replacement="accel.layers.stand_in:no_fp8",
                why="Grouped experts in FP8 call it when they are made, and it is None.",
            )
            for name in ("Fp8Padding", "Fp8Unpadding")
        ),
        Patch(
            target=f"{EXPERTS}:TEGroupedMLP._is_fused_impl_supported",
            replacement="accel.patches._te_execution:importing_layers",
            how="wrap",
            expects=("self",),
            why="It imports these operations from the package.",
            optional=True,
        ),
        Patch(
            target=f"{_CORE}.models.vision.clip_vit_model:CLIPViTModel.__init__",
            replacement="accel.patches._te_norms:with_te_norm",
            how="wrap",
            why="Upstream's norm without Transformer Engine is torch's, which does not take its arguments.",
        ),
        Patch(
            target=f"{_CORE}.transformer.transformer_block:_get_block_submodules",
            replacement="accel.patches._te_norms:with_final_norm",
            how="wrap",
            why="The final norm of a block that is given one layer spec is Transformer Engine's too.",
        ),
        VERSION,
    ),
)
