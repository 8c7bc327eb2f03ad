"""The runner of Megatron's nightly configurations: what is found, made small, and counts as what."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.testing import megatron_recipes
from accel.testing.megatron_recipes import (
    Recipe,
    Result,
    Training,
    find,
    how_it_ended,
    judge,
    last_error,
    report,
    steps_of,
    unexpected,
)
from accel.testing.small_recipes import (
    ITERATIONS,
    number,
    shrink,
    small_pattern,
    small_stages,
    words_of,
)

DENSE = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 32,
    "--train-iters": 100,
    "--lr-decay-iters": 320000,
    "--transformer-impl": "transformer_engine",
    "--bf16": True,
    "--deterministic-mode": True,
    "--data-path": "${DATA_PATH}/text",
    "--save": "${CHECKPOINT_SAVE_PATH}",
    "--load": "${CHECKPOINT_LOAD_PATH}",
    "--async-save": True,
    "--use-checkpoint-args": True,
}
MOE = {**DENSE, "--num-experts": 64, "--moe-router-topk": 6, "--expert-model-parallel-size": 2}
LINES = """
 [2026-11-27 19:47:30] iteration        1/       3 | consumed samples:            4 | elapsed time per \
iteration (ms): 1298.4 | global batch size:     4 | lm loss: 5.592017E+00 | loss scale: 1.0 | \
grad norm: 2.016 | num zeros: 322.0 | number of skipped iterations:   0 |
 [2026-11-27 19:47:31] iteration        2/       3 | consumed samples:            8 | lm loss: 5.5E+00 | \
