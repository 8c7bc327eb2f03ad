"""Trains each of Megatron-LM's nightly configurations, made small, on the CPU with accel on top.

    python -m accel.testing.megatron_recipes CHECKOUT [--only REGEX] [--keep FOLDER] [--report PAGE.md]

CHECKOUT is a clone of Megatron-LM; its own scripts and `megatron` are what is run. Its configurations, the
`model_config.yaml` of `tests/functional_tests/test_cases`, are combinations of flags that users train with.
`find` takes those that pretrain a GPT, a mixture of experts or a hybrid, `small_recipes.shrink` makes them
small enough for a few gloo ranks: three iterations on mock data, and every flag as it is that is no size or
path. Those that are the same then are run once.

Each trains with preset off, then with preset fast. One of a resume type saves a checkpoint in its second
iteration, and each preset makes the third again from there. What may become of it:

* `agrees`: both presets trained, and no loss differs by more than `TOLERANCE`;
* `differs`: by more, with experts. Reported, no failure: noise in bf16 turns a router's choice, which is no
  fault;
* `apart`: by more, without experts, or one of them is no number;
* `resumed apart`: with preset off, the third iteration's loss or gradient norm is another one after it was
  resumed, in any digit that Megatron prints, where upstream's own test of the configuration wants none to be;
* `stopped`: with the last error that a rank printed;
* `timed out`: a launch took longer than `--seconds`.

The last four are failures. `tests/megatron_recipes_expected.toml` names those that are known, with the
reason of each; the exit status is 1 if one fails that is not there, or one that is there does not fail;
`sometimes` allows both. Results are kept in the folder of `--keep`, with what the ranks printed. What was run
with the very same commit of accel and the same arguments, and did not time out, is not run again: so a long
run can be resumed.
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import signal
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from accel.testing import bench, known_failures, ranks
from accel.testing.small_recipes import ITERATIONS, Flags, number, shrink, words_of

ROOT = Path(__file__).parents[2]
EXPECTED = ROOT / "tests" / "megatron_recipes_expected.toml"
SCRIPTS = {
    "gpt": "pretrain_gpt.py",
    "moe": "pretrain_gpt.py",
    "mixtral": "pretrain_gpt.py",
    "hybrid": "pretrain_hybrid.py",
    "nemotron": "pretrain_hybrid.py",
}
"""The folders of configurations, and what trains them."""
FLEXTRON = "megatron/elastification/pretrain_hybrid_flex.py"
"""What trains those with `--flextron`."""
TOLERANCE = {"--bf16": 2**-8, "--fp16": 2**-11, "": 2**-20}
"""Between the losses of two presets, relative: the unit roundoff of what the model computes in. A loss is the
mean over some hundred tokens, each rounded that much on its own, so their noise is well below; in fp32, of
which Megatron prints seven digits, sixteen roundings."""
FAILURES = ("apart", "resumed apart", "stopped", "timed out")
OUTCOMES = ("agrees", "differs", *FAILURES)


@dataclass
class Recipe:
    """A configuration made small."""

    name: str
    """Its folders, say `gpt/gpt3_mcore_te_tp2_pp2`."""
    script: str
    flags: Flags
    ranks: int
    environment: dict[str, str]
    resumes: bool
    exactly: bool
    """Upstream's test compares the resumed losses exactly."""
    others: list[str] = field(default_factory=list)
    """Configurations that are this one when they are small."""

    @property
    def tolerance(self) -> float:
        return next(t for flag, t in TOLERANCE.items() if not flag or flag in self.flags)

    @property
    def layout(self) -> str:
        kinds = {
            "TP": "tensor-model",
            "PP": "pipeline-model",
            "CP": "context",
            "EP": "expert-model",
        }
        sizes = {k: number(self.flags, f"--{v}-parallel-size") for k, v in kinds.items()}
        return " ".join(f"{k}{size}" for k, size in sizes.items() if size > 1)

    def arguments(self) -> list[str]:
        return [word for flag, words in self.flags.items() for word in (flag, *words)]


@dataclass
class Training:
    """One launch."""

    ended: str
    """`stopped`, `timed out`, or nothing."""
    why: str
    steps: dict[str, list[float]]
    """Iteration -> loss and gradient norm."""
    seconds: float


@dataclass
class Result:
    """What became of a recipe's trainings: `off`, `off resumed`, `fast`, `fast resumed`."""

    name: str
    commit: str | None
    arguments: list[str]
    trainings: dict[str, Training] = field(default_factory=dict)


