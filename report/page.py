"""A plan's report as a file: a comparison read, the page written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from packer.errors import FileFormatError, shown
from packer.io.documents import parse_json
from packer.io.files import read_text, write_text
from packer.plan import Plan
from packer.report.render import render_report
from packer.twin.hours import with_adapters

MOST_GPUS = 256
"""Above, latencies of adapters are shown only if the plan has them: an hour of a server takes up to a tenth of a
second."""


def write_report(
    plan: Plan,
    path: str | os.PathLike[str],
    *,
    comparison: Sequence[Mapping[str, object]] = (),
    force: bool = True,
) -> None:
    """Write the page, atomically; latencies of adapters are those of a simulated hour.

    `comparison`: rows of `packer compare --json` (`read_comparison`), shown as they are.
    """
    shown = with_adapters(plan) if plan.n_gpus <= MOST_GPUS else plan
    write_text(path, render_report(shown, comparison=comparison), force=force)


def read_comparison(path: str | os.PathLike[str]) -> Sequence[Mapping[str, object]]:
    """Rows of a comparison: a JSON list of flat objects with the same keys, or such a list under `rows`."""
    data = parse_json(read_text(path), path)
    rows = data.get("rows") if isinstance(data, dict) else data
    if (
        not isinstance(rows, list)
        or not all(isinstance(row, dict) for row in rows)
        or any(row.keys() != rows[0].keys() for row in rows)
    ):
        raise FileFormatError(f"expected a list of rows with the same keys, got {shown(data)}.", path=path)
    for number, row in enumerate(rows, start=1):
        for key, value in row.items():
            if not isinstance(value, str | int | float | None):
                raise FileFormatError(
                    f"expected text, a number, true, false or null in each cell, got {shown(value)} as "
                    f"{shown(key)} of entry {number}.",
                    path=path,
                )
    return rows
