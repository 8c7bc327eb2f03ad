"""MindSpeed's command line (Ascend/MindSpeed, what its `features_manager` registers), for scripts that were
written for it: flags that mean one of accel's, flags that are said in other words here, and what to write
instead of the others."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterable, Iterator

from accel.patches._settings import divisors, needs_flags, whole_number

__all__ = ["ALIASES", "INSTEAD", "TRANSLATED", "add_options", "hints", "translate"]

ALIASES = {
    "--use-fused-rmsnorm": "--accel-fused-norm",
    "--use-fused-rotary-pos-emb": "--accel-fused-rope",
    "--use-fused-swiglu": "--accel-fused-activation",
    "--use-fused-moe-token-permute-and-unpermute": "--accel-fused-moe-permute",
    "--gemm-gradient-accumulation-fusion": "--accel-fused-weight-gradient",
    "--reuse-fp32-param": "--accel-shared-weights",
    "--swap-optimizer": "--accel-host-optimizer",
    "--virtual-optimizer": "--accel-host-optimizer",
    "--recompute-activation-function": "--accel-recompute-activation",
    "--recompute-activation-function-num-layers": "--accel-recompute-activation-num-layers",
    "--recompute-norm": "--accel-recompute-norm",
    "--recompute-norm-num-layers": "--accel-recompute-norm-num-layers",
    "--swap-attention": "--accel-swap-attention",
    "--swap-modules": "--accel-swap-attention-modules",
    "--schedules-method": "--accel-schedule",
    "--use-ascend-coc": "--accel-tp-overlap",
    "--use-ascend-mc2": "--accel-tp-overlap",
    "--coc-parallel-num": "--accel-tp-overlap-chunks",
    "--cp-window-size": "--accel-context-parallel-window",
    "--use-cp-send-recv-overlap": "--accel-context-parallel",
    "--context-parallel-cache-interval": "--accel-context-parallel-keep-interval",
    "--moe-tp-extend-ep": "--accel-moe-tp-extend-ep",
    "--moe-alltoall-overlap-comm": "--accel-moe-overlap",
    "--balanced-moe-experts": "--accel-hot-experts",
}
"""MindSpeed's spelling -> accel's, which Megatron's parser takes as one flag."""

TRANSLATED = {
    "--context-parallel-algo": "--cp-comm-type",
    "--ulysses-degree-in-cp": "--hierarchical-context-parallel-sizes",
    "--context-parallel-kv-cache-policy": "--accel-context-parallel-keep",
    "--attention-mask-type": "causal alone: the mask is what the model says",
    "--balanced-moe-hot-expert-num": "--accel-hot-experts N",
}
"""MindSpeed's flag, whose values are other words here -> whose they are."""

_COMM_TYPES = {
    "megatron_cp_algo": "p2p",
    "ulysses_cp_algo": "a2a",
    "kvallgather_cp_algo": "all_gather",
    "hybrid_cp_algo": "a2a+p2p",
}
_KEPT = {"half": "keys", "full": "all"}

NOTHING = "nothing here does that"