def find(checkout: Path, most: int = 8) -> list[Recipe]:
    """The trainings of the clone, each on at most so many ranks."""
    cases = checkout / "tests" / "functional_tests" / "test_cases"
    if not cases.is_dir():
        raise SystemExit(
            f"make test-recipes: {checkout} has no tests/functional_tests/test_cases; "
            "give MEGATRON=<a clone of Megatron-LM>"
        )
    found: dict[str, Recipe] = {}
    for file in sorted(f for kind in SCRIPTS for f in cases.glob(f"{kind}/*/model_config.yaml")):
        recipe = read(file, most)
        if recipe:
            small = asdict(recipe) | {"name": "", "environment": {}}
            first = found.setdefault(json.dumps(small, sort_keys=True), recipe)
            if first is not recipe:
                first.others.append(recipe.name)
    return list(found.values())


def read(file: Path, most: int) -> Recipe | None:
    """The recipe of a `model_config.yaml`, unless that trains nothing."""
    case = yaml.safe_load(file.read_text())
    if case.get("MODE", "pretraining") != "pretraining" or not case.get("MODEL_ARGS"):
        return None
    flags = {flag: words_of(value) for flag, value in case["MODEL_ARGS"].items()}
    environment = {k: str(v) for k, v in case["ENV_VARS"].items()}
    noisy = ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NON_DETERMINSTIC_RESULTS")
    resumes = case["TEST_TYPE"] in ("ckpt-resume", "frozen-resume")
    small, size = shrink(flags, resumes, most)
    return Recipe(
        f"{file.parts[-3]}/{file.parts[-2]}",
        FLEXTRON if "--flextron" in flags else SCRIPTS[file.parts[-3]],
        small,
        size,
        {k: v for k, v in environment.items() if "$" not in v},
        resumes,
        resumes and not any(environment.get(name) == "1" for name in noisy),
    )


_STEP = re.compile(r"iteration\s+(\d+)/.*?lm loss: (\S+) \|(?:.*?grad norm: (\S+) \|)?")
_ERROR = re.compile(r"(?:^|[ :\]])(?:[\w.]*(?:Error|Exception)\b|error:).*")
_BY_ANOTHER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def steps_of(output: str) -> dict[str, list[float]]:
    """Iteration -> the loss and the gradient norm that Megatron's own lines show; 0 where they show none."""
    return {i: [float(loss), float(norm or 0)] for i, loss, norm in _STEP.findall(output)}


def last_error(output: str) -> str:
    """What stopped a rank, and not what the others said when it was gone."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        if _ERROR.search(line) and not any(words in line for words in _BY_ANOTHER):
            # an assertion without words says nothing but where it is
            bare = line.endswith(("Error", "Exception")) and at
            return f"{line}: {lines[at - 1]}" if bare else line
    return lines[-1] if lines else "nothing was printed"


def back_to_the_second(folder: Path) -> None:
    """As upstream's `run_ci_test.sh` does it: the last checkpoint goes, the tracker names the one before."""
    shutil.rmtree(folder / f"iter_{ITERATIONS:07}", ignore_errors=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(ITERATIONS - 1))


@dataclass(frozen=True)
class Runner:
    """Runs recipes, or reads what became of them."""

    checkout: Path
    folder: Path
    """Of results, and of what the ranks print."""
    seconds: float
    """Of a launch."""
    launcher: ranks.Launcher = field(default_factory=ranks.Launcher)

    def result(self, recipe: Recipe) -> Result:
        """What `folder` holds of this recipe at this commit; else run it."""
        kept, commit = kept_result(recipe, self.folder), bench.commit()
        same = kept and (kept.commit, kept.arguments) == (commit, recipe.arguments())
        ended = kept and all(t.ended != "timed out" for t in kept.trainings.values())
        if kept and same and ended and not (commit or "-dirty").endswith("-dirty"):
            return kept
        result = Result(recipe.name, commit, recipe.arguments(), self.run(recipe))
        kept_at(recipe, self.folder).write_text(json.dumps(asdict(result), indent=1))
        return result

    def run(self, recipe: Recipe) -> dict[str, Training]:
        """Its trainings, until one does not end well."""
        trainings: dict[str, Training] = {}
        for preset in ("off", "fast"):
            with tempfile.TemporaryDirectory(prefix="accel-recipe-") as folder:
                checkpoints = ["--save", folder, "--load", folder, "--save-interval", "2"]
                flags = ["--accel-preset", preset, *(checkpoints if recipe.resumes else [])]
                trainings[preset] = training = self.train(recipe, preset, flags)
                if recipe.resumes and not training.ended:
                    back_to_the_second(Path(folder))
                    name = f"{preset} resumed"
                    trainings[name] = training = self.train(recipe, name, flags, first=ITERATIONS)
            if training.ended:
                break
        return trainings

    def train(self, recipe: Recipe, name: str, flags: list[str], first: int = 1) -> Training:
        """One launch, from this iteration on."""
        log = kept_at(recipe, self.folder).with_suffix(f".{name.replace(' ', '-')}.log")
        log.write_text("")
        script = ["-m", "accel.testing.adapted", str(self.checkout / recipe.script)]
        path = os.pathsep.join([str(self.checkout), str(ROOT), os.environ.get("PYTHONPATH", "")])
        here = {"PYTHONPATH": path, "ACCEL_DEVICE": "cpu"}
        environment = ranks.environment(**(recipe.environment | here))
        command = [*script, *recipe.arguments(), *flags]
        start = time.monotonic()
        status = self.launcher.run(recipe.ranks, command, environment, str(log), self.seconds)
        seconds = time.monotonic() - start
        output = log.read_text(errors="replace")
        ended, why = how_it_ended(status, output, first)
        return Training(ended, why, steps_of(output), round(seconds, 1))


