"""`--accel-schedule` and `--accel-vpp-extra-warmup`: what they refuse, in one line, before anything is built.

That they train as stock does: tests/distributed/test_schedules.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import accel
from accel.feature import Context
from accel.parallel.schedule import Action, Kind, with_transfers
from accel.parallel.schedule.in_order import completing
from accel.parallel.schedule.names import INTERLEAVED, NAMED, named
from accel.patches import schedule, vpp_extra_warmup
from accel.patches._pipeline import WANTED, unfit
from accel.patches._v_placement import IN_A_V, MirroredGroup


def context(**args: Any) -> Context:
    """Of arguments that Megatron has validated."""
    shown = {
        "accel_schedule": None,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "microbatch_group_size_per_vp_stage": 2,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "data_parallel_size": 1,
        "cuda_graph_impl": "none",
        "num_layers": 4,
        "untie_embeddings_and_output_weights": True,
        "ckpt_format": "torch_dist",
    }
    return Context("cpu", "0.19.2", SimpleNamespace(**{**shown, **args}))


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({}, None),
        ({"accel_schedule": "zb-h1"}, None),
        ({"accel_schedule": "ZB-H1"}, None),
        ({"accel_schedule": "interleaved", "virtual_pipeline_model_parallel_size": 2}, None),
        ({"accel_schedule": "dualpipev", "virtual_pipeline_model_parallel_size": 2}, None),
        (
            {"accel_schedule": "zb-h1", "virtual_pipeline_model_parallel_size": 2},
            "zb-h1 has 1 chunks of a rank",
        ),
        (
            {
                "accel_schedule": "dualpipev",
                "virtual_pipeline_model_parallel_size": 2,
                "global_batch_size": 3,
            },
            "p = 2, m = 3: DualPipeV wants m of 2 p = 4 or more",
        ),
        (
            {
                "accel_schedule": "interleaved",
                "virtual_pipeline_model_parallel_size": 2,
                "microbatch_group_size_per_vp_stage": 4,
                "global_batch_size": 5,
            },
            "group_size of 3, 5 would work",
        ),
        (
            {
                "accel_schedule": "zb-v",
                "virtual_pipeline_model_parallel_size": 2,
                "untie_embeddings_and_output_weights": False,
            },
            "--untie-embeddings-and-output-weights",
        ),
        ({"accel_schedule": "zb-h1", "use_megatron_fsdp": True}, "not with --use-megatron-fsdp"),
        ({"accel_schedule": "zb-h1", "delay_wgrad_compute": True}, "--delay-wgrad-compute"),
        ({"accel_schedule": "zb-h1", "cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        (
            {"accel_schedule": "zb-h1", "overlap_moe_expert_parallel_comm": True},
            "--overlap-moe-expert-parallel-comm",
        ),
    ],
)
def test_what_a_schedule_refuses(args: dict[str, Any], line: str | None) -> None:
    reason = schedule.FEATURE.refuses(context(**args))
    assert (reason is None) if line is None else line in str(reason)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, None),
        ({}, "the pipeline is not interleaved: add --num-virtual-stages-per-pipeline-rank 2"),
        (
            {"virtual_pipeline_model_parallel_size": 2, "accel_schedule": "zb-v"},
            "--accel-schedule zb-v has its own warm-up",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "cuda_graph_impl": "local"},
            "--cuda-graph-impl local",
        ),
        (
            {"virtual_pipeline_model_parallel_size": 2, "global_batch_size": 1},
            "p = 2, m = 1",
        ),
    ],
)
def test_what_more_warmup_refuses(args: dict[str, Any], line: str | None) -> None:
    reason = vpp_extra_warmup.FEATURE.refuses(context(**args))
    assert (reason is None) if line is None else line in str(reason)


@pytest.mark.parametrize("given", ["zbv", "", None, 1])
def test_a_name_that_is_none(given: Any) -> None:
    with pytest.raises(ValueError, match="is no schedule: give one of interleaved, zb-h1, zb-v"):
        schedule.parse_name(given)


def test_a_file_is_a_schedule_of_its_counts(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(named("zb-v", 2, 2, 8).to_dict()))
    assert schedule.parse_name(path) == str(path)
    asked = {"accel_schedule": str(path), "virtual_pipeline_model_parallel_size": 2}
    assert schedule.FEATURE.refuses(context(**asked)) is None
    other = schedule.FEATURE.refuses(context(**asked, global_batch_size=4))
    assert "is of p = 2, v = 2, m = 8 and its own warm-up; p = 2, v = 2, m = 4" in str(other)
    fsdp = schedule.FEATURE.refuses(context(**asked, use_megatron_fsdp=True))
    assert "not with --use-megatron-fsdp" in str(fsdp)


@pytest.mark.parametrize(
    ("ranks", "line"),
    [
        (["F0 F1 B1 B0", "F1 B1 F0 B0"], "rank 0, backward(micro-batch 0, chunk 0): comes behind"),
        (["F1 F0 B0 B1", "F0 B0 F1 B1"], "rank 0, forward(micro-batch 0, chunk 0): comes behind"),
        (["F0 F1 B1 I0 W0", "F0 F1 B1 I0 W0"], "rank 0, backward_input(micro-batch 0, chunk 0)"),
        (["F0 F1 B0 B1", "F0 F1 B0 I1 W1"], None),
    ],
)
def test_a_file_takes_micro_batches_in_their_order(
    ranks: list[str], line: str | None, tmp_path: Path
) -> None:
    """Data comes in the order of the forward passes, whatever they are called."""
    kinds = {
        "F": Kind.FORWARD,
        "B": Kind.BACKWARD,
        "I": Kind.BACKWARD_INPUT,
        "W": Kind.BACKWARD_WEIGHT,
    }
    rows = [[[kinds[a[0]], int(a[1]), 0] for a in own.split()] for own in ranks]
    path = tmp_path / "mine.json"
    counts = {"num_ranks": 2, "num_chunks": 1, "num_micro_batches": 2, "placement": "loop"}
    path.write_text(json.dumps({**counts, "ranks": rows}))
    reason = schedule.FEATURE.refuses(context(accel_schedule=str(path), global_batch_size=2))
    assert (reason is None) if line is None else line in str(reason)


def test_a_file_that_lacks_a_receive_names_it(tmp_path: Path) -> None:
    data = with_transfers(named("zb-v", 2, 2, 8)).to_dict()
    data["ranks"][1].remove(["receive_forward", 3, 0])
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    asked = {"accel_schedule": str(path), "virtual_pipeline_model_parallel_size": 2}
    reason = str(schedule.FEATURE.refuses(context(**asked)))
    assert "rank 0, send_forward(micro-batch 3, chunk 0): rank 1 has no receive for it" in reason


@pytest.mark.parametrize(
    ("text", "line"),
    [("{", "is no JSON"), ("[]", "a schedule has the keys"), (None, "No such file")],
)
def test_a_file_that_is_no_schedule(tmp_path: Path, text: str | None, line: str) -> None:
    path = tmp_path / "mine.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=line):
        schedule.parse_name(path)


@pytest.mark.parametrize("given", ["0", "-1", "1.5", "many", None])
def test_a_count_that_is_none(given: Any) -> None:
    with pytest.raises(ValueError, match="is no number of forward passes: give 1 or more"):
        vpp_extra_warmup.parse_count(given)


def test_a_v_gets_two_chunks_and_says_so() -> None:
    asked = context(accel_schedule="zb-v", num_virtual_stages_per_pipeline_rank=None)
    (note,) = schedule.FEATURE.prepare(asked)
    assert asked.args.num_virtual_stages_per_pipeline_rank == 2
    assert "--num-virtual-stages-per-pipeline-rank 2 is used" in note
    assert schedule.FEATURE.prepare(asked) == []


@pytest.mark.parametrize(
    ("name", "ranks", "found"), [("zb-v", 2, True), ("zb-v", 1, False), ("zb-h1", 2, False)]
)
def test_checkpoints_keep_that_chunks_lie_in_a_v(name: str, ranks: int, found: bool) -> None:
    asked = context(accel_schedule=name, pipeline_model_parallel_size=ranks)
    asked.args.num_virtual_stages_per_pipeline_rank = 2
    assert schedule.FEATURE.prepare(asked) == []
    assert getattr(asked.args, IN_A_V, False) is found


def test_without_a_pipeline_nothing_is_set_and_a_v_is_refused() -> None:
    asked = context(
        accel_schedule="dualpipev",
        pipeline_model_parallel_size=1,
        pipeline_model_parallel_layout=None,
        num_layers_per_virtual_pipeline_stage=None,
    )
    asked.args.num_virtual_stages_per_pipeline_rank = None
    assert schedule.FEATURE.prepare(asked) == []
    assert asked.args.num_virtual_stages_per_pipeline_rank is None
    assert "at least two pipeline ranks, got --pipeline" in (schedule.FEATURE.refuses(asked) or "")


def test_one_rank_has_no_pipeline() -> None:
    assert schedule.FEATURE.idle(context(pipeline_model_parallel_size=1)) is not None
    assert schedule.FEATURE.idle(context()) is None


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize("name", [INTERLEAVED, *NAMED])
def test_a_chunks_gradients_are_complete_once(name: str, p: int) -> None:
    """Of weights that are put off, and of the others."""
    chunks = 2 if name == INTERLEAVED else NAMED[name].chunks
    for actions in named(name, p, chunks, 2 * p + 2 * (name == INTERLEAVED) * p).ranks:
        backwards = [a for a in actions if a.kind is not Kind.FORWARD]
        last = completing(backwards)
        for chunk in range(chunks):
            for other in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
                forms = [a for a in backwards if a.chunk == chunk and a.kind is not other]
                assert [a for a in forms if a in last] == forms[-1:]


def test_gradients_that_nobody_completes_are_an_error() -> None:
    kinds = (Kind.BACKWARD_INPUT, Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
    backwards = [Action(kind, i, 0) for kind, i in zip(kinds, (0, 1, 0), strict=True)]
    with pytest.raises(ValueError, match="comes before backward_weight"):
        completing(backwards)


@pytest.mark.parametrize("of", ["", "expert_"])
def test_weights_that_are_gathered_for_each_pass(of: str) -> None:
    asked = {"accel_schedule": "zb-h1", f"{of}gtp_weight_remat_size": 2}
    flag = f"--{of.replace('_', '-')}tensor-parallel-num-weight-shards"
    assert f"not with {flag}" in str(schedule.FEATURE.refuses(context(**asked)))


def test_batches_that_change_are_checked_when_they_come() -> None:
    asked = {"accel_schedule": "dualpipev", "virtual_pipeline_model_parallel_size": 2}
    few = {**asked, "global_batch_size": 1}
    assert schedule.FEATURE.refuses(context(**few)) is not None
    assert schedule.FEATURE.refuses(context(**few, rampup_batch_size=[1, 1, 9])) is None


@pytest.mark.parametrize(
    ("name", "config", "mirrored", "reason"),
    [
        ("zb-v", {}, True, None),
        ("zb-v", {}, False, "does not lie in a V: build it by"),
        ("zb-v", {"defer_embedding_wgrad_compute": True}, True, "not with defer_embedding"),
        ("zb-h1", {"defer_embedding_wgrad_compute": True}, False, "not with defer_embedding"),
        ("zb-h1", {"delay_wgrad_compute": True}, False, "not with delay_wgrad_compute"),
        ("zb-h1", {}, False, None),
        (INTERLEAVED, {"overlap_moe_expert_parallel_comm": True}, False, "passes of its own"),
        (INTERLEAVED, {"cuda_graph_impl": "local"}, False, "not with cuda_graph_impl='local'"),
        (INTERLEAVED, {"cuda_graph_impl": "none", "delay_wgrad_compute": True}, False, None),
    ],
)
def test_models_of_programs_without_a_command_line(
    name: str, config: dict[str, Any], mirrored: bool, reason: str | None
) -> None:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    second = SimpleNamespace(pp=MirroredGroup(group) if mirrored else group)
    chunks = [
        SimpleNamespace(config=SimpleNamespace(**config), pg_collection=SimpleNamespace(pp=group)),
        SimpleNamespace(module=SimpleNamespace(pg_collection=second)),
    ]
    v = 1 if name == "zb-h1" else 2
    found = unfit(chunks[:v], named(name, 2, v, 8))
    assert (found is None) if reason is None else reason in str(found)


def test_on_and_off() -> None:
    try:
        accel.enable(preset="off", schedule="zb-v")
        assert (WANTED.name, WANTED.extra_warmup) == ("zb-v", 0)
        assert WANTED.measurement is not None
        accel.enable(preset="off", schedule="interleaved", vpp_extra_warmup=2)
        assert (WANTED.name, WANTED.extra_warmup) == ("interleaved", 2)
        assert WANTED.measurement is not None
    finally:
        accel.disable()
    assert not WANTED.on
    assert WANTED.measurement is None
