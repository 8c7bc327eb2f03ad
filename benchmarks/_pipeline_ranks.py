"""One rank of `bench pipeline`: its stages, under Megatron's functions and under accel's."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import accel.megatron_adaptor
from accel.parallel import split_backward
from accel.parallel.schedule import Schedule, Times, simulate
from accel.parallel.schedule.names import INTERLEAVED, named
from accel.testing.bench import OURS
from benchmarks.lab.limited import limit
from benchmarks.pipeline import (
    BACKWARD,
    BLOCKING,
    FLUSH,
    FORWARD,
    GROUPS,
    PAYLOAD,
    RATE,
    RATIOS,
    STOCK,
    STOCK_GROUPS,
    WARM,
    WEIGHT,
)


@dataclass(frozen=True)
class Side:
    """Options of accel, none for Megatron's own function, and of Megatron's."""

    options: Mapping[str, Any]
    groups: int = 1
    """Micro-batches of a chunk's turn, in pipeline sizes."""
    flush: bool = False
    overlap: bool = True

    def schedule(self, ranks: int, micro_batches: int) -> Schedule:
        name = self.options.get("schedule", INTERLEAVED)
        groups = self.groups * ranks if name == INTERLEAVED else None
        extra = self.options.get("vpp_extra_warmup", 0)
        return named(name, ranks, 2, micro_batches, groups, extra)


SIDES: dict[str, Side] = {
    OURS: Side({"schedule": INTERLEAVED}),
    WARM: Side({"schedule": INTERLEAVED, "vpp_extra_warmup": 1}),
    GROUPS: Side({"schedule": INTERLEAVED}, groups=2),
    STOCK: Side({}),
    FLUSH: Side({}, flush=True),
    STOCK_GROUPS: Side({}, groups=2),
    BLOCKING: Side({}, overlap=False),
    "accel, zb-v": Side({"schedule": "zb-v"}),
    "accel, dualpipev": Side({"schedule": "dualpipev"}),
}
SEQUENCE = 64


class _Sleep(torch.autograd.Function):
    """Takes the time of a pass; what it gives is what it was given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD - WEIGHT)
        part = split_backward.current()
        if part is None:
            time.sleep(WEIGHT)
        else:
            part.put(ctx.weight, lambda: time.sleep(WEIGHT))
        return grads[0].clone(), None


class SleepingChunk(nn.Module):
    """What Megatron's schedules want of a chunk."""

    def __init__(self, config: Any, vp_stage: int) -> None:
        super().__init__()
        from megatron.core.enums import ModelType

        self.config, self.vp_stage = config, vp_stage
        self.model_type = ModelType.encoder_or_decoder
        self.weight = nn.Parameter(torch.zeros(1))
        self.given: Tensor | None = None

    def set_input_tensor(self, given: list[Tensor | None]) -> None:
        (self.given,) = given

    def forward(self) -> Tensor:
        x = self.given
        if x is None:
            x = torch.zeros(SEQUENCE, 1, self.config.hidden_size, requires_grad=True)
        made: Tensor = _Sleep.apply(x, self.weight)
        return made


def sleeping_step(iterator: Any, chunk: SleepingChunk) -> tuple[Tensor, Callable[..., Any]]:
    return chunk(), lambda output: (output.sum(), {"loss": output.detach().sum()})