def how_it_ended(status: int | None, output: str, first: int) -> tuple[str, str]:
    """A launch that was to train from iteration `first` on: `stopped` or `timed out`, and why."""
    if status is None:
        return "timed out", f"after iteration {max(steps_of(output), default=0)}"
    if status < 0:
        return "stopped", f"a rank died of {signal.Signals(-status).name}"
    if status:
        return "stopped", known_failures.without_folders(last_error(output))
    asked, found = [str(i) for i in range(first, ITERATIONS + 1)], [*steps_of(output)]
    if found != asked:
        return "stopped", f"losses of iterations {found}, not of {asked}"
    return "", ""


def apart(one: Training, other: Training, iterations: Iterable[str], what: int = 0) -> float:
    """The largest relative difference of their losses (`what` 1: gradient norms). Infinite if one is no
    number."""
    pairs = [(one.steps[i][what], other.steps[i][what]) for i in iterations]
    differences = [0.0 if a == b else abs(a - b) / max(abs(a), abs(b)) for a, b in pairs]
    return max(d if math.isfinite(d) else math.inf for d in differences)


def resumed_apart(result: Result, preset: str) -> float:
    """By how much the third iteration differs from the one that was not interrupted."""
    whole, resumed = result.trainings[preset], result.trainings[f"{preset} resumed"]
    return max(apart(whole, resumed, [str(ITERATIONS)], what) for what in (0, 1))


def judge(recipe: Recipe, result: Result) -> tuple[str, str]:
    """Its outcome, and why."""
    for name, training in result.trainings.items():
        if training.ended:
            return training.ended, f"preset {name}: {training.why}"
    if recipe.exactly and (difference := resumed_apart(result, "off")):
        return "resumed apart", f"by {difference:.1e}, preset off"
    off, fast = (result.trainings[preset] for preset in ("off", "fast"))
    difference = apart(off, fast, off.steps)
    if difference <= recipe.tolerance:
        return "agrees", ""
    routed = "--num-experts" in recipe.flags and math.isfinite(difference)
    return "differs" if routed else "apart", f"by {difference:.1e}, preset fast"


def unexpected(found: list[tuple[Recipe, Result]], known: list[dict]) -> list[str]:
    """A line for each that failed without being known to, or did not although it was."""
    lines = []
    for recipe, result in found:
        outcome, why = judge(recipe, result)
        entry = known_failures.entry(recipe.name, known)
        if outcome in FAILURES and entry is None:
            lines.append(f"{outcome}: {recipe.name}: {why}")
        elif outcome not in FAILURES and entry and not entry.get("sometimes"):
            lines.append(f"{outcome}, but is listed ({entry['reason']}): {recipe.name}")
    return lines


def kept_at(recipe: Recipe, folder: Path) -> Path:
    return folder / f"{recipe.name.replace('/', '.')}.json"


def kept_result(recipe: Recipe, folder: Path) -> Result | None:
    """What `folder` holds of this recipe in this layout, whatever commit it is of."""
    if not kept_at(recipe, folder).exists():
        return None
    result = Result(**json.loads(kept_at(recipe, folder).read_text()))
    if result.arguments != recipe.arguments():
        return None
    trainings: dict[str, Any] = result.trainings
    return replace(result, trainings={name: Training(**t) for name, t in trainings.items()})


