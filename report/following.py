"""The plan against reality while it is followed: a page, and metrics for Prometheus."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from packer.report.templates import render
from packer.words import visible

if TYPE_CHECKING:
    from packer.operate.follow import Following


@dataclass(frozen=True)
class ServerRow:
    """One server: what it holds and has to do, beside what the twin says. Times in ms, loads in tok/s."""

    name: str
    ready: bool
    adapters: int
    routed: int
    load_tok_s: float
    holds_tok_s: float | None
    ttft_ms: float | None
    predicted_ttft_ms: float | None
    itl_ms: float | None
    predicted_itl_ms: float | None

    @property
    def used(self) -> float | None:
        """Share of what it holds that is in use."""
        return self.load_tok_s / self.holds_tok_s if self.holds_tok_s else None


def rows_of(following: Following) -> list[ServerRow]:
    """The servers now."""
    keeper, found = following.keeper, []
    for s, server in enumerate(following.acting.servers):
        own = following.own_load(s, following.load)
        run = keeper.capacity.run(keeper.kinds[s], own) if own else None
        ready = bool(following.ready[s])
        found.append(
            ServerRow(
                server.name, ready, len(keeper.held[s]), len(own), float(sum(own.values())),
                float(keeper.caps([s])[0]) if ready and own else None,
                following.traffic.mean_ms(s, "ttft"), None if run is None else run.mean_ttft_ms,
                following.traffic.mean_ms(s, "itl"), None if run is None else run.mean_itl_ms,
            )
        )  # fmt: skip
    return found


def live_metrics(following: Following, rows: list[ServerRow]) -> str:
    """The metrics of `packer live follow` in Prometheus's text format."""
    from packer.report.drift import sample

    def of_servers(name: str) -> list[tuple[str, float | None]]:
        return [(f'server="{row.name}"', getattr(row, name)) for row in rows]

    return render("live_metrics.txt", following=following, of_servers=of_servers, sample=sample)


def live_page(following: Following, rows: list[ServerRow]) -> str:
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