mtp_1 loss: 5.4E+00 | loss scale: 1.0 | number of skipped iterations:   0 |
validation loss at iteration 3 | lm loss value: 5.1E+00 | lm loss PPL: 1.6E+02 |
"""


def flags(case: dict[str, Any], **more: Any) -> dict[str, list[str]]:
    named = {f"--{name.replace('_', '-')}": value for name, value in more.items()}
    return {flag: words_of(value) for flag, value in (case | named).items()}


def small(case: dict[str, Any], resumes: bool = False, most: int = 8, **more: Any) -> Any:
    return shrink(flags(case, **more), resumes, most)


def checkout(folder: Path, **cases: dict[str, Any]) -> Path:
    """A clone with these configurations, named `<model>__<case>`."""
    for name, case in cases.items():
        file = folder / "tests/functional_tests/test_cases" / name.replace("__", "/")
        file.mkdir(parents=True)
        whole = {"ENV_VARS": {}, "TEST_TYPE": "regular", "MODEL_ARGS": DENSE} | case
        (file / "model_config.yaml").write_text(yaml.safe_dump(whole))
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("__version__ = '0.19.2+abc'\n")
    return folder


def training(*losses: float, ended: str = "", why: str = "", first: int = 1) -> Training:
    return Training(ended, why, {str(i): [loss, 2.0] for i, loss in enumerate(losses, first)}, 1.0)


def recipe(
    name: str = "gpt/a", resumes: bool = False, exactly: bool = False, experts: bool = False
) -> Recipe:
    layout = {"--bf16": [], "--tensor-model-parallel-size": ["2"]}
    layout |= {"--num-experts": ["8"]} if experts else {}
    return Recipe(name, "pretrain_gpt.py", layout, 4, {}, resumes, exactly)


def result(name: str = "gpt/a", **trainings: Training) -> Result:
    named = {key.replace("_", " "): value for key, value in trainings.items()}
    return Result(name, "c0ffee1234", recipe().arguments(), named)


def test_what_trains_a_gpt_or_a_hybrid_is_found(tmp_path: Path) -> None:
    clone = checkout(
        tmp_path,
        gpt__a={"TEST_TYPE": "ckpt-resume", "ENV_VARS": {"A": 1, "PATH_OF": "${DATA_PATH}/x"}},
        gpt__answers={"MODE": "inference"},
        hybrid__b={"MODEL_ARGS": DENSE | {"--hybrid-layer-pattern": "M-M*"}},
        moe__c={"TEST_TYPE": "ckpt-resume", "ENV_VARS": {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": 1}},
        t5__d={},
        gpt__empty={"MODEL_ARGS": None},
    )
    found = {recipe.name: recipe for recipe in find(clone)}
    assert list(found) == ["gpt/a", "hybrid/b", "moe/c"]
    assert found["gpt/a"].environment == {"A": "1"}
    assert (found["gpt/a"].script, found["hybrid/b"].script) == (
        "pretrain_gpt.py",
        "pretrain_hybrid.py",
    )
    assert [(r.resumes, r.exactly) for r in found.values()] == [
        (True, True),
        (False, False),
        (True, False),
    ]


def test_what_is_the_same_when_it_is_small_is_run_once(tmp_path: Path) -> None:
    larger = {"MODEL_ARGS": DENSE | {"--hidden-size": 4096, "--data-path": "other"}}
    other = {"MODEL_ARGS": DENSE | {"--swiglu": True}}
    clone = checkout(tmp_path, gpt__a={}, gpt__b=larger, gpt__c=other)
    assert [(r.name, r.others) for r in find(clone)] == [("gpt/a", ["gpt/b"]), ("gpt/c", [])]


def test_a_folder_that_is_no_checkout_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(
        SystemExit, match="has no tests/functional_tests/test_cases; give MEGATRON="
    ):
        find(tmp_path)


def test_words_are_those_that_upstream_passes() -> None:
    values = [True, 4, 1e-05, "[a b]", "([0]*3+[1]*11)", "M-M*|M-", "2 2"]
    words = [[], ["4"], ["1e-05"], ["a", "b"], ["([0]*3+[1]*11)"], ["M-M*|M-"], ["2 2"]]
    assert [words_of(value) for value in values] == words


def test_flags_that_are_no_size_and_no_path_stay() -> None:
    kept = {"--moe-router-dtype": "fp32", "--recompute-modules": "[mlp moe_act]", "--swiglu": True}
    made, _ = small(MOE | kept)
    for flag in ("--transformer-impl", "--bf16", "--deterministic-mode", *kept):
        assert made[flag] == words_of((MOE | kept)[flag])
    assert made["--mock-data"] == []
    assert not {"--data-path", "--save", "--load", "--async-save", "--use-checkpoint-args"} & set(
        made
    )
    resumed, _ = small(DENSE, resumes=True)
    assert (resumed["--async-save"], resumed["--use-checkpoint-args"]) == ([], [])
    assert resumed["--async-strategy"] == ["mcore"]
    assert "--save" not in resumed, "each launch names its own folder"


LAYOUTS = [
    (tensor, pipeline, virtual, context, experts, inside)
    for tensor, pipeline, virtual, context, experts, inside in itertools.product(
        (1, 2, 4), (1, 2, 4, 8), (0, 1, 3), (1, 2), (1, 4, 16), (None, 1)
    )
    if not (virtual and pipeline == 1)
]


@pytest.mark.parametrize("most", [8, 4])
def test_every_layout_fits_the_ranks_and_divides_the_model(most: int) -> None:
    for tensor, pipeline, virtual, context, experts, inside in LAYOUTS:
        sizes: dict[str, Any] = {
            "tensor_model_parallel_size": tensor,
            "pipeline_model_parallel_size": pipeline,
            "context_parallel_size": context,
            "expert_model_parallel_size": experts,
            "num_layers": pipeline * max(1, virtual),
            "num_attention_heads": 32,
            "num_query_groups": 8,
        }
        sizes |= {"num_layers_per_virtual_pipeline_stage": 1} if virtual else {}
        sizes |= {"expert_tensor_parallel_size": inside} if inside else {}
        made, ranks = small(MOE, most=most, **sizes)
        tp, pp, cp = (
            number(made, f"--{kind}-parallel-size")
            for kind in ("tensor-model", "pipeline-model", "context")
        )
        ep = number(made, "--expert-model-parallel-size")
        etp = number(made, "--expert-tensor-parallel-size", tp)
        assert ranks <= most, sizes
        assert ranks % (tp * pp * cp) == 0, sizes
        assert ranks % (ep * etp * pp) == 0, sizes
        assert number(made, "--num-layers") % (pp * min(2, virtual or 1)) == 0, sizes
        assert number(made, "--num-attention-heads") % tp == 0, sizes
        assert number(made, "--num-query-groups") % tp == 0, sizes
        assert number(made, "--num-experts") % ep == 0, sizes
        assert number(made, "--moe-router-topk") <= number(made, "--num-experts"), sizes
        at_once = number(made, "--micro-batch-size") * (ranks // (tp * pp * cp))
        assert number(made, "--global-batch-size") % (at_once * pp) == 0, sizes
        assert number(made, "--seq-length") % (2 * cp * tp) == 0, sizes


def test_there_are_replicas_where_ranks_are_left() -> None:
    assert small(DENSE)[1] == 2
    assert small(DENSE, tensor_model_parallel_size=2, pipeline_model_parallel_size=2)[1] == 8
    assert small(DENSE, num_distributed_optimizer_instances=2)[1] == 4
    assert small(DENSE, tensor_model_parallel_size=8)[1] == 8


def test_groups_of_queries_have_as_many_heads_as_before() -> None:
    for heads, groups, tensor, expected in (
        (32, 8, 1, 2),
        (8, 8, 4, 8),
        (16, 2, 2, 2),
        (48, 8, 4, 4),
    ):
        made, _ = small(
            DENSE,
            num_attention_heads=heads,
            num_query_groups=groups,
            tensor_model_parallel_size=tensor,
        )
        assert number(made, "--num-query-groups") == expected


def test_groups_of_experts_hold_what_is_chosen_in_them() -> None:
    groups = {"--moe-router-num-groups": 8, "--moe-router-group-topk": 4, "--moe-router-topk": 8}
    made, _ = small(MOE | groups, expert_model_parallel_size=8)
    experts, chosen = number(made, "--num-experts"), number(made, "--moe-router-topk")
    in_group = experts // number(made, "--moe-router-num-groups")
    limited = number(made, "--moe-router-group-topk")
    assert (experts, chosen % limited) == (16, 0)
    assert chosen <= limited * in_group


@pytest.mark.parametrize(
    ("pattern", "pipeline", "expected"),
    [
        ("M-M-M-M*-M-M-", 1, "M-*"),
        ("M-M-M-M*-", 2, "M-*M-*"),
        ("M-M-M-M*-M-|M-M-M*-M-M-", 2, "M-*|M-*"),
        ("M-M|M-M|M*-|M*|M-|M*|M-|M-", 2, "M-|M-|M*-|M*"),
        ("MEMEM*EME/*E/*E", 1, "ME*/*E/*E"),
    ],
)
def test_a_hybrid_keeps_a_layer_of_each_kind(pattern: str, pipeline: int, expected: str) -> None:
    assert small_pattern(pattern, pipeline) == expected


@pytest.mark.parametrize(
    ("layout", "pipeline", "expected"),
    [
        ("Et*3|(tt|)*6tmL", 2, "Et|t|t|tmL"),
        ("Et*2|(tt|)*5t|tmL", 4, "Et|t|t|t|t|t|t|tmL"),
        ("Et*7|t*7mL", 2, "Et|tmL"),
        ("Et*3|(tt|)*6L", 2, "Et|t|t|L"),
    ],
)
def test_a_layout_keeps_its_ends(layout: str, pipeline: int, expected: str) -> None:
    assert small_stages(layout, pipeline) == expected
    made, _ = small(
        DENSE,
        pipeline_model_parallel_size=pipeline,
        pipeline_model_parallel_layout=layout,
        moe_layer_freq="([0]*3+[1]*12)",
    )
    layers = number(made, "--num-layers")
    assert layers == expected.count("t")
    assert made["--moe-layer-freq"] == [f"([0]*1+[1]*{layers - 1})"]


def test_uneven_pipelines_stay_uneven() -> None:
    uneven = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 2}
    made, _ = small(DENSE, pipeline_model_parallel_size=4, **uneven)
    assert (number(made, "--num-layers") - 2 - 2) % (4 - 2) == 0
    ends = {f"account_for_{end}_in_pipeline_split": True for end in ("embedding", "loss")}
    made, _ = small(
        DENSE, pipeline_model_parallel_size=4, num_virtual_stages_per_pipeline_rank=2, **ends
    )
    assert (number(made, "--num-layers") + 2) % (4 * 2) == 0


def test_samples_are_those_of_three_iterations() -> None:
    made, ranks = small(DENSE, train_samples=19531250, lr_decay_samples=1949218748)
    batch = number(made, "--global-batch-size")
    assert (batch, ranks) == (8, 2)
    assert made["--train-samples"] == made["--lr-decay-samples"] == [str(ITERATIONS * batch)]
    without = {k: v for k, v in DENSE.items() if k not in ("--global-batch-size", "--train-iters")}
    made, _ = small(without, train_samples=9, step_batch_size_schedule="0:384 200B:768 400B:1152")
    assert made["--step-batch-size-schedule"] == ["0:8 512:16 1536:24"]
    assert made["--train-samples"] == ["48"]
    assert "--global-batch-size" not in made
    assert "--train-iters" not in made


def test_losses_are_read_from_the_lines_of_iterations() -> None:
    steps = steps_of(LINES)
    assert list(steps) == ["1", "2"]
    assert steps["1"] == [5.592017, 2.016]
    assert steps["2"] == [5.5, 0.0], "no norm of gradients there"


def test_the_last_error_is_the_one_of_the_rank_that_stopped() -> None:
    output = """
    assert a == b, "c"
