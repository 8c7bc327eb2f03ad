"""Mamba-2 layers of hybrid models (``M`` in ``--hybrid-layer-pattern``) where ``mamba-ssm`` is not installed.

Megatron's `MambaMixer` is built on that package's Triton kernels, which need a GPU, and refuses to be made
without. Here the convolution, the scan and the gated norm are accel's (`accel.ops.split_conv1d_scan`,
`accel.layers.norm.GatedRMSNorm`), made of PyTorch's own operators alone; parameters, their keys and
checkpoints are upstream's. As in upstream's kernel a layer's input is kept and the convolution computed
again in the backward. Products and states are fp32.

Training, packed sequences, context parallelism, and generation with a static context work, the latter also
where Triton has no device. Generation with dynamic batches needs the packages, and says so.

Idle where `mamba-ssm` is installed, and for models without such layers. Run on CPUs
so far, on no GPU or NPU yet.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accel.feature import Context, Feature
from accel.layers.norm import GatedRMSNorm
from accel.ops import split_conv1d_scan, state_space_scan
from accel.ops.causal_conv1d import causal_conv1d_step
from accel.ops.state_space_scan import state_space_step
from accel.patching import Patch, around
from accel.upstream import SUPPORTED_RANGE

HAVE_MAMBA_SSM = True

_MIXER = "megatron.core.ssm.mamba_mixer"
_OPS = "megatron.core.ssm.ops"
_SILU = ("silu", "swish", True)


class ExtendedRMSNorm(GatedRMSNorm):
    """State dict: `weight [K]`, cut over the tensor-parallel ranks."""

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import (
            ensure_metadata_has_dp_cp_group,
            make_sharded_tensors_for_checkpoint,
        )

        if not hasattr(self, "tp_group"):
            self.tp_group = parallel_state.get_tensor_model_parallel_group()
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    activation: str = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Any:
    """`mamba_ssm`'s, without its own norm and projection; `chunk_size` concerns its kernel only."""
    if rmsnorm_weight is not None or outproj_weight is not None:
        raise ValueError(
            "rmsnorm_weight and outproj_weight need mamba-ssm: apply norm and projection to the result"
        )
    columns = D.shape[1] if D.ndim == 2 else headdim
    if columns is None:
        raise ValueError("headdim must be given where D has one value per head")
    y, state = split_conv1d_scan(
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        groups=ngroups,
        columns=columns,
        silu=_is_silu(activation),
        segments=seq_idx,
        initial_state=initial_states,
        dt_limit=dt_limit,
    )
    return (y, state) if return_final_states else y


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
) -> Any:
    """`mamba_ssm`'s."""
    steps = _steps(dt, dt_bias, dt_softplus).clamp(*dt_limit)
    y, state = state_space_scan(
        x, steps, A, B, C, D, z, segments=seq_idx, initial_state=initial_states
    )
    return (y, state) if return_final_states else y


def _steps(dt: Tensor, dt_bias: Tensor | None, softplus: bool) -> Tensor:
    steps = dt.float() if dt_bias is None else dt.float() + dt_bias
    return torch.nn.functional.softplus(steps) if softplus else steps


def _is_silu(activation: Any) -> bool:
    if activation not in (*_SILU, None, False):
        raise ValueError(f"activation {activation!r}: use silu, swish or None")
    return activation in _SILU


@around
def conv1d_step(
    original: Callable[..., Tensor],
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: Any,
    conv_state_indices: Tensor | None,
    intermediate_conv_states: Tensor | None = None,
) -> Tensor:
    """Without slots, x may be [1, B, C], a token of each sequence: what static contexts hand over."""
    rows = x if x.ndim == 3 else x.unsqueeze(1)
    rows = _sequences_first(rows, conv_state, conv_state_indices)
    if x.device.type == "cuda":  # is_cuda is true of an NPU's too
        y = original(
            rows,
            conv_state,
            weight,
            bias,
            silu_activation,
            conv_state_indices,
            intermediate_conv_states,
        )
        return y.reshape(x.shape)
    y = causal_conv1d_step(
        rows,
        conv_state,
        weight,
        bias,
        silu=_is_silu(silu_activation),
        slots=conv_state_indices,
        states_after=intermediate_conv_states,
    )
    return y.view(x.shape)


def _sequences_first(x: Any, state: Tensor, slots: Tensor | None) -> Any:
    """[B, S, ...] of [1, B, ...] where each row of the state is a sequence; upstream's kernels would take the
    tokens of all for those of the first. None is None."""
    if slots is None and x is not None and x.shape[:2] == (1, state.shape[0]):
        return x.transpose(0, 1)
    return x


def _nowhere(x: Tensor, state: Tensor) -> Tensor:
    """One element for the states after each token; upstream's kernel, without a place for them, writes them
    over the first of `x`, which it reads at the same time."""
    return state.new_empty(1).expand(*x.shape[:2], *state.shape[1:])


