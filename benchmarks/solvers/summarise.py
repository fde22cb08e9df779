"""Tables from the results of `run.py` and `speed.py`, as markdown.

uv run python benchmarks/solvers/summarise.py --write     # into benchmarks/solvers/results.md
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from run import HERE, read

import packer
from packer.io.files import write_text

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Print or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--results", type=Path, default=HERE / "results.jsonl")
    parser.add_argument("--write", action="store_true", help="write results.md beside the results")
    options = parser.parse_args(argv)
    text = summary(read(options.results), speeds(options.results.with_name("speed.json")))
    if options.write:
        write_text(options.results.with_name("results.md"), text, force=True)
    else:
        print(text)


def summary(rows: Sequence[Row], speed: dict[str, Any]) -> str:
    """The whole page."""
    parts = ["# Solvers: results", "", *origin(rows)]
    for predictor in sorted({row["predictor"] for row in rows}):
        chosen = [row for row in rows if row["predictor"] == predictor]
        parts += ["", f"## Searches evaluated by `{predictor}`", "", *counting(chosen), *verified(chosen)]
        parts += [*latency(chosen), *instances(chosen)]
    parts += others()
    if speed:
        parts += ["", "## Speed", "", f"{speed['machine']}; {speed['date']}.", ""]
        parts += table(
            ("case", "limit", "taken, CPU", "peak"),
            [(c["case"], c["limit"], c["taken"], c["peak"]) for c in speed["cases"]],
        )
    return "\n".join(parts) + "\n"


def others() -> list[str]:
    """Tables of what `brute_force.py`, `bin_packing.py` and `gaps.py` wrote, where they did."""
    titles = {
        "brute_force.json": "Small fleets against every plan there is",
        "bin_packing.json": "Bin packing, each solver on one thread",
        "gaps.json": "Plans of large fleets against their bounds",
    }
    parts: list[str] = []
    for name, title in titles.items():
        path = HERE / name
        if path.exists():
            data = json.loads(path.read_text("utf-8"))
            found = data["rows"] if isinstance(data, dict) else data
            head = tuple(found[0])
            limit = data.get("time_limit_s") if isinstance(data, dict) else None
            title += f", {limit:g} s each" if limit else ""
            gaps = [row["gap"] for row in found if "gap" in row]
            if gaps:
                title += f": gap {statistics.median(gaps):.1%} median, {percentile(gaps, 0.9):.1%} p90"
            parts += ["", f"## {title}", "", *table(head, [tuple(row[key] for key in head) for row in found])]
    return parts


def origin(rows: Sequence[Row]) -> list[str]:
    """Where and when."""
    machines = sorted({row["machine"] for row in rows})
    dates = sorted({row["date"] for row in rows})
    fleets = len({row["instance"] for row in rows})
    return [
        f"{fleets} fleets, {len(rows)} runs, {dates[0]} to {dates[-1]}, on: {'; '.join(machines)}.",
        "",
        "Written by `benchmarks/solvers/summarise.py` from `results.jsonl`; `suite.py` has the fleets. Bounds",
        "are relative to the predictor of the search. A bound *by enumeration* holds if a bin that",
        "contains an infeasible one is infeasible; an *estimate* holds unless the search missed a bin",
        "better by more than its margin. Gap: (GPUs − bound) / GPUs.",
        *earlier(rows),
    ]


def earlier(rows: Sequence[Row]) -> list[str]:
    """How many runs were made with profiles that have been fitted anew since."""
    present = {name: packer.load_profile(name).fingerprint for name in {row["profile"] for row in rows}}
    old = sum(row["fingerprint"] != present[row["profile"]] for row in rows)
    return ["", f"{old} runs are of profiles that were fitted anew since."] if old else []


def counting(rows: Sequence[Row]) -> list[str]:
    """Fewest GPUs: greedy against the paper's, auto against greedy, bounds and gaps."""
    plans = by_instance(rows, "gpus")
    paper = pairs(plans, "greedy", "greedy-paper")
    auto = pairs(plans, "auto", "greedy")
    autos = [each["auto"] for each in plans.values() if complete(each.get("auto"))]
    gaps = [gap(row) for row in autos]
    small = [row for row in autos if row["adapters"] <= 256]
    hard = [row for row in small if row["gpus"] > 1]
    proven = [row for row in small if row["status"] == "optimal"]
    enumerated = [row for row in proven if row["details"].get("bound_by_enumeration")]
    rescued = sum(complete(each.get("greedy")) and not complete(each.get("greedy-paper")) for each in plans.values())
    lines = [
        ("greedy needs more GPUs than greedy-paper", count(paper, lambda a, b: a > b)),
        ("greedy needs fewer GPUs than greedy-paper", count(paper, lambda a, b: a < b)),
        ("greedy-paper finds no plan, greedy does", f"{rescued} of {len(plans)}"),
        ("auto needs more GPUs than greedy", count(auto, lambda a, b: a > b)),
        ("auto needs fewer GPUs than greedy", count(auto, lambda a, b: a < b)),
    ]
    if gaps:
        lines += [
            ("gap of auto, median", f"{statistics.median(gaps):.2%}"),
            ("gap of auto, 90th percentile", f"{percentile(gaps, 0.9):.2%}"),
            ("gap of auto, largest", f"{max(gaps):.2%}"),
            ("optimal, ≤ 256 adapters", f"{len(proven)} of {len(small)}"),
            ("… of these, bound by enumeration", f"{len(enumerated)} of {len(proven)}"),
            ("optimal, ≤ 256 adapters and more than one GPU", f"{sum(r in proven for r in hard)} of {len(hard)}"),
        ]
    checks = sum(row["details"].get("dominance_checks") or 0 for row in rows)
    wrong = sum(row["details"].get("dominance_violations") or 0 for row in rows)
    lines.append(("inferences by dominance that the predictor contradicts", f"{wrong} of {checks} checked"))
    return ["### Fewest GPUs", "", *table(("what", "result"), lines), ""]


