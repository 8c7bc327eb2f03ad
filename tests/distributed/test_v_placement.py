"""A model whose chunks lie in a V: what each holds and is fed, and its checkpoints in other placements."""

from __future__ import annotations

import contextlib
import re
import sys
import zlib
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel import patching
from accel.parallel.schedule import results
from accel.patches import _v_placement
from accel.patching import AUDIENCE
from accel.session import SESSION
from accel.testing.distributed import under_torchrun

from .training import MODEL, _forget_megatron, shared_folder

if under_torchrun():  # a rank, and not the process that collects all tests
    SESSION.attach()

FreshStore = Callable[[], None]
V = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"
WHOLE = "--pipeline-model-parallel-size 1"


@contextlib.contextmanager
def megatron(flags: str, fresh_store: FreshStore, v: bool = False) -> Iterator[None]:
    """Megatron's state after its start, with these flags; `v`: in a V."""
    from megatron.training import arguments, initialize

    fresh_store()
    argv, sys.argv = sys.argv, ["test", *MODEL, "--train-iters", "1", *flags.split()]
    with contextlib.ExitStack() as undo:
        undo.callback(_forget_megatron)
        undo.callback(setattr, sys, "argv", argv)
        if hasattr(arguments, "parse_and_validate_args"):  # in 0.17 the next line does it
            arguments.parse_and_validate_args()
        initialize.initialize_megatron()
        undo.enter_context(patching.apply(_v_placement.PATCHES, scope=AUDIENCE))
        if v:
            from megatron.training import get_args

            assert _v_placement.refusal(get_args()) is None
            undo.callback(_v_placement.switch_on())
        yield


