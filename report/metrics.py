"""A running plan as Prometheus metrics and as a page: what is predicted at the rates measured, and the advice.

What the servers really do is in their own metrics; `packer export --format grafana` draws both.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from packer.plan import Plan
from packer.report.templates import render
from packer.words import visible


def metrics_text(plan: Plan, drift: Mapping[str, Any], read_at_s: float) -> str:
    """The drift in Prometheus's text format (version 0.0.4).

    `plan`: as evaluated at the measured rates.
    `drift`: as `packer.operate.drift.Drift.to_dict` gives it.
    `read_at_s`: when traffic was read, s since 1970.
    """
    labels = [f'server="gpu-{row["server"]}"' for row in drift["servers"]]

    def of_servers(figure: str) -> list[tuple[str, float]]:
        return [(label, getattr(row, figure)) for label, row in zip(labels, plan.evaluations, strict=True)]

    given = {"drift": drift, "of_servers": of_servers, "read_at_s": read_at_s, "sample": sample}
    return render("metrics.txt", headroom=list(zip(labels, plan.headroom, strict=True)), **given)


def sample(name: str, labels: str, value: float | None) -> Markup:
    """A line of a gauge; nothing for a figure that does not exist."""
    if value is None or math.isnan(value):
        return Markup("")
    text = f"{float(value)!r}".replace("inf", "+Inf")
    return Markup(f"{name}{{{labels}}} {text}\n" if labels else f"{name} {text}\n")


def live_metrics(following: Any, rows: Sequence[Any]) -> str:
    """The metrics of `packer live follow` in Prometheus's text format.

    `following`: a `packer.operate.follow.Following`; `rows`: its `rows_of`.
    """

    def of_servers(name: str) -> list[tuple[str, float | None]]:
        return [(f'server="{row.name}"', getattr(row, name)) for row in rows]

    name = json.dumps(visible(following.fleet.name), ensure_ascii=False)
    plan = f'plan={name},version="{following.version}"'
    return render("live_metrics.txt", following=following, of_servers=of_servers, sample=sample, plan=plan)


def live_page(following: Any, rows: Sequence[Any]) -> str:
    """The page: servers, and the changes with their reasons, the latest first."""
    history = [
        {
            "time": f"{datetime.fromtimestamp(each['time_s'], UTC):%Y-%m-%d %H:%M:%S}",
            "why": visible(each["why"]),
            "steps": [visible(step) for step in each["steps"][:20]],
            "more": max(0, len(each["steps"]) - 20),
            "failed": [visible(text) for text in each.get("failed", [])],
        }
        for each in reversed(following.log)
    ]
    return render(
        "live.html", following=following, rows=rows, history=history, title=visible(following.fleet.name),
        made=f"{datetime.fromtimestamp(following.looked_s or time.time(), UTC):%Y-%m-%d %H:%M:%S} UTC",
        error=visible(following.last_error),
    )  # fmt: skip
