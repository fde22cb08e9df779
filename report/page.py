"""A plan's report as a file: rates grown, a comparison read, the page written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from packer.errors import FileFormatError, reader, shown
from packer.io.documents import parse_json
from packer.io.files import read_text, write_text
from packer.plan import Plan
from packer.report.growth import Growth, growth_of
from packer.report.render import render_report
from packer.solvers.evaluator import Evaluator
from packer.twin.hours import with_adapters

DEFAULT_CURVES = 6
MOST_GPUS = 256
"""Above, latencies of adapters are shown only if the plan has them: an hour of a server takes up to a tenth of a
second."""


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    predictor: str | None = None,
    curves: int = DEFAULT_CURVES,
    comparison: Sequence[Mapping[str, object]] = (),
    seed: int = 0,
    force: bool = True,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> Growth | None:
    """Write the page, atomically, and return the growth that it shows.

    Latencies of adapters come from a simulated hour.

    `predictor`, `seed`: what evaluates the growing rates; None: the plan's predictor.
    `curves`: for how many GPUs the growth of all rates is drawn, the slowest first; 0 for none.
    `comparison`: rows of `packer compare --json` (`read_comparison`), shown as they are.
    """
    growth = None
    if curves and plan.bins:
        name = predictor or plan.predictor
        evaluator = Evaluator.load(name, list(dict.fromkeys(item.profile for item in plan.bins)), seed=seed)
        growth = growth_of(plan, evaluator.evaluate, predictor=name, limit=curves, progress=progress)
    progress("latencies of adapters", 0, 0)
    shown = with_adapters(plan) if plan.n_gpus <= MOST_GPUS else plan
    write_text(path, render_report(shown, growth=growth, comparison=comparison), force=force)
    return growth


@reader
def read_comparison(path: str | os.PathLike[str]) -> Sequence[Mapping[str, object]]:
    """Rows of a comparison: a JSON list of flat objects with the same keys, or such a list under `rows`."""
    data = parse_json(read_text(path))
    rows = data.get("rows") if isinstance(data, dict) else data
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or any(row.keys() != rows[0].keys() for row in rows)
    ):
        raise FileFormatError(f"expected a list of rows with the same keys, got {shown(data)}.")
    for number, row in enumerate(rows, start=1):
        for key, value in row.items():
            if not isinstance(value, str | int | float | None):
                raise FileFormatError(
                    f"expected text, a number, true, false or null in each cell, got {shown(value)} as "
                    f"{shown(key)} of entry {number}."
                )
    return rows