@around
def state_step(
    original: Callable[..., Tensor],
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    intermediate_ssm_states: Tensor | None = None,
) -> Tensor:
    """As Mamba-2 calls it: dt, its bias and A are the same in all columns of a head. Without slots, x may
    be [1, B, heads, columns]."""
    if x.device.type == "cuda":  # is_cuda is true of an NPU's too
        given: tuple[Any, ...] = (x, dt, B, C, z)
        if x.ndim == 4:
            given = tuple(_sequences_first(t, state, state_batch_indices) for t in given)
        x_, dt, B, C, z = given
        if intermediate_ssm_states is None and x_.ndim == state.ndim == 4:
            intermediate_ssm_states = _nowhere(x_, state)
        y = original(
            state,
            x_,
            dt,
            A,
            B,
            C,
            D,
            z,
            dt_bias,
            dt_softplus,
            state_batch_indices,
            intermediate_ssm_states,
        )
        return y.reshape(x.shape)
    if state.ndim != 4 or x.ndim != 4:
        raise ValueError(
            "selective_state_update without Triton takes x [B, S, heads, columns] and state [slots, "
            f"heads, columns, N], got {list(x.shape)} and {list(state.shape)}"
        )
    bias = None if dt_bias is None else dt_bias[:, 0]
    tokens = (x, _steps(dt[..., 0], bias, dt_softplus), B, C)
    x_, steps, b, c = (_sequences_first(t, state, state_batch_indices) for t in tokens)
    y = state_space_step(
        x_,
        steps,
        A[:, 0, 0],
        b,
        c,
        state,
        D,
        None if z is None else z.view(x_.shape),
        slots=state_batch_indices,
        states_after=intermediate_ssm_states,
    )
    return y.view(x.shape)


@around
def packing_support(
    original: Callable[..., Any], for_inference_not_training: bool = True
) -> tuple[bool, str | None]:
    if not for_inference_not_training:
        return True, None
    try:
        return original(for_inference_not_training)
    except ModuleNotFoundError as missing:
        return (
            False,
            f"generation with dynamic batches needs {missing.name}, which is not installed",
        )


def prepare(context: Context) -> list[str]:
    """Changes nothing.

    Raises:
        ValueError: another dtype of the states between chunks is asked for.
    """
    asked = getattr(context.args, "mamba_training_ssm_states_dtype", None)
    if asked is not None and _idle(context) is None:
        raise ValueError(
            f"--mamba-training-ssm-states-dtype {asked}: without mamba-ssm states are fp32; leave it out"
        )
    return []


def _idle(context: Context) -> str | None:
    if importlib.util.find_spec("mamba_ssm") is not None:
        return "mamba-ssm is installed"
    if context.args is None or _has_mamba_layers(context.args):
        return None
    return "no Mamba layers"


def _has_mamba_layers(args: Any) -> bool:
    """By the pattern of layers, under either of its names, or the spec that is asked for."""
    patterns = (getattr(args, f"hybrid_{name}_pattern", None) for name in ("layer", "override"))
    spec = " ".join(getattr(args, "spec", None) or ())
    return any("M" in (p or "") for p in patterns) or "mamba" in spec or "hybrid" in spec


_WHY = "Without mamba-ssm upstream's name is None or a mock."


def _ours(name: str) -> Patch:
    return Patch(target=f"{_MIXER}:{name}", replacement=f"accel.patches.mamba:{name}", why=_WHY)


FEATURE = Feature(
    name="mamba",
    summary="run the Mamba layers of hybrid models where mamba-ssm is not installed",
    preset="off",
    numerics="tolerance",
    megatron=SUPPORTED_RANGE,
    idle=_idle,
    prepare=prepare,
    benchmarks=("state_space_scan",),
    patches=(
        _ours("HAVE_MAMBA_SSM"),
        _ours("ExtendedRMSNorm"),
        _ours("mamba_chunk_scan_combined"),
        _ours("mamba_split_conv1d_scan_combined"),
        Patch(
            target=f"{_MIXER}:_check_mamba_sequence_packing_support",
            replacement="accel.patches.mamba:packing_support",
            how="wrap",
            why="It asks for versions of packages that pack sequences; accel's ops do.",
        ),
        Patch(
            target=f"{_OPS}.causal_conv1d_triton:causal_conv1d_update",
            replacement="accel.patches.mamba:conv1d_step",
            how="wrap",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
        Patch(
            target=f"{_OPS}.mamba_ssm:selective_state_update",
            replacement="accel.patches.mamba:state_step",
            how="wrap",
            why="Upstream's kernel is Triton's, which needs a GPU.",
        ),
    ),
)