_WHAT_SERVES = {
    # tensor parallelism and communication
    "--accel-tp-overlap": "enable-overlap-ag-with-matmul enable-overlap-matmul-with-rs"
    " enable-backward-overlap-ag-with-matmul",
    "leave it out: --accel-tp-overlap chooses its form by shape and link": "coc-mode coc-fused-kernel",
    f"{NOTHING}: --accel-tp-overlap hides what ranks of one dimension send": "tp-2d tp-x tp-y",
    f"{NOTHING}: sizes must be multiples of the ranks": "unaligned-linear",
    "--ddp-pad-buckets-for-high-nccl-busbw": "param-and-grad-buffer-pad",
    "--accel-schedule NAME posts receives ahead and leaves sends free": "optimize-send-recv-comm",
    "HCCL's environment variable HCCL_BUFFSIZE": "hccl-group-buffer hccl-group-buffer-adaptive"
    " hccl-ep-group-buffer-adaptive-factor",
    "--disable-gloo-process-groups": "disable-gloo-group",
    # memory
    "--accel-memory-budget GiB measures the layers and chooses": "enable-recompute-layers-per-pp-rank"
    " recompute-in-bubble recompute-in-advance recompute-module-list smart-swap",
    "--accel-swap-attention, or --fine-grained-activation-offloading": "swap-layer-input",
    "leave it out: --accel-host-optimizer chooses its pieces": "swap-optimizer-times",
    # optimizers
    "leave it out: --accel-fused-adamw is on in preset fast (there is no EMA)": "optimizer-selection",
    "--use-precision-aware-optimizer with --exp-avg-dtype and --exp-avg-sq-dtype": "quant-states",
    "--use-precision-aware-optimizer with --main-grads-dtype": "quant-grads",
    # attention and context parallelism
    "--cp-comm-type all_gather": "use-ulysses-allgather-kv",
    "--window-size": "pre-tockens next-tockens",
    "leave it out: the mask is what the model says": "sparse-mode",
    "leave it out: --accel-fused-attention is on in preset fast": "use-fusion-attn-v2",
    "leave it out: packs have the lengths of their documents": "fix-sub-seq-length",
    "--qk-pos-emb-head-dim": "qk-rope-head-dim",
    "--qk-head-dim": "qk-nope-head-dim",
    # mixtures of experts
    "--overlap-moe-expert-parallel-comm, with --delay-wgrad-compute": "moe-fb-overlap",
    "--accel-moe-overlap with --moe-token-dispatcher-type alltoall": "moe-allgather-overlap-comm"
    " moe-alltoall-mc2",
    "--recompute-granularity selective --recompute-modules moe_act, or moe for more": "moe-zero-memory"
    " moe-zero-memory-num-layers",
    "leave it out: --accel-hot-experts plans what travels": "trans-hot-expert-group-num",
    "--moe-shared-expert-intermediate-size, the width of all shared experts": "n-shared-experts",
    "--moe-router-force-load-balancing": "fix-router",
    "--accel-expert-migration N, every N iterations": "enable-expert-placement expert-placement-freq"
    " enable-fine-grained-expert-placement",
    "--accel-expert-migration-threshold": "fine-grained-expert-placement-thre",
    "--accel-moe-load-report N": "print-expert-load",
    # pipelines and sharding
    "leave it out: --accel-schedule dualpipev puts weights' gradients off": "dualpipev-dw-detach",
    "--pipeline-model-parallel-layout": "noop-layers pipeline-num-transformer-layers",
    "--use-megatron-fsdp": "use-custom-fsdp",
    # tools
    "--deterministic-mode": "npu-deterministic",
    "--log-throughput": "op-cal-tflops",
    "--profile --use-pytorch-profiler, which writes to --tensorboard-dir": "profile-level profile-with-cpu"
    " profile-with-memory profile-save-path",
    "--profile --use-pytorch-profiler --pytorch-profiler-collect-shapes": "profile-record-shapes",
    "--profile --use-pytorch-profiler --pytorch-profiler-collect-callstack": "profile-with-stack",
    "--tokenizer-model": "tokenizer-name-or-path",
    "--tokenizer-hf-no-use-fast": "tokenizer-not-use-fast",
    "leave it out: --accel-preset says how much is on": "optimization-level",
    f"{NOTHING}: python -m accel schedule compares schedules of a pipeline": "auto-settings"
    " auto-settings-type auto-settings-ranks auto-settings-work-dir auto-settings-log-level target-nnodes"
    " prof-file automated-pipeline automated-pipeline-perf",
    f"{NOTHING}: --non-persistent-save-interval N saves often and cheaply": "ttp-enabled"
    " ttp-server-ip ttp-server-port"
    " ttp-dump-dir ttp-max-dump-ckpt-to-keep ttp-save-optimizer ttp-save-rng ttp-dump-timeout-seconds"
    " ttp-wait-dump-file-timeout ttp-heartbeat-interval-ms ttp-heartbeat-timeout-ms ttp-max-missed-count",
    "leave it out": "hccl-slice-size megatron-cp-in-bnsd use-fused-ring-attention-update use-dsa-absorb"
    " use-fused-lightning-indexer use-fused-sparse-flash-attention use-fused-lightning-indexer-kl-loss"
    " moe-permutation-async-comm no-qad-enable ai-framework jit-compile",
    NOTHING: "reset-bucket-group-order async-log-allreduce hccl-op-mode aiqos aiqos-mode aiqos-schedule"
    " aiqos-enable-roce compress-dense compress-activation compress-optimizer ema-decay attention-mask-on-cpu"
    " adaptive-cp-without-coarse adaptive-cp-dynamic-attn-mask adaptive-cp-only-reschedule"
    " adaptive-cp-manually-set-mask-list square-alibi-mask fill-neg-inf alibi-fusion-attn-type"
    " alibi-diagonal-opposite moe-unperm2-mem-optim-swap use-multiparameter-pipeline-model-parallel"
    " variable-seq-lengths fsdp2-config-path layerzero layerzero-config no-use-gmm-fp8 te-comparison-with-cpu"
    " te-comparison-with-bf16 te-gmm-mode fp8-reuse-quantized-weight qat-scheme qat-quant-block-size"
    " qad-enable qad-teacher-load kl-temperature kl-loss-weight kl-loss-reduction npu-datadump dist-train",
}
INSTEAD = {f"--{name}": text for text, names in _WHAT_SERVES.items() for name in names.split()}
"""MindSpeed's flag, which neither Megatron nor accel has -> what to write, or that there is nothing."""


