"""Part report: what the other parts left, as results.json and as tables for people, results.md.

    python -m benchmarks.gpu.report --rewrite FOLDER

writes the results.md of a folder anew, of the results.json there, to which `notes` were added, say.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from accel.testing.bench import commit
from benchmarks.gpu.memory import BASE, HALVED, HALVED_TARGET, TARGETS
from benchmarks.gpu.overlap import TARGET as HIDDEN_TARGET
from benchmarks.gpu.overlap import most_hidden
from benchmarks.gpu.setting import Setting, read, write_json
from benchmarks.gpu.work import COMPILED, LATE, OURS

MFU_TARGET, SPEEDUP_TARGET = 0.6, 1.3
OURS_IN_TRITON = "accel in Triton"


def versions() -> dict[str, str | None]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in (
        "torch",
        "triton",
        "megatron-core",
        "liger-kernel",
        "quack-kernels",
        "flash-attn-4",
    ):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def work_of(sides: dict[str, dict]) -> set[int]:
    """The bytes, or operations, that the timed sides of a row were timed for: one number, or they are of
    different works."""
    return {round(s["us"] * 1e-6 * s["rate"]) for s in sides.values() if "rate" in s}


def with_side(rows: list[dict], more: list[dict], side: str, name: str) -> list[dict]:
    """Rows of part ops, with one more side: what another part found for `side`, as `name`. One of another
    number of bytes or operations is absent."""
    found = {(row["op"], row["mode"], row["shape"]): row["sides"] for row in more}
    merged = []
    for row in rows:
        sides = found.get((row["op"], row["mode"], row["shape"]), {})
        added = {name: sides[side]} if side in sides else {}
        theirs, ours = work_of(added), work_of(row["sides"])
        if theirs and ours and theirs != ours:
            told = f"timed for {theirs} bytes or operations, the row for {ours}"
            added = {name: {"absent": told}}
        merged.append({**row, "sides": {**row["sides"], **added}})
    return merged


def lines_of(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def target_of(row: dict) -> float | None:
    """Microseconds that the kernels may take: of a fixed target and of the fastest peer's, whichever part
    has timed it, the lesser."""
    targets = [row["target_us"]] if row["target_us"] is not None else []
    peers = [
        d["us"] for s, d in row["sides"].items() if s not in (OURS, OURS_IN_TRITON) and "us" in d
    ]
    if peers and row.get("target_over_best"):
        targets.append(min(peers) / row["target_over_best"])
    return min(targets, default=None)


def verdict(row: dict, rehearsal: bool) -> str:
    """Whether ours meets the targets of its row, of the kernels' time and of the host's."""
    ours = row["sides"].get("accel", {})
    if "us" not in ours:
        return "no result"
    pairs = [(ours["us"], target_of(row)), (ours["host_us"], row.get("host_target_us"))]
    is_met = [us <= target for us, target in pairs if target is not None]
    if not is_met or rehearsal:
        return ""
    return "met" if all(is_met) else "missed"


def ops_table(rows: list[dict], rehearsal: bool) -> list[str]:
    """One line for each row: ours, the share of the ceiling, the peers."""
    lines = [
        "| op | shape | ours, us | of the ceiling | host, us | peers, us | target, us | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = row["sides"].get("accel", {})
        peers = ", ".join(
            f"{side} {data['us']:.1f}{' (less exact)' * ('less exact' in data['note'])}"
            if "us" in data
            else f"{side}: {data['absent'][:60]}"
            for side, data in row["sides"].items()
            if side != "accel"
        )
        if "us" in ours:
            cells = [
                f"{ours['us']:.1f}",
                f"{row['limit_us'] / ours['us']:.0%}",
                f"{ours['host_us']:.0f}",
            ]
        else:
            cells = [ours.get("absent", "absent")[:80], "", ""]
        named = {"": target_of(row), "host ": row.get("host_target_us")}
        target = ", ".join(f"{name}{us:.1f}" for name, us in named.items() if us is not None)
        cells = [
            f"{row['op']} {row['mode']}",
            row["shape"],
            *cells,
            peers,
            target,
            verdict(row, rehearsal),
        ]
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return lines


def training_table(training: dict, rehearsal: bool, has_targets: bool = True) -> list[str]:
    sides, stock = training["sides"], training["sides"].get("stock", {})
    lines = [
        "| side | ms a step | tokens/s | MFU | peak, GiB | over stock | losses apart by | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for side, made in sides.items():
        if "ms" not in made:
            lines.append(
                f"| {side} | failed: {made['failed'].strip().splitlines()[-1][:100]} | | | | | | |"
            )
            continue
        mfu = "" if made["mfu"] is None else f"{made['mfu']:.1%}"
        is_like_stock = "ms" in stock and made.get("sequences") == stock.get("sequences")
        over = f"{stock['ms'] / made['ms']:.2f}x" if is_like_stock else ""
        apart = ""
        if is_like_stock:
            pairs = zip(made["losses"], stock["losses"], strict=False)
            apart = f"{max((abs(a - b) for a, b in pairs), default=0):.2e}"
        targets = []
        if has_targets and side != "stock" and not rehearsal:
            if over:
                met = "met" if stock["ms"] / made["ms"] >= SPEEDUP_TARGET else "missed"
                targets.append(f"{SPEEDUP_TARGET}x {met}")
            if mfu:
                met = "met" if made["mfu"] >= MFU_TARGET else "missed"
                targets.append(f"{MFU_TARGET:.0%} {met}")
        lines.append(
            f"| {side} | {made['ms']:.1f} | {made['tokens_per_s']:.0f} | {mfu} "
            f"| {made['peak_bytes'] / 2**30:.1f} | {over} | {apart} | {', '.join(targets)} |"
        )
    return lines


def training_title(training: dict) -> str:
    """What is trained, and of which rate the MFU is a share."""
    peak = training.get("peak_flops")
    of = f"; MFU of {peak / 1e12:.1f} TFLOP/s, the datasheet's dense bf16 peak" if peak else ""
    return f"Training, {training['shape']}{of}:"


def memory_table(memory: dict, rehearsal: bool) -> list[str]:
    """Times against `BASE`, peaks against stock's."""
    sides, limits = memory["sides"], memory.get("limits", {})
    base, stock = sides.get(BASE, {}), sides.get("stock", {})
    lines = [
        "| side | ms a step | over accel fast | peak, GiB | of stock's | losses | target | limit | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for side, made in sides.items():
        if "ms" not in made:
            why = made["failed"].strip().splitlines()[-1][:100]
            lines.append(f"| {side} | failed: {why} | | | | | | | |")
            continue
        base_ms = made.get("base_ms", base.get("ms"))
        over = made["ms"] / base_ms if base_ms else None
        share = made["peak_bytes"] / stock["peak_bytes"] if stock.get("peak_bytes") else None
        same, target, reached = "", None, None
        if side in TARGETS:
            is_same = made.get("same_losses", made["losses"] == base.get("losses"))
            same = "the same" if is_same else "**others**"
            target, reached = TARGETS[side], over
        elif side == HALVED:
            target, reached = HALVED_TARGET, share
        verdict = ""
        if target is not None and not rehearsal:
            limit = limits.get(side, 0.0)
            beyond = reached is not None and target < limit <= reached
            met = reached is not None and reached <= target
            verdict = "met" if met else "missed (beyond the limit)" if beyond else "missed"
            if same == "**others**":
                verdict = "missed"
        cells = [
            side,
            f"{made['ms']:.1f}",
            "" if over is None else f"{over:.3f}",
            f"{made['peak_bytes'] / 2**30:.2f}",
            "" if share is None else f"{share:.0%}",
            same,
            "" if target is None else f"{target}",
            f"{limits[side]:.2f}" if side in limits else "",
            verdict,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def overlap_table(overlap: dict, rehearsal: bool) -> list[str]:
    lines = [
        "| layer | gemm, us | comm, us | GB/s | ours, us | in | hidden | at most | target | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in overlap.items():
        if "us" not in row:
            lines.append(f"| {name} | failed: {row['failed'][:100]} | | | | | | | | |")
            continue
        us, best = row["us"], row["best"]
        most = most_hidden(us["gemm"], us["comm"])
        # where less than the target is there to hide, nobody can meet it
        verdict = (
            "" if most < HIDDEN_TARGET else "met" if row["hidden"] >= HIDDEN_TARGET else "missed"
        )
        lines.append(
            f"| {name} | {us['gemm']:.1f} | {us['comm']:.1f} | {row['bytes_per_s'] / 1e9:.1f} "
            f"| {us[best]:.1f} | {best} | {row['hidden']:.0%} | {most:.0%} | {HIDDEN_TARGET:.0%} "
            f"| {'' if rehearsal else verdict} |"
        )
    return lines


def collected(folder: Path, rehearsal: bool) -> dict[str, Any]:
    """What the parts left: results.json."""
    state = read(folder / "state.json")
    rows = lines_of(folder / "ops.jsonl")
    rows = with_side(rows, lines_of(folder / "triton_ops.jsonl"), OURS, OURS_IN_TRITON)
    late = lines_of(folder / "compiled_ops.jsonl")
    for side in (COMPILED, *LATE):
        rows = with_side(rows, late, side, side)
    return {
        "commit": commit(),
        "rehearsal": rehearsal,
        "versions": versions(),
        "notes": [],
        "parts": state["parts"] if state else {},
        "ceilings": read(folder / "ceilings.json"),
        "tests": read(folder / "tests.json"),
        "ops": rows,
        "training": read(folder / "training.json"),
        "moe": read(folder / "moe.json"),
        "memory": read(folder / "memory.json"),
        "overlap": read(folder / "overlap.json"),
    }


def page(results: dict[str, Any]) -> list[str]:
    """results.md, of results.json alone. `notes` are for whoever commits them: what a table cannot tell."""
    rehearsal, ceilings, tests = results["rehearsal"], results["ceilings"], results["tests"]
    lines = [f"# {ceilings['device'] if ceilings else 'no device'}, commit {results['commit']}", ""]
    if rehearsal:
        lines += ["A rehearsal on the CPU: **no figure here means anything.**", ""]
    lines += [", ".join(f"{name} {text}" for name, text in results["versions"].items()), ""]
    lines += [
        f"* {name}: {part['status']} in {part['seconds']:.0f} s {part.get('why', '')[:120]}".rstrip()
        for name, part in results["parts"].items()
    ]
    if ceilings:
        sustained = ceilings["sustained_gemm_flops_per_s"]
        lines.append(
            f"* copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, bf16 product "
            f"{ceilings['gemm_flops_per_s'] / 1e12:.0f} TFLOP/s"
            + (f", {sustained / 1e12:.0f} sustained" if sustained else "")
        )
    if tests:
        counts = ", ".join(f"{tests[key]} {key}" for key in ("passed", "failed", "skipped"))
        lines += [
            f"* tests: {counts}",
            *(f"    * {f['test']}: {f['why'][:160]}" for f in tests["failures"][:20]),
        ]
    lines += [f"* {note}" for note in results["notes"]]
    if results["ops"] and ceilings:
        lines += ["", *ops_table(results["ops"], rehearsal)]
    if training := results["training"]:
        lines += ["", training_title(training), "", *training_table(training, rehearsal)]
    if moe := results.get("moe"):
        table = training_table(moe, rehearsal, has_targets=False)
        lines += ["", training_title(moe), "", *table]
    if results["overlap"]:
        table = overlap_table(results["overlap"], rehearsal)
        lines += ["", "Transfers under products:", "", *table]
    if memory := results["memory"]:
        table = memory_table(memory, rehearsal)
        lines += ["", f"Memory, {memory['shape']}, 16 sequences a step:", "", *table]
    return lines


def rewrite(folder: Path) -> str:
    """Write results.md of results.json."""
    text = "\n".join(page(read(folder / "results.json"))) + "\n"
    (folder / "results.md").write_text(text)
    return text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--rewrite", type=Path)
    known, rest = parser.parse_known_args(argv)
    folder = known.rewrite
    if folder is None:
        setting = Setting.from_argv(rest)
        folder = setting.folder
        write_json(folder / "results.json", collected(folder, setting.rehearse))
    print(rewrite(folder), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