ValueError: --fp8-format hybrid: needs Transformer Engine
Traceback (most recent call last):
RuntimeError: [gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1
W1127 something else
"""
    assert last_error(output) == "ValueError: --fp8-format hybrid: needs Transformer Engine"
    assert last_error("  assert x > 1\nAssertionError\n") == "AssertionError: assert x > 1"
    assert last_error("usage\nx.py: error: argument --a: b\n") == "x.py: error: argument --a: b"
    assert last_error("Killed\n") == "Killed"


def test_a_launch_must_print_its_iterations() -> None:
    third = LINES.replace("        1/", "        3/").replace("        2/", "        3/")
    whole = LINES + third
    assert how_it_ended(0, whole, first=1) == ("", "")
    assert how_it_ended(0, third, first=3) == ("", "")
    began_anew = "losses of iterations ['1', '2', '3'], not of ['3']"
    assert how_it_ended(0, whole, first=3) == ("stopped", began_anew)
    assert how_it_ended(0, LINES, first=1)[0] == "stopped"
    assert how_it_ended(None, LINES, first=1) == ("timed out", "after iteration 2")
    assert how_it_ended(-9, LINES, first=1) == ("stopped", "a rank died of SIGKILL")
    no_file = "OSError: no such file: /tmp/x/y.pt"
    assert how_it_ended(1, no_file, first=1) == ("stopped", "OSError: no such file: y.pt")


def test_losses_agree_within_the_rounding_of_bf16() -> None:
    off = training(5.0, 4.9, 4.8)
    assert judge(recipe(), result(off=off, fast=training(5.0, 4.9, 4.8 + 4.8 / 257)))[0] == "agrees"
    turned = result(off=off, fast=training(5.0, 4.9, 4.8 + 4.8 / 250))
    assert judge(recipe(experts=True), turned) == ("differs", "by 4.0e-03, preset fast")
    assert judge(recipe(), turned) == ("apart", "by 4.0e-03, preset fast")
    wrong = result(off=off, fast=training(5.0, 4.9, math.nan))
    for experts in (False, True):
        assert judge(recipe(experts=experts), wrong)[0] == "apart"
        assert unexpected([(recipe(experts=experts), wrong)], []), "numbers of preset fast"


def test_what_upstream_compares_exactly_must_resume_exactly() -> None:
    off, again = training(5.0, 4.9, 4.8), training(4.800001, first=3)
    found = result(off=off, off_resumed=again, fast=off, fast_resumed=training(4.8, first=3))
    assert judge(recipe(resumes=True, exactly=True), found) == (
        "resumed apart",
        "by 2.1e-07, preset off",
    )
    assert judge(recipe(resumes=True), found)[0] == "agrees"


def test_a_training_that_ended_early_says_which_and_why() -> None:
    stopped = training(5.0, ended="stopped", why="ValueError: no")
    found = result(off=training(5.0, 4.9, 4.8), fast=stopped)
    assert judge(recipe(), found) == ("stopped", "preset fast: ValueError: no")


def test_failures_must_be_known_and_known_ones_must_fail() -> None:
    known = [{"reason": "needs FP8", "tests": ["gpt/*fp8"]}]
    off = training(5.0, 4.9, 4.8)
    stopped, well = {"off": training(ended="stopped", why="why")}, {"off": off, "fast": off}

    def lines(name: str, trainings: dict[str, Training], entries: list[dict]) -> list[str]:
        return unexpected([(recipe(name), result(name, **trainings))], entries)

    assert lines("gpt/a", well, known) == lines("gpt/a_fp8", stopped, known) == []
    assert lines("gpt/a", stopped, known) == ["stopped: gpt/a: preset off: why"]
    listed = ["agrees, but is listed (needs FP8): gpt/a_fp8"]
    assert lines("gpt/a_fp8", well, known) == listed
    assert lines("gpt/a_fp8", well, [known[0] | {"sometimes": True}]) == []


def test_the_report_has_a_row_for_each() -> None:
    off, again = training(5.0, 4.9, 4.8), training(4.8, first=3)
    fine = result("gpt/a", off=off, off_resumed=again, fast=off, fast_resumed=again)
    stopped = result("gpt/fp8", off=training(ended="stopped", why="ValueError: a | b"))
    same = recipe("gpt/a", resumes=True, exactly=True)
    same.others.append("gpt/a_1node")
    known = [{"reason": "needs FP8", "tests": ["gpt/fp8"]}]
    text = report([(same, fine), (recipe("gpt/fp8"), stopped)], known, 9, "0.19.2")
    assert text.startswith("<!-- Written by `make test-recipes")
    assert (
        "**1 agrees, 0 differs, 0 apart, 0 resumed apart, 1 stopped, 0 timed out**: 2 of the 9"
        in text
    )
    assert "3.9e-03 (--bf16)" in text
    assert "| needs FP8 | 1 |" in text
    assert (
        "| gpt/a | 4 TP2 | agrees | 0.0e+00 | 0.0e+00 | 0.0e+00, 0.0e+00 exactly |  | c0ffee1 |"
        in text
    )
    assert (
        "| gpt/fp8 | 4 TP2 | stopped |  |  |  | preset off: ValueError: a \\| b | c0ffee1 |" in text
    )
    assert "| gpt/a | gpt/a_1node |" in text


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the recipes that are run; one with "fails" stops."""
    names: list[str] = []

    def run(self: Any, recipe: Recipe) -> dict[str, Training]:
        names.append(recipe.name)
        if "fails" in recipe.name:
            return {"off": training(ended="stopped", why="why")}
        return {preset: training(5.0, 4.9, 4.8) for preset in ("off", "fast")}

    monkeypatch.setattr(megatron_recipes.Runner, "run", run)
    monkeypatch.setattr(megatron_recipes.bench, "commit", lambda: "one")
    return names


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> int:
    keep = ["--keep", str(folder / "kept"), "--report", str(folder / "page.md")]
    monkeypatch.setattr("sys.argv", ["megatron_recipes", str(folder / "clone"), *keep, *words])
    return megatron_recipes.main()


def test_a_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    checkout(tmp_path / "clone", gpt__a={}, gpt__b={"MODEL_ARGS": MOE})
    assert call(monkeypatch, tmp_path, "--only", "a$") == 0
    assert ran == ["gpt/a"]
    assert call(monkeypatch, tmp_path) == 0
    assert ran == ["gpt/a", "gpt/b"]
    monkeypatch.setattr(megatron_recipes.bench, "commit", lambda: "two")
    assert call(monkeypatch, tmp_path, "--no-run") == 0
    assert ran == ["gpt/a", "gpt/b"]
    assert call(monkeypatch, tmp_path, "--only", "a$") == 0
    assert ran == ["gpt/a", "gpt/b", "gpt/a"], "another commit"
    assert call(monkeypatch, tmp_path, "--only", "b$", "--ranks", "1") == 0
    assert ran[3:] == ["gpt/b"], "other arguments"
    monkeypatch.setattr(megatron_recipes.bench, "commit", lambda: "two-dirty")
    for _ in range(2):
        assert call(monkeypatch, tmp_path, "--only", "a$") == 0
    assert ran[4:] == ["gpt/a", "gpt/a"], "nobody knows what has changed since"

    def names() -> list[str]:
        lines = (tmp_path / "page.md").read_text().splitlines()
        return [line.split()[1] for line in lines if "| gpt/" in line]

    assert names() == ["gpt/a"], "the other's result is of one rank"
    assert call(monkeypatch, tmp_path, "--only", "b$") == 0
    assert names() == ["gpt/a", "gpt/b"], "rows of those not asked for stay"


def test_a_run_of_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    checkout(tmp_path / "clone", gpt__a={})
    for arguments in (("--only", "typo"), ("--no-run",)):
        with pytest.raises(SystemExit, match="2"):
            call(monkeypatch, tmp_path, *arguments)
    assert not ran


def test_the_exit_status_says_whether_failures_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[str]
) -> None:
    checkout(tmp_path / "clone", gpt__a={}, gpt__fails={"MODEL_ARGS": MOE})
    expected = tmp_path / "expected.toml"
    monkeypatch.setattr(megatron_recipes, "EXPECTED", expected)
    expected.write_text("")
    assert call(monkeypatch, tmp_path) == 1
    assert call(monkeypatch, tmp_path, "--only", "a$") == 0, "of those asked for"
    expected.write_text('[[failure]]\nreason = "why"\ntests = ["gpt/fails"]\n')
    assert call(monkeypatch, tmp_path) == 0
    expected.write_text('[[failure]]\nreason = "why"\ntests = ["gpt/*"]\n')
    assert call(monkeypatch, tmp_path) == 1, "one that is listed does not fail"


