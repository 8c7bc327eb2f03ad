"""Writes docs/features/*.md, docs/benchmarks.md and the pages about schedules, overlap, context
parallelism, experts, GPUs and MindSpeed's flags from what they are about.

    python docs/generate.py [--check]

`--check` writes nothing and fails where a page is not what this would write (`make test` runs it).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import attention_map
import experts
import gpu
import overlap
import schedules

from accel.cli.features import describe
from accel.feature import Feature
from accel.patches import FEATURES, _mindspeed
from accel.testing.bench import advantage, outcome

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
GENERATED = "<!-- Written by docs/generate.py (`make docs`): edit the feature's file instead. -->\n"


def pages() -> dict[Path, str]:
    """Every generated page."""
    made = {DOCS / "features" / f"{feature.name}.md": feature_page(feature) for feature in FEATURES}
    made[DOCS / "features" / "README.md"] = overview()
    made[DOCS / "benchmarks.md"] = benchmarks_page()
    made[DOCS / "mindspeed.md"] = mindspeed_page()
    for module in (overlap, attention_map, experts):
        made |= module.pages(DOCS, GENERATED)
    made |= gpu.pages(DOCS, GENERATED, table)
    return made | schedules.pages(DOCS, GENERATED, table)


CHAPTERS = {
    "off": "On in every preset: what stock Megatron needs to run at all here, and what it trains wrongly",
    "exact": "From preset exact on: bit-identical to stock Megatron",
    "fast": "From preset fast on, the default: within a derived, tested tolerance",
    "max": "In preset max: less memory, at the price of time",
    None: "By name",
}


def overview() -> str:
    """Every feature, by the preset that turns it on."""
    parts = [GENERATED, "# Features"]
    for preset, title in CHAPTERS.items():
        rows = [
            (f"[`{f.name}`]({f.name}.md)", f"`{f.flag}`", f.numerics, f.summary)
            for f in FEATURES
            if f.preset == preset
        ]
        parts += [f"## {title}", table(("feature", "flag", "against stock", "what it does"), rows)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def feature_page(feature: Feature) -> str:
    facts = describe(feature)
    rows = [
        ("flag", f"`{feature.flag}`, `--no-{feature.flag[2:]}`"),
        ("in preset", feature.preset or "by name"),
        ("against stock Megatron", feature.numerics),
        ("megatron-core", feature.megatron),
        ("devices", ", ".join(feature.devices)),
    ]
    rows += [("value" if i == 0 else "", f"`{s}`") for i, s in enumerate(facts["settings"])]
    rows += [("aliases", ", ".join(f"`{a}`" for a in facts["aliases"]))] if facts["aliases"] else []
    rows += [("needs", ", ".join(f"`{r}`" for r in feature.requires))] if feature.requires else []
    rows += [(f"not with `{other}`", because) for other, because in feature.conflicts.items()]
    rows += [(f"relieves `{other}`", because) for other, because in feature.relieves.items()]
    parts = [
        GENERATED,
        f"# `{feature.name}`: {feature.summary}",
        table(("", ""), rows),
        feature.doc,
    ]
    if feature.patches:
        patches = [(f"`{p.target}`", p.why) for p in feature.patches]
        parts += ["## Patches", table(("what is changed", "why"), patches)]
    measured = [
        f"{about(report)}\n\n{measurements(report)}"
        for report in reports()
        if report["name"] in feature.benchmarks
    ]
    if measured:
        parts += ["## Measured", *measured]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def benchmarks_page() -> str:
    parts = [
        GENERATED,
        "# Benchmarks",
        "`make bench` on the machines below; the raw results are in `benchmarks/results`. Sides are "
        "interleaved in one process on one allocator, with random data; figures are medians. In "
        "brackets: how many times faster we are than that peer, and which share of the limit we "
        "reach. The limit is the fastest copy, from memory where inputs are larger than a cache, or torch's "
        "own matrix product for work that is bound by arithmetic; of a step's memory, what its states take; "
        "under Zipf's law, the same with experts that are equally popular. "
        "Of a target that asks for more than that we fall short beyond the limit. Results of tp_overlap "
        "from before 28 November 2026, those with `accel, auto` among the peers, name the best of accel's "
        "settings as accel; later ones have `auto` there, the flag's default, and the best as a peer. The "
        "hidden share is that of the lesser of products and gloo's collectives, each alone, and above 1 "
        "where accel's own transfers take less time than these. Since 29 November 2026 it is the median of "
        "rounds, all sides with host_batch_scheduling, and accel's steps of tp_overlap's GPT are with it "
        "too, as in preset fast; `tp_overlap alone` is without. Its cases without a rate are named by it: "
        "what a forward's bytes take of the forward's products; later ones say what all collectives took, "
        "alone.",
    ]
    for report in reports():
        parts += [f"## {report['name']}", about(report), measurements(report)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def mindspeed_page() -> str:
    """Which flags of MindSpeed are taken as they are, and what to write for the others."""

    def written(text: str) -> str:
        return re.sub(r"--[\w-]+|python -m accel \w+|HCCL_\w+", r"`\g<0>`", text)

    taken: dict[str, list[str]] = {}
    for theirs, ours in _mindspeed.ALIASES.items():
        taken.setdefault(ours, []).append(theirs)
    served: dict[str, list[str]] = {}
    for theirs, text in _mindspeed.INSTEAD.items():
        served.setdefault(text, []).append(theirs)
    nothing = served.pop(_mindspeed.NOTHING)
    flags = ", ".join
    parts = [
        GENERATED,
        "# Coming from MindSpeed",
        "Write `import accel.megatron_adaptor` for `import mindspeed.megatron_adaptor`, with Megatron "
        "as it comes from NVIDIA (megatron-core 0.17.1, 0.18.2 or 0.19.2). Megatron's parser then takes "
        "these flags of MindSpeed's as accel's:",
        table(
            ("MindSpeed", "accel"),
            [(written(flags(theirs)), written(ours)) for ours, theirs in taken.items()],
        ),
        "The words of these are others here, and are translated:",
        table(
            ("MindSpeed", "here"),
            [(written(theirs), written(text)) for theirs, text in _mindspeed.TRANSLATED.items()],
        ),
        "Of the others a line says what serves instead, before Megatron refuses them:",
        table(
            ("MindSpeed", "instead"),
            [(written(flags(theirs)), written(text)) for text, theirs in served.items()],
        ),
        f"Nothing here does what these do: {written(flags(nothing))}.",
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def reports() -> Iterator[dict]:
    for path in sorted(RESULTS.glob("*/*.json"), key=lambda p: (p.stem, p.parent.name)):
        if path.name != "results.json":  # of `make gpu`: docs/gpu.py
            yield json.loads(path.read_text())


def about(report: Mapping) -> str:
    machine = report["machine"]
    return (
        f"{machine['cpu']}, {machine['isa']} kernels, {machine['threads']} threads, "
        f"torch {machine['torch']}, commit {report['commit'][:12]}:"
    )


def measurements(report: Mapping) -> str:
    """A table; the rate of a time that is shown as well is left out."""
    rows = [
        (
            row["case"],
            f"{row['metric']}, {row['unit']}",
            f"**{row['ours']:.4g}**",
            "; ".join(
                f"{name} {value:.4g}{advantage(row, value)}" for name, value in row["peers"].items()
            ),
            limit(row),
            target(row),
        )
        for row in report["rows"]
        if row["metric"] not in ("bandwidth", "rate")
    ]
    return table(("case", "", "accel", "peers", "limit", "target"), rows)


def limit(row: Mapping) -> str:
    if row["limit"] is None:
        return ""
    share = row["limit"] / row["ours"] if row["better"] == "lower" else row["ours"] / row["limit"]
    return f"{row['limit']:.4g} ({share:.0%})"


def target(row: Mapping) -> str:
    if row["target"] is None:
        return ""
    became = outcome(row)
    return f"{row['target']:.4g} {became if became == 'met' else f'**{became}**'}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = ([cell.replace("|", "\\|") for cell in cells] for cells in lines)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in escaped)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if outdated")
    check = parser.parse_args().check
    made = pages()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    stale += [path for path in (DOCS / "features").glob("*.md") if path not in made]
    if check:
        for path in stale:
            print(f"{path.relative_to(DOCS.parent)} is outdated: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        if path in made:
            path.parent.mkdir(exist_ok=True)
            path.write_text(made[path])
        else:
            path.unlink()
    print(f"docs: {len(made)} pages, {len(stale)} changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