def report(found: list[tuple[Recipe, Result]], known: list[dict], total: int, version: str) -> str:
    """A row for each of `found`, of `total` recipes."""
    rows, counts, reasons = [], Counter[str](), Counter[str]()
    for recipe, result in found:
        outcome, why = judge(recipe, result)
        entry = known_failures.entry(recipe.name, known) if outcome in FAILURES else None
        counts[outcome] += 1
        reasons[entry["reason"] if entry else "not listed"] += outcome in FAILURES
        rows.append(f"| {' | '.join(_row(recipe, result, outcome, why))} |")
    tolerances = ", ".join(f"{t:.1e} ({f or 'without'})" for f, t in TOLERANCE.items())
    lines = [
        "<!-- Written by `make test-recipes MEGATRON=<checkout>`. -->",
        "",
        f"# Megatron-LM {version}'s nightly configurations",
        "",
        "Its own scripts on gloo ranks of a CPU, accel on top, without Transformer Engine and Apex: made "
        f"small, {ITERATIONS} iterations on mock data, the other flags as they are; with preset off, then "
        "with preset fast.",
        "",
        f"**{', '.join(f'{counts[o]} {o}' for o in OUTCOMES)}**: {len(found)} of the {total} configurations "
        f"that differ when they are small. `agrees`: no loss differs by more than {tolerances}, relative.",
        "",
        "| why they fail | configurations |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in reasons.most_common() if count),
        "",
        "Relative differences: `losses` and `norms` (of gradients) between the presets; `resumed` between "
        f"iteration {ITERATIONS} of a resumed training and of one that was not interrupted, with preset off "
        "and with preset fast. `exactly`: upstream's own test wants none.",
        "",
        "| configuration | ranks | outcome | losses | norms | resumed | why | commit |",
        "|---|---|---|---|---|---|---|---|",
        *rows,
        "",
        "| run as | which are the same when they are small |",
        "|---|---|",
        *(
            f"| {recipe.name} | {', '.join(recipe.others)} |"
            for recipe, _ in found
            if recipe.others
        ),
    ]
    return "\n".join(lines) + "\n"


def _row(recipe: Recipe, result: Result, outcome: str, why: str) -> list[str]:
    well = {name: training for name, training in result.trainings.items() if not training.ended}
    between, resumed = ["", ""], []
    if {"off", "fast"} <= well.keys():
        off = well["off"]
        between = [f"{apart(off, well['fast'], off.steps, what):.1e}" for what in (0, 1)]
    for preset in ("off", "fast"):
        if f"{preset} resumed" in well:
            resumed.append(f"{resumed_apart(result, preset):.1e}")
    exactly = " exactly" if resumed and recipe.exactly else ""
    commit, _, dirty = (result.commit or "").partition("-")
    return [
        recipe.name,
        f"{recipe.ranks} {recipe.layout}".strip(),
        outcome,
        *between,
        ", ".join(resumed) + exactly,
        why.replace("|", "\\|")[:160],
        f"{commit[:7]}{dirty and '-' + dirty}",
    ]


def main() -> int:
    parser = ArgumentParser(prog="make test-recipes")
    parser.add_argument("checkout", type=Path, help="a clone of Megatron-LM at a supported version")
    parser.add_argument(
        "--only", type=re.compile, default="", help="those whose name this regex finds"
    )
    parser.add_argument(
        "--keep", type=Path, default=ROOT / ".cache" / "megatron-recipes", help="results"
    )
    parser.add_argument("--report", type=Path, help="write the table there, in Markdown")
    parser.add_argument(
        "--ranks", type=int, default=8, help="at most so many; layouts become smaller"
    )
    parser.add_argument("--seconds", type=float, default=600, help="a launch has")
    parser.add_argument("--no-run", action="store_true", help="only report on what was run already")
    args = parser.parse_args()
    checkout = args.checkout.resolve()
    version = runpy.run_path(str(checkout / "megatron" / "core" / "package_info.py"))["__version__"]
    version = version.partition("+")[0]
    recipes = find(checkout, args.ranks)
    asked = [r for r in recipes if re.search(args.only, r.name)]
    if not asked:
        parser.error("--only: no recipe's name has that")
    known = known_failures.of(EXPECTED, version)["failure"]
    folder = args.keep.resolve() / version
    folder.mkdir(parents=True, exist_ok=True)
    runner = Runner(checkout, folder, args.seconds)
    try:
        for at, recipe in enumerate(() if args.no_run else asked, start=1):
            result = runner.result(recipe)
            outcome, why = judge(recipe, result)
            seconds = sum(training.seconds for training in result.trainings.values())
            print(f"{at}/{len(asked)} {recipe.name} {outcome} {seconds:.0f} s {why}", flush=True)
    finally:
        runner.launcher.close()
    found = [(r, kept) for r in recipes if (kept := kept_result(r, folder))]
    if not found:
        parser.error(
            f"nothing was run yet with --ranks {args.ranks}: there is no result in {folder}"
        )
    if args.report:
        args.report.write_text(report(found, known, len(recipes), version))
    wrong = unexpected([(r, kept) for r, kept in found if r in asked], known)
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
