"""A running plan as Prometheus metrics, served by `Exporter`, and as a page: predictions at the measured rates, and the
advice. The servers export what they measure themselves; `packer export --format grafana` draws both."""

from __future__ import annotations

import json
import math
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from markupsafe import Markup

from packer.errors import OutputError, ValidationError, shown
from packer.io.web import bare
from packer.plan import Plan
from packer.report.templates import render
from packer.words import counted, visible


def metrics_text(plan: Plan, drift: Mapping[str, Any], read_at_s: float) -> str:
    """The drift in Prometheus's text format (version 0.0.4).

    `plan`: the plan as evaluated at the measured rates.
    `drift`: as `packer.operate.drift.Drift.to_dict` gives it.
    `read_at_s`: when traffic was read, s since 1970.
    """
    labels = [f'server="gpu-{row["server"]}"' for row in drift["servers"]]

    def of_servers(figure: str) -> list[tuple[str, float]]:
        return [(label, getattr(row, figure)) for label, row in zip(labels, plan.evaluations, strict=True)]

    # A server that breaks at the measured rates is the one to raise an alarm: it has no factor, but a sample.
    headroom = [
        (label, 0.0 if factor is None and (plan.rooms or not row.feasible) else factor)
        for label, factor, row in zip(labels, plan.headroom, plan.evaluations, strict=True)
    ]
    given = {"drift": drift, "of_servers": of_servers, "read_at_s": read_at_s, "sample": sample}
    return render("metrics.txt", headroom=headroom, **given)


def sample(name: str, labels: str, value: float | None) -> Markup:
    """A line of a gauge; empty for a figure that is None or NaN."""
    if value is None or math.isnan(value):
        return Markup("")
    text = f"{float(value)!r}".replace("inf", "+Inf")
    return Markup(f"{name}{{{labels}}} {text}\n" if labels else f"{name} {text}\n")


def live_metrics(following: Any, rows: Sequence[Any]) -> str:
    """Metrics of a `packer.operate.follow.Following`, with its `rows_of`, in Prometheus's text format."""

    def quoted(name: str) -> str:
        return json.dumps(visible(name), ensure_ascii=False)

    def of_servers(name: str) -> list[tuple[str, float | None]]:
        return [(f"server={quoted(row.name)}", getattr(row, name)) for row in rows]

    plan = f'plan={quoted(following.fleet.name)},version="{following.version}"'
    return render("live_metrics.txt", following=following, of_servers=of_servers, sample=sample, plan=plan)


def live_page(following: Any, rows: Sequence[Any]) -> str:
    """The page of `packer live follow`: servers, and changes with their reasons, the latest first."""
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
        error=visible(following.last_error), counted=counted,
    )  # fmt: skip


class Exporter:
    """Serves a text at /metrics until it is closed."""

    def __init__(self) -> None:
        self.text = ""

    @contextmanager
    def listen(self, address: str) -> Iterator[int]:
        """Serve on HOST:PORT (0: any) in a thread, and yield the port; raises `ValidationError`, `OutputError`."""
        host, port = parse_address(address)
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                """Answer a scrape."""
                known = self.path.partition("?")[0] == "/metrics"
                body = exporter.text.encode() if known else b"packer: metrics are at /metrics\n"
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
                """Do not log a scrape."""

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            server = Server((host, port), Handler)
        except (OSError, UnicodeError) as error:
            raise OutputError(f"{address}: nothing can listen there: {error}.") from None
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            server.server_close()


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`; raises `ValidationError`."""
    found = re.fullmatch(r"(\[[^]@]+\]|[^][:@]+):([0-9]{1,5})", address)
    if found is None or int(found[2]) > 65_535:
        raise ValidationError(f"Expected HOST:PORT, as 127.0.0.1:9877 or [::1]:9877, got {shown(bare(address))}.")
    return found[1].strip("[]"), int(found[2])


@dataclass(frozen=True)
class ServerRow:
    """One server: adapters, load, and measured and predicted figures. Times in ms, loads in tok/s; the last three
    fields are measured since its adapters last changed."""

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
    prompt_tokens: float | None
    output_tokens: float | None
    prefix_hit_share: float | None

    @property
    def used(self) -> float | None:
        """Share of the capacity `holds_tok_s` that is in use."""
        return self.load_tok_s / self.holds_tok_s if self.holds_tok_s else None


def rows_of(following: Any) -> list[ServerRow]:
    """The present servers of a `packer.operate.follow.Following`."""
    keeper, found = following.keeper, []
    for s, server in enumerate(following.acting.servers):
        own = following.own_load(s, following.load)
        run = keeper.capacity.expected(s, own) if own else None
        ready = bool(following.ready[s])
        sample = following.traffic.sampled(s, keeper.requests.same_since_s(s))
        found.append(
            ServerRow(
                server.name, ready, len(following.holding[s]), len(own), float(sum(own.values())),
                float(keeper.caps([s])[0]) if ready and own else None,
                following.traffic.mean_ms(s, "ttft"), None if run is None else run.mean_ttft_ms,
                following.traffic.mean_ms(s, "itl"), None if run is None else run.mean_itl_ms,
                *(sample[1:4] if sample.requests else (None, None, None)),
            )
        )  # fmt: skip
    return found