def test_a_resumed_training_begins_at_the_checkpoint_of_the_second_iteration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[tuple[str, list[str], int]] = []

    def train(self: Any, recipe: Recipe, name: str, flags: list[str], first: int = 1) -> Training:
        folder = Path(flags[flags.index("--load") + 1])
        tracker = folder / "latest_checkpointed_iteration.txt"
        launches.append((name, sorted(p.name for p in folder.glob("iter*")), first))
        if first == 1:
            (folder / "iter_0000002").mkdir()
            (folder / "iter_0000003").mkdir()
            tracker.write_text("3")
        else:
            assert tracker.read_text() == "2"
        return training(5.0, 4.9, 4.8) if first == 1 else training(4.8, first=3)

    monkeypatch.setattr(megatron_recipes.Runner, "train", train)
    trainings = megatron_recipes.Runner(tmp_path, tmp_path, 1).run(recipe(resumes=True))
    assert list(trainings) == ["off", "off resumed", "fast", "fast resumed"]
    of_the_second = ["iter_0000002"]
    assert launches == [
        ("off", [], 1),
        ("off resumed", of_the_second, 3),
        ("fast", [], 1),
        ("fast resumed", of_the_second, 3),
    ]


SCRIPT = """
import json, multiprocessing, os, sys
def told(what):
    there = "accel.session" in sys.modules
    if there:
        from accel.session import SESSION
        there = SESSION.device is not None
    print(json.dumps([what, there, sys.argv[1:] if what == "rank" else []]), flush=True)
if __name__ == "__main__":
    import beside
    told("rank")
    child = multiprocessing.get_context("spawn").Process(target=beside.told)
    child.start()
    child.join(100)
"""
BESIDE = """
import json, sys
def told():
    session = sys.modules.get("accel.session")
    print(json.dumps(["child", session is not None and session.SESSION.device is not None, []]))
"""


def test_a_script_has_accel_and_so_has_what_it_spawns(tmp_path: Path) -> None:
    """Megatron's writer of checkpoints is spawned, and asks which device it is to use."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    done = subprocess.run(
        [sys.executable, "-m", "accel.testing.adapted", str(tmp_path / "script.py"), "--a", "b"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert found == [["rank", True, ["--a", "b"]], ["child", True, []]]
