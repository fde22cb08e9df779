"""The drift of a plan as Prometheus metrics: predicted figures of each server at the rates measured, and the advice.

What the servers really do is in their own metrics; `packer export --format grafana` draws both.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from packer.errors import OutputError, ValidationError, shown
from packer.operate.drift import Drift

ADVICE = ("keep", "watch", "replan")
SERVER_METRICS = {
    "packer_server_offered_tok_s": ("offered_tok_s", "Offered load at the measured rates, tok/s."),
    "packer_server_predicted_throughput_tok_s": (
        "total_token_throughput",
        "Predicted throughput at the measured rates, tok/s.",
    ),
    "packer_server_predicted_ttft_ms": ("mean_ttft_ms", "Predicted mean time to first token, ms."),
    "packer_server_predicted_itl_ms": ("mean_itl_ms", "Predicted mean inter-token latency, ms."),
    "packer_server_predicted_kv_cache_tokens": ("kv_cache_tokens", "Capacity of the KV cache, tokens."),
    "packer_server_starved": ("starved", "1 where the server is predicted to starve at the measured rates."),
    "packer_server_memory_error": ("memory_error", "1 where the server is predicted not to start."),
}
"""Metric with the label `server` → figure of an evaluation, and its help."""
PLAN_METRICS = {
    "packer_plan_offered_tok_s": "Offered load of the fleet, tok/s, as planned and as measured.",
    "packer_plan_advice": "1 for the advice that holds: keep, watch or replan.",
    "packer_plan_drifted_adapters": "Adapters whose rate differs from the planned one by more than the tolerance.",
    "packer_plan_new_adapters": "Adapters seen that have no server.",
    "packer_plan_silent_adapters": "Adapters of the plan without a request.",
    "packer_server_headroom": "Growth of every rate until the server breaks, as a factor; 1 is none.",
    "packer_watch_last_success_timestamp_seconds": "When traffic was last read, s since 1970.",
}
"""The other metrics and their help."""


def metrics_text(found: Drift, read_at_s: float) -> str:
    """The drift in Prometheus's text format (version 0.0.4); `read_at_s`: when traffic was read, s since 1970."""
    plan = found.evaluation.plan
    servers = [f"gpu-{gpu}" for gpu in found.evaluation.gpus]
    lines: list[str] = []
    for name, (figure, text) in SERVER_METRICS.items():
        values = [float(getattr(row, figure)) for row in plan.evaluations]
        lines += _family(name, text, ((_label("server", s), v) for s, v in zip(servers, values, strict=True)))
    rows: dict[str, list[tuple[str, float]]] = {
        "packer_server_headroom": [
            (_label("server", server), math.nan if factor is None else factor)
            for server, factor in zip(servers, plan.headroom, strict=True)
        ],
        "packer_plan_offered_tok_s": [
            (_label("kind", "planned"), found.planned_tok_s),
            (_label("kind", "measured"), found.measured_tok_s),
        ],
        "packer_plan_advice": [(_label("advice", each), float(each == found.advice)) for each in ADVICE],
        "packer_plan_drifted_adapters": [("", float(len(found.drifted)))],
        "packer_plan_new_adapters": [("", float(len(found.new_adapters)))],
        "packer_plan_silent_adapters": [("", float(len(found.silent_adapters)))],
        "packer_watch_last_success_timestamp_seconds": [("", read_at_s)],
    }
    for name, text in PLAN_METRICS.items():
        lines += _family(name, text, rows[name])
    return "\n".join(lines) + "\n"


def _label(name: str, value: str) -> str:
    return f'{{{name}="{value}"}}'


def _family(name: str, text: str, rows: Iterable[tuple[str, float]]) -> list[str]:
    """One gauge; figures that do not exist (NaN) are left out."""
    samples = [f"{name}{label} {value!r}" for label, value in rows if not math.isnan(value)]
    samples = [line.replace(" inf", " +Inf") for line in samples]
    return [f"# HELP {name} {text}", f"# TYPE {name} gauge", *samples]


class Exporter:
    """Serves a text at /metrics until it is closed."""

    def __init__(self) -> None:
        self.text = ""

    @contextmanager
    def listen(self, address: str) -> Iterator[int]:
        """Serve on `HOST:PORT` (port 0: any free one) in a thread; gives the port.

        Raises `ValidationError`: the address is not a host and a port; `OutputError`: nothing can listen there.
        """
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
                """Say nothing of a scrape."""

        try:
            server = ThreadingHTTPServer((host, port), Handler)
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
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValidationError(f"Expected HOST:PORT, as 127.0.0.1:9877, got {shown(address)}.")
    return host.strip("[]"), int(port)
