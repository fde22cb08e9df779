"""The drift of a plan as Prometheus metrics: predicted figures of each server at the rates measured, and the advice.

What the servers really do is in their own metrics; `packer export --format grafana` draws both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

from packer.plan import Plan
from packer.report.templates import render


def metrics_text(plan: Plan, drift: Mapping[str, Any], read_at_s: float) -> str:
    """The drift in Prometheus's text format (version 0.0.4).

    `plan`: as evaluated at the measured rates.
    `drift`: as `packer.operate.drift.Drift.to_dict` gives it.
    `read_at_s`: when traffic was read, s since 1970.
    """
    labels = [f'server="gpu-{row["server"]}"' for row in drift["servers"]]

    def of_servers(figure: str) -> list[tuple[str, float]]:
        return [(label, getattr(row, figure)) for label, row in zip(labels, plan.evaluations, strict=True)]

    headroom = list(zip(labels, plan.headroom, strict=True))
    return render(
        "metrics.txt",
        drift=drift,
        of_servers=of_servers,
        headroom=headroom,
        read_at_s=read_at_s,
        sample=sample,
    )


def sample(name: str, labels: str, value: float | None) -> Markup:
    """A line of a gauge; nothing for a figure that does not exist."""
    if value is None or math.isnan(value):
        return Markup("")
    text = f"{float(value)!r}".replace("inf", "+Inf")
    return Markup(f"{name}{{{labels}}} {text}\n" if labels else f"{name} {text}\n")