def config_of(ranks: int, **more: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    given = {
        "num_layers": 2 * ranks,
        "num_attention_heads": 4,
        "pipeline_dtype": torch.float32,
        "pipeline_model_parallel_size": ranks,
        "virtual_pipeline_model_parallel_size": 2,
        "microbatch_group_size_per_vp_stage": ranks,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
        "gradient_accumulation_fusion": False,
        **more,
    }
    return TransformerConfig(**given)


@contextlib.contextmanager
def enabled(options: Mapping[str, Any]) -> Iterator[None]:
    accel.enable(preset="off", **options)
    # the steps that would be measured for the report are the benchmark's own
    from accel.patches._pipeline import WANTED

    WANTED.measurement = None
    try:
        yield
    finally:
        accel.enable(preset="off")


def step(side: str, chunks: list[Any], forward: Callable[..., Any], micro_batches: int) -> float:
    """Seconds of a step's passes, of the slowest rank."""
    from megatron.core.pipeline_parallel import schedules

    config = chunks[0].config
    own = SIDES[side]
    config.overlap_p2p_comm, config.batch_p2p_comm = own.overlap, False
    config.overlap_p2p_comm_warmup_flush = own.flush
    config.microbatch_group_size_per_vp_stage = own.groups * dist.get_world_size()
    with enabled(own.options):
        passes = schedules.get_forward_backward_func()
        assert passes.__module__.startswith("accel") == bool(own.options), passes
        dist.barrier()
        start = time.perf_counter()
        passes(
            forward_step_func=forward,
            data_iterator=[None, None],
            model=chunks,
            num_microbatches=micro_batches,
            seq_length=SEQUENCE if isinstance(chunks[0], SleepingChunk) else chunks[0].length,
            micro_batch_size=1,
        )
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def transfer(hidden: int) -> tuple[float, float]:
    """Latency, and seconds of a message on the link."""
    from megatron.core import parallel_state

    from accel.parallel.schedule.pipeline_link import pipeline_link

    group = parallel_state.get_pipeline_model_parallel_group()
    device, shape = torch.device("cpu"), (SEQUENCE, 1, hidden)
    link = pipeline_link(group, shape, torch.float32, device, sized=False)
    found = torch.tensor(link.round_trips(), dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    latency, whole = found.tolist()
    return latency, whole - latency


def slept() -> tuple[float, float, float]:
    """What the sleeps of forward, backward and weights really take."""
    taken = []
    for seconds in (FORWARD, BACKWARD - WEIGHT, WEIGHT):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            time.sleep(seconds)
            times.append(time.perf_counter() - start)
        taken.append(statistics.median(times))
    forward, of_input, weight = taken
    return forward, of_input + weight, weight


def sleeping_chunks(hidden: int) -> list[SleepingChunk]:
    config = config_of(dist.get_world_size(), hidden_size=hidden)
    return [SleepingChunk(config, stage) for stage in range(2)]


def waits(quick: bool) -> dict[str, Any]:
    ranks = dist.get_world_size()
    micro_batches, rounds = (4, 2) if quick else (4 * ranks, 7 if ranks == 2 else 5)
    tiny = sleeping_chunks(4)
    cases = []
    for ratio in RATIOS[-1:] if quick else RATIOS:
        num_bytes = FORWARD * ratio * RATE * PAYLOAD
        hidden = round(num_bytes / (4 * SEQUENCE) / 4) * 4
        chunks = sleeping_chunks(hidden)
        found: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
        for turn in range(rounds + 1):  # the first connects
            for side in SIDES:
                pair = [step(side, of, sleeping_step, micro_batches) for of in (chunks, tiny)]
                found[side] += [(pair[0], pair[1])] * (turn > 0)
        latency, busy = transfer(hidden)
        passes = slept()
        predicted = {}
        for side in SIDES:
            schedule = SIDES[side].schedule(ranks, micro_batches)
            if SIDES[side].options:
                times = Times(*passes, latency=latency, bytes=busy, bandwidth=1.0)
                predicted[side] = float(simulate(schedule, times).makespan)
        cases.append(
            {
                "ratio": ratio,
                "num_bytes": 4 * SEQUENCE * hidden,
                "transfer": latency + busy,
                "seconds": {side: [whole for whole, _ in pairs] for side, pairs in found.items()},
                "exposed": {side: [a - b for a, b in pairs] for side, pairs in found.items()},
                "predicted": predicted,
            }
        )
    return {"micro_batches": micro_batches, "rounds": rounds, "cases": cases}


def gpt_chunks(layers: int, hidden: int, length: int) -> list[Any]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    rank = parallel_state.get_pipeline_model_parallel_rank()
    last = parallel_state.get_pipeline_model_parallel_world_size() - 1
    config = config_of(
        last + 1,
        num_layers=layers,
        hidden_size=hidden,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    config.num_layers = layers
    chunks = []
    for stage in range(2):
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(),
            vocab_size=512,
            max_sequence_length=length,
            pre_process=rank == 0 and stage == 0,
            post_process=rank == last and stage == 1,
            share_embeddings_and_output_weights=False,
            vp_stage=stage,
        )
        chunk.length = length
        chunks.append(chunk)
    return chunks


def gpt(quick: bool) -> dict[str, Any]:
    layers, hidden, length = (4, 64, 64) if quick else (8, 384, 256)
    micro_batches, rounds = (4, 2) if quick else (8, 5)
    chunks = gpt_chunks(layers, hidden, length)
    draw = torch.Generator().manual_seed(3)
    tokens = torch.randint(512, (1, length + 1), generator=draw)
    positions = torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)

    def forward(iterator: Any, chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
        output = chunk(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
        return output, lambda losses: (losses.mean(), {"lm loss": losses.detach().mean()})

    weights = [weight for chunk in chunks for weight in chunk.parameters()]
    gradients, seconds = {}, {}
    sides = [OURS, WARM, GROUPS, STOCK, FLUSH, STOCK_GROUPS, BLOCKING]
    for side in sides:
        for weight in weights:
            weight.grad = None
        step(side, chunks, forward, micro_batches)
        gradients[side] = [weight.grad for weight in weights]
        seconds[side] = []
    for _ in range(rounds):
        for side in sides:
            for weight in weights:
                weight.grad = None
            seconds[side].append(step(side, chunks, forward, micro_batches))
    differ = torch.tensor(
        [
            sum(int((a != b).sum()) for a, b in zip(gradients[side], gradients[STOCK], strict=True))
            for side in (OURS, WARM, GROUPS)
        ]
        + [sum(weight.numel() for weight in weights)]
    )
    dist.all_reduce(differ)
    return {
        "shape": f"GPT of {layers} layers of {hidden}, sequence {length}, fp32",
        "micro_batches": micro_batches,
        "rounds": rounds,
        "num_bytes": 4 * length * hidden,
        "differ": dict(zip((OURS, WARM, GROUPS), differ.tolist()[:3], strict=True)),
        "elements": int(differ[-1]),
        "seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["waits", "gpt"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float)
    args = parser.parse_args()
    logging.disable(logging.INFO)
    torch.set_num_threads(1)
    accel.enable(preset="off")
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=dist.get_world_size(), virtual_pipeline_model_parallel_size=2
    )
    limited = contextlib.nullcontext() if args.limit is None else limit(args.limit)
    with limited:
        found = {"waits": waits, "gpt": gpt}[args.what](args.quick)
    print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