def build(groups_given: bool = True, ddp: bool = False) -> list[Any]:
    """The chunks of this rank."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args
    from megatron.training.training import get_model

    args = get_args()

    def provide(
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        return GPTModel(
            core_transformer_config_from_args(args),
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            pg_collection=pg_collection if groups_given else None,
            vp_stage=vp_stage,
        )

    chunks: list[Any] = get_model(provide, wrap_with_ddp=ddp)
    return chunks


def held(chunk: Any) -> dict[str, Any]:
    """The numbers of its layers, and which ends of the model it has."""
    found: dict[str, Any] = {"layers": [layer.layer_number for layer in chunk.decoder.layers]}
    found["embedding"] = hasattr(chunk, "embedding")
    found["norm"] = chunk.decoder.final_layernorm is not None
    found["output"] = hasattr(chunk, "output_layer")
    return {name: value for name, value in found.items() if value or name == "layers"}


def named_weights(chunks: list[Any]) -> Iterator[tuple[str, Any]]:
    """The parameters by their names in the whole model."""
    for wrapped in chunks:
        chunk = getattr(wrapped, "module", wrapped)
        numbers = [layer.layer_number for layer in chunk.decoder.layers]
        for name, weight in chunk.named_parameters():
            at = re.match(r"decoder\.layers\.(\d+)\.", name)
            if at:
                name = f"decoder.layer {numbers[int(at[1])]}.{name[at.end() :]}"
            yield name, weight


def whole(chunks: list[Any]) -> dict[str, torch.Tensor]:
    """The weights of all ranks."""
    here = {name: weight.detach().clone() for name, weight in named_weights(chunks)}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, here)
    return {name: weight for part in parts for name, weight in part.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def save(folder: Path, chunks: list[Any], optimizer: Any = None) -> None:
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    get_args().save = str(folder)
    save_checkpoint(1, chunks, optimizer, None, 0)


def load(folder: Path, chunks: list[Any], optimizer: Any = None) -> None:
    from megatron.training import get_args
    from megatron.training.checkpointing import load_checkpoint

    get_args().load = str(folder)
    load_checkpoint(chunks, optimizer, None)


CASES: dict[str, tuple[str, list[list[int]]]] = {
    "even": (V, [[1], [2], [3], [4]]),
    "layout": (
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|tt|t|tL",
        [[], [1, 2], [3], [4]],
    ),
    "ends_count_as_layers": (
        f"{V} --num-layers 6 --account-for-embedding-in-pipeline-split"
        " --account-for-loss-in-pipeline-split",
        [[1], [2, 3], [4, 5], [6]],
    ),
}


def stages(layers: list[list[int]]) -> list[dict[str, Any]]:
    """What `held` finds in each."""
    found: list[dict[str, Any]] = [{"layers": numbers} for numbers in layers]
    found[0]["embedding"] = True
    found[-1] |= {"norm": True, "output": True}
    return found


@pytest.mark.parametrize("groups_given", [True, False], ids=["groups_given", "groups_found"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.distributed(world_size=2)
def test_each_chunk_is_its_stage(case: str, groups_given: bool, fresh_store: FreshStore) -> None:
    flags, layers = CASES[case]
    expected = stages(layers)
    with megatron(flags, fresh_store, v=True):
        rank = dist.get_rank()
        assert [held(chunk) for chunk in build(groups_given)] == [
            expected[rank],
            expected[3 - rank],
        ]
    with megatron(flags, fresh_store):
        rank = dist.get_rank()
        assert [held(chunk) for chunk in build(groups_given)] == [
            expected[rank],
            expected[2 + rank],
        ]


@pytest.mark.distributed(world_size=4)
def test_uneven_ends_that_are_alike(fresh_store: FreshStore) -> None:
    flags = (
        "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 --num-layers 12"
        " --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2"
    )
    expected = stages([[1], [2, 3], [4, 5], [6], [7], [8, 9], [10, 11], [12]])
    with megatron(flags, fresh_store, v=True):
        rank = dist.get_rank()
        assert [held(chunk) for chunk in build()] == [expected[rank], expected[7 - rank]]


@pytest.mark.distributed(world_size=2)
def test_a_v_gives_the_loss_of_one_rank_from_its_checkpoint(fresh_store: FreshStore) -> None:
    folder = shared_folder("v-loss")
    with megatron(V, fresh_store, v=True):
        chunks = build(ddp=True)
        weights = whole(chunks)
        save(folder, chunks)
        rank = dist.get_rank()
        group, loss = chunks[0].module.pg_collection.pp, torch.zeros(())
        hidden = torch.empty(64, 2, 64)
        if rank == 0:
            dist.send(step(chunks[0], None), group=group, group_dst=1)
            dist.recv(hidden, group=group, group_src=1)
            loss = step(chunks[1], hidden)
        else:
            dist.recv(hidden, group=group, group_src=0)
            hidden = step(chunks[1], step(chunks[0], hidden))
            dist.send(hidden, group=group, group_dst=0)
        tokens = torch.tensor(128 if rank == 0 else 0)
        moved = results.to_last_rank([{"lm loss": loss}] if rank == 0 else [], tokens, group)
        assert int(tokens) == 128
        assert len(moved) == rank
    with megatron(WHOLE, fresh_store):
        chunks = build(ddp=True)
        assert not same(whole(chunks), weights)
        load(folder, chunks)
        assert same(whole(chunks), weights)
        loss = step(chunks[0], None)
        assert all(torch.equal(found["lm loss"], loss) for found in moved)


@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "optimizer"])
@pytest.mark.distributed(world_size=2)
def test_checkpoints_go_from_any_placement_to_any_other(
    optimizer: bool, fresh_store: FreshStore
) -> None:
    there, back = shared_folder(f"v-there-{optimizer}"), shared_folder(f"v-back-{optimizer}")
    flags = (
        "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --ckpt-format torch_dist"
    )
    with megatron(f"{V} {flags}", fresh_store, v=True):
        chunks = build(ddp=True)
        adam = updated(chunks) if optimizer else None
        save(there, chunks, adam)
        expected = [whole(chunks)]
        updated(chunks, adam)
        expected.append(whole(chunks))
    for placement, v, load_from, save_to in (
        (V, False, there, back),
        (WHOLE, False, there, None),
        (V, True, back, None),
    ):
        with megatron(f"{placement} {flags}", fresh_store, v=v):
            chunks = build(ddp=True)
            adam = new_optimizer(chunks) if optimizer else None
            load(load_from, chunks, adam)
            assert same(whole(chunks), expected[0])
            if save_to is not None:
                save(save_to, chunks, adam)
            if optimizer:
                updated(chunks, adam)
                assert same(whole(chunks), expected[1])


@pytest.mark.distributed(world_size=2)
def test_files_of_ranks_are_not_read(fresh_store: FreshStore) -> None:
    folder = shared_folder("v-files-of-ranks")
    with megatron(f"{V} --ckpt-format torch", fresh_store):
        save(folder, build(ddp=True))
    with megatron(V, fresh_store, v=True):
        chunks = build(ddp=True)
        with pytest.raises(ValueError, match="is of the format torch"):
            load(folder, chunks)


class LastOfTwo:
    """A group's place in it."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


class Chunk(torch.nn.Module):
    """It has what it is given."""

    def __init__(self, groups: Any = None, **given: Any) -> None:
        super().__init__()
        self.groups = groups
        for name, value in given.items():
            setattr(self, name, value)


@pytest.mark.parametrize("v", [True, False])
def test_model_builders_are_told_where_the_loss_is(v: bool) -> None:
    utils = pytest.importorskip("megatron.training.models.dist_utils", reason="came with 0.18")
    with contextlib.ExitStack() as undo:
        undo.enter_context(patching.apply(_v_placement.PATCHES, scope=AUDIENCE))
        if v:
            undo.callback(_v_placement.switch_on())
        groups = Namespace(pp=LastOfTwo())
        first, last = utils.build_virtual_pipeline_stages(Chunk, groups, 2)
    assert (first.post_process, first.groups.pp.rank()) == (False, 1)
    assert (last.post_process, last.groups.pp.rank()) == (not v, int(not v))


