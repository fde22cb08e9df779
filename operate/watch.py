"""Serves texts to Prometheus, such as the metrics of `packer.report.metrics`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from packer.errors import OutputError, ValidationError, shown
from packer.io.web import bare


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
                """Do not log a scrape."""

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
    if not host or "@" in host or not port.isascii() or not port.isdecimal() or int(port) > 65_535:
        raise ValidationError(f"Expected HOST:PORT, as 127.0.0.1:9877, got {shown(bare(address))}.")
    return host.strip("[]"), int(port)
