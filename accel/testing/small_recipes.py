"""Makes a configuration of Megatron-LM's small: the same kinds of layers, the same flags, seconds on a CPU.

Sizes become small and stay divisible: heads by tensor parallelism, groups of queries and experts by their
ranks, layers by the stages of the pipeline. Paths go, mock data takes their place, `ITERATIONS` are left.
"""

from __future__ import annotations

import math
import re

ITERATIONS = 3
Flags = dict[str, list[str]]
"""Flag -> its words; none for a switch."""

PATHS = """
    --data-path --data-cache-path --vocab-file --merge-file --tokenizer-type --tokenizer-model
    --tiktoken-pattern --tensorboard-dir --wandb-project --wandb-entity --wandb-exp-name --wandb-save-dir
    --save --load --save-interval --save-retain-interval --exit-interval --exit-duration-in-mins
    --profile --profile-step-start --profile-step-end --profile-ranks --use-pytorch-profiler
    --fim-data --fim-rate --fim-spm-rate --mock-data
""".split()
"""What names files and services, and goes with them. `--export-kd-*` stays: without its teacher it is another
training."""
BEGINNINGS = "--finetune --no-load-optim --no-load-rng --seed".split()
"""What says with which weights a training begins: here, with its own."""
CHECKPOINTS = "--async-save --use-persistent-ckpt-worker --use-checkpoint-args".split()
"""What Megatron refuses, or does not read, without a folder for checkpoints."""
_AT_MOST = f"""
    --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 8 --kv-channels 16 --mup-base-hidden-size 64
    --seq-length 64 --max-position-embeddings 64 --micro-batch-size 2 --make-vocab-size-divisible-by 32
    --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16
    --dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 16
    --linear-key-head-dim 16 --linear-value-head-dim 16 --linear-attention-freq 2 --mamba-num-heads 16
    --moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-latent-size 32
    --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2
    --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2
    --num-layers-at-start-in-bf16 1 --num-layers-at-end-in-bf16 1
    --lr-decay-iters {ITERATIONS} --lr-warmup-iters 1 --lr-warmup-samples 0 --eval-iters 1 --log-interval 1
    --check-weight-hash-across-dp-replicas-interval 1 --num-workers 0
""".split()
AT_MOST = dict(zip(_AT_MOST[::2], map(int, _AT_MOST[1::2]), strict=True))
SMALL_MAMBA = {"--mamba-head-dim": ["16"], "--mamba-state-dim": ["16"]}
MOCK_DATA = {"--mock-data": [], "--tokenizer-type": ["NullTokenizer"], "--vocab-size": ["255"]}


def words_of(value: object) -> list[str]:
    """As upstream's `_run_training.sh` splits it: none for a switch, several in brackets, else one."""
    if value is True:
        return []
    text = str(value).strip()
    return text[1:-1].split() if text[:1] == "[" and text[-1:] == "]" else [text]


def shrink(flags: Flags, resumes: bool, most: int) -> tuple[Flags, int]:
    """The same training, small, and its number of ranks."""
    left_out = {*PATHS, *BEGINNINGS, *(() if resumes else CHECKPOINTS)}
    small = {flag: words for flag, words in flags.items() if flag not in left_out}
    for flag, limit in AT_MOST.items():
        if flag in small:
            small[flag] = [str(min(limit, number(small, flag)))]
    size = _shrink_layout(small, most)
    _shrink_heads(small, flags)
    _shrink_experts(small)
    _shrink_layers(small, flags)
    _shrink_batches(small, size)
    if "--window-size" in small:  # shorter than the sequence, or it would be no window
        small["--window-size"] = [f"{number(small, '--seq-length') // 4 - 1},0"]
    if "--async-save" in small:  # upstream's other strategy needs nvidia-resiliency-ext
        small["--async-strategy"] = ["mcore"]
    if "--fp16" in small:  # from the usual first scale, 2**32, every iteration would be skipped
        small.setdefault("--initial-loss-scale", ["4096"])
    return small | MOCK_DATA, size


def number(flags: Flags, flag: str, otherwise: int = 1) -> int:
    return int(flags[flag][0]) if flag in flags else otherwise