def test_a_program_without_a_command_line_is_refused_the_same(
    request: pytest.FixtureRequest,
) -> None:
    """Upstream lays a hybrid model's chunk 1 on the real rank, and waits for ever for tied embeddings."""

    def built(**given: Any) -> Any:
        return _v_placement._built(Chunk, Namespace(pp=LastOfTwo()), given)

    set_up = _v_placement.untied(lambda self: setattr(self, "done", True))
    plain = {"share_embeddings_and_output_weights": False, "config": Namespace(mtp_num_layers=None)}
    tied = {**plain, "share_embeddings_and_output_weights": True}
    mtp = {**plain, "config": Namespace(mtp_num_layers=1)}
    hybrid = {**plain, "decoder": Chunk(layer_type_list=["M", "*"])}
    set_up(Namespace(**tied, vp_stage=0))
    request.addfinalizer(_v_placement.switch_on())
    for given in (plain, tied, mtp, hybrid):  # of a model that lies on one rank
        set_up(Namespace(**given, vp_stage=None))
        assert built(**given, vp_stage=None).vp_stage is None
    set_up(Namespace(**plain, vp_stage=0))
    assert built(**plain, vp_stage=1).groups.pp.rank() == 0
    for given, says in (
        (tied, "add --untie-embeddings-and-output-weights"),
        (mtp, "--mtp-num-layers wants"),
        (hybrid, "a hybrid model's chunks cannot be turned"),
    ):
        with pytest.raises(
            ValueError, match=f"in a V: .*{says}"
        ):  # on ranks without embeddings, too
            built(**given, vp_stage=1)
        if given is not hybrid:
            with pytest.raises(ValueError, match=f"in a V: .*{says}"):
                set_up(Namespace(**given, vp_stage=0))


def test_what_a_v_refuses() -> None:
    args = {
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "untie_embeddings_and_output_weights": True,
    }
    assert _v_placement.refusal(Namespace(**args)) is None
    for wish, way_out in {
        "pipeline_model_parallel_size=1": "give --num-virtual-stages-per-pipeline-rank 2",
        "virtual_pipeline_model_parallel_size=4": "with 4: give --num-virtual-stages-per-pipeline",
        "untie_embeddings_and_output_weights=0": "add --untie-embeddings-and-output-weights",
        "mtp_num_layers=1": "--mtp-num-layers wants",
        "defer_embedding_wgrad_compute=1": "--defer-embedding-wgrad-compute is",
        "decoder_first_pipeline_num_layers=2": "give --pipeline-model-parallel-layout",
        "ckpt_format=torch": "give --ckpt-format torch_dist",
        "ckpt_convert_format=torch": "give --ckpt-convert-format torch_dist",
        "is_hybrid_model=1": "leave out --hybrid-layer-pattern",
    }.items():
        name, value = wish.split("=")
        line = _v_placement.refusal(
            Namespace(**{**args, name: int(value) if value.isdigit() else value})
        )
        assert line is not None
        assert way_out in line
        assert "\n" not in line


@pytest.mark.parametrize(
    "given",
    [
        {"num_virtual_stages_per_pipeline_rank": 2},
        {"num_layers_per_virtual_pipeline_stage": 3},
        {"pipeline_model_parallel_layout": "Et*3|t*3|t*3|t*3L"},
    ],
)
def test_chunks_are_counted_before_megatron_validates(given: dict[str, Any]) -> None:
    none = dict.fromkeys(
        (
            "pipeline_model_parallel_layout",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
        )
    )
    args = {"pipeline_model_parallel_size": 2, "num_layers": 12, **none, **given}
    args["untie_embeddings_and_output_weights"] = True
    assert _v_placement.refusal(Namespace(**args)) is None


def step(chunk: Any, hidden: torch.Tensor | None) -> torch.Tensor:
    """The chunk's output for one micro-batch; at the end of the model its loss."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.utils import get_model_config

    stored: list[Any] = []
    output, _ = schedules.forward_step(
        feed, None, chunk, 1, hidden, stored, get_model_config(chunk), 1, is_last_stage=False
    )
    return output[0].detach() if isinstance(output, list) else output.detach()


def feed(iterator: Any, model: Any) -> tuple[torch.Tensor, None]:
    """A script's forward step: data is read at the model's ends, and told apart by the pipeline's rank."""
    from megatron.core import mpu
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training.utils import is_first_or_last_pipeline_stage

    text = torch.arange(130).reshape(2, 65) % 97
    tokens, labels = None, None
    if is_first_or_last_pipeline_stage(get_attr_wrapped_model(model, "vp_stage")):
        first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
        tokens, labels = text[:, :-1] if first else None, text[:, 1:] if last else None
    positions = torch.arange(64).expand(2, 64)
    output = model(tokens, positions, None, labels=labels)
    return output.mean() if labels is not None else output, None


def new_optimizer(chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, clip_grad=0.0, use_distributed_optimizer=True
    )
    return get_megatron_optimizer(config, chunks)


def updated(chunks: list[Any], optimizer: Any = None) -> Any:
    """The optimizer after a step with gradients that each weight's name gives."""
    optimizer = optimizer or new_optimizer(chunks)
    for name, weight in named_weights(chunks):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.main_grad.copy_(torch.randn(weight.shape, generator=generator))
    optimizer.step()
    for chunk in chunks:
        if hasattr(chunk, "start_param_sync"):
            chunk.start_param_sync(force_sync=True)
    return optimizer
