"""The systems of the papers beside what their authors published.

uv run python benchmarks/systems/run.py                       # print the tables of all papers
uv run python benchmarks/systems/run.py llmstation            # … of one
uv run python benchmarks/systems/run.py --write               # results.json, results.md and docs/systems.md
uv run python benchmarks/systems/run.py --seeds 1 caraserve   # quickly
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from packer.io.files import write_text
from packer.io.shipped import read_named
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rows import MARKS, Section, markdown  # noqa: E402

PAPERS = ("slora", "caraserve", "rock", "llmstation", "mainpaper", "dlora", "routers")
"""Modules with a function `section(seeds)`, in the order of the document."""


def measured(name: str, seeds: int) -> dict[str, Any]:
    """A section with the shipped systems that it ran, and the CPU time that it took."""
    started = time.process_time()
    make: Callable[[int], Section] = import_module(name).section
    read: set[str] = set()

    def noted(kind: str, system: str, *folders: str) -> tuple[str, str]:
        read.add(str(system))
        return read_named(kind, system, *folders)

    with patch("packer.twin.cluster.system.read_named", noted):
        section = make(seeds)
    section = replace(section, presets=sorted(read))
    print(markdown(section), flush=True)
    return section.to_dict() | {
        "seeds": seeds,
        "date": date.today().isoformat(),
        "cpu_s": round(time.process_time() - started, 1),
        "text": markdown(section),
    }


def summary(results: dict[str, Any]) -> str:
    """One line of counts, and the same for each paper."""
    lines, totals = [], Counter[str]()
    for name in PAPERS:
        if name in results:
            counts = Counter(_status(row) for row in results[name]["rows"])
            totals += counts
            cells = " | ".join(str(counts[status]) for status in STATUS)
            lines.append(
                f"| {results[name]['title']} | {cells} | {results[name]['cpu_s']:.0f} | {results[name]['date']} |"
            )
    first = (
        f"Of {totals['kept'] + totals['contradicted']} published claims that a run could contradict "
        f"{totals['kept']} are kept and {totals['contradicted']} contradicted; {totals['untestable']} can't be tested, "
        f"and {totals['fitted']} are fitted or true by construction and count for nothing."
    )
    heads = "| paper | " + " | ".join(STATUS) + " | CPU s | run on |"
    return "\n".join([first, "", heads, "|---" * (len(STATUS) + 3) + "|", *lines]) + "\n"


STATUS = ("kept", "contradicted", "untestable", "fitted", "shown")


def _status(row: dict[str, Any]) -> str:
    """How a row counts."""
    if row["basis"] != "claim":
        return str(row["basis"])
    return "shown" if row["kept"] is None else "kept" if row["kept"] else "contradicted"


def missed(results: dict[str, Any]) -> str:
    """The claims that are contradicted."""
    rows = [(results[name]["title"], row) for name in PAPERS if name in results for row in results[name]["rows"]]
    lines = [
        f"- {title}: {row['what']}: published {row['published']}; simulated {row['ours']}"
        + (f" ({row['note']})" if row["note"] else "")
        for title, row in rows
        if _status(row) == "contradicted"
    ]
    return "\n".join(["Contradicted:", "", *lines]) + "\n"


RESULTS = "https://github.com/adapter-packer/adapter-packer/tree/main/benchmarks/systems/results.md"


def page(results: dict[str, Any]) -> str:
    """docs/systems.md: the introduction in intro.md and the summary."""
    last = f"Every row with its rule, its figures and the reason of each contradiction: [results]({RESULTS}).\n"
    return "\n".join([(HERE / "intro.md").read_text("utf-8"), summary(results), last])


def document(results: dict[str, Any]) -> str:
    """results.md: the page, how to read the rows (rules.md), what is contradicted, and every section."""
    marks = "".join(f"- {text}\n" for text in MARKS.values())
    parts = [
        (HERE / "intro.md").read_text("utf-8"),
        (HERE / "rules.md").read_text("utf-8").replace("{marks}", marks),
        summary(results),
        missed(results),
        *(results[name]["text"] for name in PAPERS if name in results),
    ]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def main() -> None:
    """Simulate, print, and with --write keep."""
    parser = argparse.ArgumentParser(description="Simulate the systems of the papers.")
    parser.add_argument("papers", nargs="*", choices=(*PAPERS, []), help="which ones; all by default")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="keep the results and rewrite docs/systems.md")
    options = parser.parse_args()
    found = {name: measured(name, options.seeds) for name in options.papers or PAPERS}
    path = HERE / "results.json"
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    both = kept | found
    results = {name: both[name] for name in PAPERS if name in both}
    print(summary(results))
    if options.write:
        write_text(path, record_text(results) + "\n", force=True)
        write_text(HERE / "results.md", document(results).replace("](", "](../../docs/"), force=True)
        write_text(HERE.parent.parent / "docs" / "systems.md", page(results), force=True)


if __name__ == "__main__":
    main()
