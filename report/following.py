"""The plan against reality while it is followed: a page, and metrics for Prometheus."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from packer.report.templates import render
from packer.words import visible


def live_metrics(following: Any, rows: Sequence[Any]) -> str:
    """The metrics of `packer live follow` in Prometheus's text format.

    `following`: a `packer.operate.follow.Following`; `rows`: its `rows_of`.
    """
    from packer.report.drift import sample

    def of_servers(name: str) -> list[tuple[str, float | None]]:
        return [(f'server="{row.name}"', getattr(row, name)) for row in rows]

    plan = (
        f'plan={json.dumps(visible(following.fleet.name), ensure_ascii=False)},version="{following.version}"'
    )
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
