"""The picture of a comparison of solvers: GPUs, throughput, TTFT, ITL and run time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from packer.io.shipped import table
from packer.report.figures import Bars, Figure, Line, Panel, Scatter, Series, known
from packer.report.palette import SERIES

COLUMNS, PANELS = table("packer.report", "comparison.toml").values()
"""Columns that the report shows, and what it calls them; panels of the picture: name, unit, whether logarithmic."""

Row = Mapping[str, Any]


def comparison_figure(rows: Sequence[Row], *, title: str) -> Figure:
    """Curves over the number of adapters where there are several, else bars.

    `rows`: as `packer.planning.compare.Result.to_dict` gives them.
    `title`: what was compared.
    """
    sizes = sorted({row["adapters"] for row in rows})
    draw = _curves if len(sizes) > 1 else _bars
    sources = sorted({row["reference"] for row in rows if row["reference"]})
    caption = f"Throughput and latencies as simulated or measured by {', '.join(sources)}." if sources else ""
    failing = [
        f"{label}: {row['outcome'].partition(':')[0]}"
        for label, row in zip(labels(rows), rows, strict=True)
        if row["outcome"] != "ok"
    ]
    if len(sizes) == 1 and failing:
        caption += f" ✗ {'; '.join(failing)}."
    elif failing:
        caption += " Points called failing: starved, memory error, unplaced adapters or refused."
    return Figure(
        [draw(rows, key, *panel) for key, panel in PANELS.items()], title=title, caption=caption.strip()
    )


def labels(rows: Sequence[Row]) -> list[str]:
    """A label for each row from what differs between rows: solver, and objective or predictor if several."""
    parts = [key for key in ("objective", "predictor") if len({row[key] for row in rows}) > 1]
    return [" · ".join([row["solver"], *(row[key] for key in parts)]) for row in rows]


def _bars(rows: Sequence[Row], key: str, name: str, unit: str, _log: bool) -> Panel:
    failed = [row["outcome"] != "ok" for row in rows]
    names = [f"{label} ✗" if bad else label for label, bad in zip(labels(rows), failed, strict=True)]
    return Panel([Bars(names, [known(row[key]) for row in rows], failed=failed)], title=name, y_label=unit)


def _curves(rows: Sequence[Row], key: str, name: str, unit: str, log: bool) -> Panel:
    by_label: dict[str, list[Row]] = {}
    for label, row in zip(labels(rows), rows, strict=True):
        by_label.setdefault(label, []).append(row)
    series: list[Series] = []
    for k, (label, part) in enumerate(by_label.items()):
        part = sorted(part, key=lambda row: row["adapters"])
        x = [row["adapters"] for row in part]
        y = [known(row[key]) for row in part]
        series.append(Line(x, y, label, color=k % len(SERIES), dashed=k >= len(SERIES), markers=True))
        bad = [row for row in part if row["outcome"] != "ok" and not math.isnan(known(row[key]))]
        if bad:
            series.append(
                Scatter(
                    [row["adapters"] for row in bad],
                    [known(row[key]) for row in bad],
                    f"{label}: failing",
                    color=k % len(SERIES),
                    texts=[row["outcome"] for row in bad],
                )
            )
    return Panel(series, title=name, x_label="adapters", y_label=unit, y_log=log)