def hints(words: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """A line for each of MindSpeed's flags in a command line whose parser has no such flag.

    Args:
        words: the command line.
        known: the parser's flags.
    """
    flags = dict.fromkeys(word.partition("=")[0] for word in words)
    for flag in flags:
        if flag in INSTEAD and flag not in known:
            yield f"{flag} is MindSpeed's: {INSTEAD[flag]}"


def add_options(group: argparse._ArgumentGroup) -> None:
    """Those of `TRANSLATED`, for `translate` to take from what was parsed."""
    for flag, here in TRANSLATED.items():
        text = f"MindSpeed's; here {here}"
        group.add_argument(flag, dest=flag, metavar="WORD", default=argparse.SUPPRESS, help=text)


def translate(args: argparse.Namespace) -> list[str]:
    """Say what `TRANSLATED` were given in Megatron's flags and accel's; a line for Megatron's.

    Raises:
        ValueError: a word that means nothing here, one without another that it needs, or a yaml file in place
            of Megatron's flags.
    """
    given = {flag: vars(args).pop(flag, None) for flag in TRANSLATED}
    if (mask := given["--attention-mask-type"]) not in (None, "causal"):
        raise ValueError(
            f"--attention-mask-type {mask}: a split sequence has the mask of the model's layers, causal in a "
            "GPT; use causal"
        )
    if (kept := given["--context-parallel-kv-cache-policy"]) is not None:
        args.accel_context_parallel_keep = _KEPT.get(kept, kept)
    if (number := given["--balanced-moe-hot-expert-num"]) is not None:
        if not args.accel_hot_experts:
            raise ValueError(
                f"--balanced-moe-hot-expert-num {number} does nothing without --balanced-moe-experts"
            )
        args.accel_hot_experts = number
    return _share_sequences(args, given["--context-parallel-algo"], given["--ulysses-degree-in-cp"])


def _share_sequences(
    args: argparse.Namespace, algorithm: str | None, degree: str | None
) -> list[str]:
    if (algorithm == "hybrid_cp_algo") != (degree is not None):
        raise ValueError(
            "--ulysses-degree-in-cp and --context-parallel-algo hybrid_cp_algo need each other"
        )
    if algorithm is None:
        return []
    if algorithm not in _COMM_TYPES:
        raise ValueError(
            f"--context-parallel-algo {algorithm}: use {', '.join(_COMM_TYPES)}, or Megatron's --cp-comm-type"
        )
    comm_type = _COMM_TYPES[algorithm]
    needs_flags(args, "--context-parallel-algo", f"set cp_comm_type: {comm_type} there")
    args.cp_comm_type = [comm_type]
    line = f"--context-parallel-algo: --cp-comm-type {comm_type}"
    if degree is not None:
        inner, across = args.hierarchical_context_parallel_sizes = _sizes(args, degree)
        line += f" --hierarchical-context-parallel-sizes {inner} {across}"
    return [line]


def _sizes(args: argparse.Namespace, degree: str) -> list[int]:
    """How many ranks exchange heads, and how many groups of them there are."""
    ranks = args.context_parallel_size
    try:
        inner = whole_number(degree, "ranks")
    except ValueError as error:
        raise ValueError(f"--ulysses-degree-in-cp: {error}") from None
    if ranks % inner:
        raise ValueError(
            f"--ulysses-degree-in-cp {inner} does not divide --context-parallel-size {ranks}: use one of "
            f"{divisors(ranks)}"
        )
    return [inner, ranks // inner]