def _shrink_layout(small: Flags, most: int) -> int:
    """As many ranks as hold each kind of parallelism, with two replicas where there is room for them."""
    axes = [
        "--pipeline-model-parallel-size",
        "--context-parallel-size",
        "--tensor-model-parallel-size",
    ]
    sizes = {axis: number(small, axis) for axis in axes}
    while math.prod(sizes.values()) > most:
        sizes[next(axis for axis in axes if sizes[axis] > 1)] //= 2
    pipeline, _, tensor = sizes.values()
    inside = min(number(small, "--expert-tensor-parallel-size", tensor), most // pipeline)
    experts = min(number(small, "--expert-model-parallel-size"), most // (inside * pipeline))
    sizes |= {"--expert-model-parallel-size": experts, "--expert-tensor-parallel-size": inside}
    small |= {axis: [str(size)] for axis, size in sizes.items() if axis in small}
    dense = math.prod(sizes[axis] for axis in axes)
    unit = math.lcm(dense, experts * inside * pipeline)
    instances = number(small, "--num-distributed-optimizer-instances")
    fits = [n for n in range(unit, most + 1, unit) if n // dense >= 2 * instances]
    return fits[0] if fits else most // unit * unit


def _shrink_heads(small: Flags, flags: Flags) -> None:
    """As many heads a group of queries as before, and a group for each tensor-parallel rank that had one."""
    if "--num-query-groups" not in small:
        return
    heads, groups = number(flags, "--num-attention-heads"), number(flags, "--num-query-groups")
    tensor = min(number(small, "--tensor-model-parallel-size"), groups)
    fewer = max(1, tensor, number(small, "--num-attention-heads") * groups // heads)
    small["--num-query-groups"] = [str(fewer)]


def _shrink_experts(small: Flags) -> None:
    """Two for each expert-parallel rank, and no fewer than eight."""
    if "--num-experts" in small:
        enough = max(8, 2 * number(small, "--expert-model-parallel-size"))
        small["--num-experts"] = [str(min(enough, number(small, "--num-experts")))]


def _shrink_layers(small: Flags, flags: Flags) -> None:
    """One for each stage of the pipeline, of which a rank has at most two, and two at least."""
    stages = number(small, "--pipeline-model-parallel-size")
    pattern = next(
        (f for f in small if f in ("--hybrid-layer-pattern", "--hybrid-override-pattern")), None
    )
    if pattern:
        small[pattern] = [small_pattern(small[pattern][0], stages)]
        small |= SMALL_MAMBA
        if "--num-layers" in small:
            small["--num-layers"] = [str(len(small[pattern][0].partition("/")[0].replace("|", "")))]
        return
    pipeline, before = stages, number(flags, "--num-layers")
    if "--num-layers-per-virtual-pipeline-stage" in small:
        per_stage = number(flags, "--num-layers-per-virtual-pipeline-stage")
        stages *= min(2, before // number(flags, "--pipeline-model-parallel-size") // per_stage)
    stages *= number(small, "--num-virtual-stages-per-pipeline-rank")
    layers = max(2, stages)
    for end in ("first", "last"):
        layers += max(0, number(small, f"--decoder-{end}-pipeline-num-layers") - 1)
    layers -= sum(
        f"--account-for-{end}-in-pipeline-split" in small for end in ("embedding", "loss")
    )
    if "--pipeline-model-parallel-layout" in small:
        layout = small_stages(small["--pipeline-model-parallel-layout"][0], pipeline)
        small["--pipeline-model-parallel-layout"] = [layout]
        layers = layout.count("t")
    small["--num-layers"] = [str(layers)]
    if (dense := small.get("--moe-layer-freq", [""])[0]).startswith("("):
        small["--moe-layer-freq"] = [
            f"([0]*1+[1]*{layers - 1})" if "[0]" in dense else f"([1]*{layers})"
        ]


def small_pattern(pattern: str, pipeline: int) -> str:
    """Of a hybrid: one layer of each kind that a stage of the pipeline has, in the order of their first."""
    main, *predicted = pattern.split("/")
    stages = ["".join(dict.fromkeys(stage)) for stage in main.split("|")]
    virtual = max(1, len(stages) // pipeline)
    kept = stages if len(stages) == 1 else stages[: pipeline * min(2, virtual)]
    if len(kept) == 1:  # that are divided evenly
        kept = ["".join(kept * pipeline)]
    return "/".join(["|".join(kept), *predicted])


def small_stages(layout: str, pipeline: int) -> str:
    """Of a layout such as `Et*3|(tt|)*6mL`: one decoder layer in a stage, and at most two stages a rank."""
    plain = re.sub(r"\(([^()]*)\)\*(\d+)", lambda found: found[1] * int(found[2]), layout)
    plain = re.sub(r"(\w)\*(\d+)", lambda found: found[1] * int(found[2]), plain)
    first, *middle, last = (re.sub("t+", "t", stage) for stage in plain.split("|"))
    virtual = min(2, (len(middle) + 2) // pipeline)
    return "|".join([first, *middle[: pipeline * virtual - 2], last])


def _shrink_batches(small: Flags, size: int) -> None:
    """As many micro-batches as the pipeline has ranks, or as go through a virtual stage together."""
    kinds = ("tensor-model", "pipeline-model", "context")
    used = math.prod(number(small, f"--{kind}-parallel-size") for kind in kinds)
    pipeline = number(small, "--pipeline-model-parallel-size")
    together = number(small, "--microbatch-group-size-per-virtual-pipeline-stage", max(2, pipeline))
    batch = number(small, "--micro-batch-size") * (size // used) * together
    if "--global-batch-size" in small:
        small["--global-batch-size"] = [str(batch)]
    if "--eval-global-batch-size" in small:
        small["--eval-global-batch-size"] = [str(batch)]
    samples = ITERATIONS * batch
    if "--step-batch-size-schedule" in small:  # one step of each, at so many tokens
        tokens = batch * number(small, "--seq-length")
        small["--step-batch-size-schedule"] = [
            f"0:{batch} {tokens}:{2 * batch} {3 * tokens}:{3 * batch}"
        ]
        samples = 6 * batch
    if "--train-samples" in small:
        small["--train-samples"] = [str(samples)]
        for flag, most in (("--lr-decay-samples", samples), ("--lr-wsd-decay-samples", batch)):
            small |= {flag: [str(most)]} if flag in small else {}
    else:
        small["--train-iters"] = [str(ITERATIONS)]