def verified(rows: Sequence[Row]) -> list[str]:
    """Bins that the twin confirms with fresh seeds."""
    lines = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        mine = [row for row in rows if row["solver"] == solver]
        evaluated = sum(row.get("evaluated", 0) for row in mine)
        starved = sum(row.get("starved", 0) for row in mine)
        memory = sum(row.get("memory_errors", 0) for row in mine)
        good = f"{(evaluated - starved - memory) / evaluated:.2%}" if evaluated else "–"
        failed = sum(not complete(row) for row in mine)
        lines.append((solver, len(mine), failed, evaluated, starved, memory, good))
    head = ("solver", "runs", "no full plan", "bins evaluated", "starved", "memory errors", "confirmed")
    return ["### Bins confirmed by the twin on a fresh seed", "", *table(head, lines), ""]


def latency(rows: Sequence[Row]) -> list[str]:
    """Latency on a fixed number of GPUs, measured by the twin."""
    plans = by_instance(rows, "latency")
    lines = []
    for baseline in ("random", "spread", "dlora"):
        both = [
            (each["spread-refined"], each[baseline])
            for each in plans.values()
            if all("twin_ttft_ms" in each.get(solver, {}) for solver in ("spread-refined", baseline))
        ]
        if not both:
            continue
        worse_ttft = sum(a["twin_ttft_ms"] > 1.005 * b["twin_ttft_ms"] for a, b in both)
        worse_itl = sum(a["twin_itl_ms"] > 1.005 * b["twin_itl_ms"] for a, b in both)
        ttft = statistics.mean(a["twin_ttft_ms"] / b["twin_ttft_ms"] for a, b in both) - 1.0
        itl = statistics.mean(a["twin_itl_ms"] / b["twin_itl_ms"] for a, b in both) - 1.0
        lines.append((baseline, len(both), f"{ttft:+.1%}", f"{itl:+.1%}", worse_ttft, worse_itl))
    head = ("spread-refined against", "fleets", "TTFT, mean", "ITL, mean", "TTFT worse by > 0.5 %", "ITL worse")
    return ["### Latency on 1.5 × greedy's GPUs, by the twin", "", *table(head, lines), ""] if lines else []


def instances(rows: Sequence[Row]) -> list[str]:
    """One line per fleet."""
    lines = []
    for name, each in by_instance(rows, "gpus").items():
        auto = each.get("auto")
        cells = [str(each[s]["gpus"]) if complete(each.get(s)) else "none" for s in ("greedy-paper", "greedy", "auto")]
        if auto is None or not complete(auto):
            lines.append((name, *cells, "", "", "", ""))
            continue
        how = "enumeration" if auto["details"].get("bound_by_enumeration") else "search"
        greedy_s = each["greedy"]["wall_s"] if "greedy" in each else float("nan")
        bound = "–" if auto["bound"] is None else f"{auto['bound']:g} ({how})"
        lines.append((name, *cells, bound, f"{gap(auto):.1%}", f"{greedy_s:.2f}", f"{auto['wall_s']:.1f}"))
    head = ("fleet", "greedy-paper", "greedy", "auto", "bound", "gap", "greedy, s", "auto, s")
    return ["### Fleets", "", *table(head, lines)]


def by_instance(rows: Iterable[Row], objective: str) -> dict[str, dict[str, Row]]:
    """Instance → solver → row."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if row["objective"] == objective:
            found.setdefault(row["instance"], {})[row["solver"]] = row
    return found


def complete(row: Row | None) -> bool:
    """Whether the plan has a place for every adapter and passes its own predictor."""
    return row is not None and row["status"] in ("feasible", "optimal")


def pairs(plans: dict[str, dict[str, Row]], left: str, right: str) -> list[tuple[int, int]]:
    """GPUs of two solvers where both have a plan."""
    return [
        (each[left]["gpus"], each[right]["gpus"])
        for each in plans.values()
        if complete(each.get(left)) and complete(each.get(right))
    ]


def count(both: list[tuple[int, int]], holds: Callable[[int, int], bool]) -> str:
    """How often it holds, of how many."""
    return f"{sum(holds(a, b) for a, b in both)} of {len(both)}"


def gap(row: Row) -> float:
    """(GPUs − bound) / GPUs; 1 without a bound."""
    return max(0.0, (row["gpus"] - (row["bound"] or 0.0)) / row["gpus"])


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """A markdown table."""
    rows = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows]


def speeds(path: Path) -> dict[str, Any]:
    """What `speed.py` wrote, or nothing."""
    found: dict[str, Any] = json.loads(path.read_text("utf-8")) if path.exists() else {}
    return found


if __name__ == "__main__":
    main()
