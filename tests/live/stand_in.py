"""A vLLM server in a thread, with its adapters' protocol and faults at chosen calls.

A fault is (path, n, kind): the n-th call of that path, from 1, or every one for 0. Kinds:

    500         an error, and nothing is done          500-after    done, and an error all the same
    hang        no answer for longer than any limit    reset        the connection is cut, nothing is done
    reset-after done, and the connection is cut        slow         done after a while
    400         refused, as for a rank that is too large
    wrong-path  another adapter is loaded under this name
    no-token    an answer without a token              garbage      an answer that is no JSON
    kill        the process `victim` is killed first   kill-after   it is killed when it is done
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG_S, SLOW_S = 1.0, 0.1


class StandIn:
    """One server. `adapters`: name → path; `busy`: adapters with requests in flight; `calls`: what was asked;
    `raw`: by path, what to do with a request instead of an answer."""

    def __init__(self, adapters: dict[str, str] | None = None, base: str = "tiny", port: int = 0) -> None:
        self.adapters, self.base, self.busy = dict(adapters or {}), base, set[str]()
        self.faults: list[tuple[str, int, str]] = []
        self.calls: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.counts: Counter[str] = Counter()
        self.raw: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.victim, self.slots = 0, 4
        self.counters, self.longest = "vllm:prompt_tokens_total 0\nvllm:generation_tokens_total 0\n", 131072
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.answer(self, None)

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                form = "form" in self.headers.get("Content-Type", "")
                stand_in.answer(self, data if form else json.loads(data))

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # a client that is gone

        self.http = Server(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.http.server_port}"

    def close(self) -> None:
        """It listens no more."""
        self.http.shutdown()
        self.http.server_close()

    def answer(self, handler: BaseHTTPRequestHandler, body: Any) -> None:
        """Answer a request, with the fault of this call."""
        path = handler.path.partition("?")[0]
        self.counts[path] += 1
        self.calls.append((path, body))
        self.headers.append(dict(handler.headers))
        if path in self.raw:
            handler.close_connection = True
            self.raw[path](handler)
            return
        kind = next((k for p, n, k in self.faults if p == path and n in (0, self.counts[path])), "")
        if kind == "kill" and self.victim:
            os.kill(self.victim, signal.SIGKILL)
            time.sleep(HANG_S)
            return
        if kind == "hang":
            time.sleep(HANG_S)
        if kind in ("hang", "reset"):
            handler.close_connection = True
            return
        if kind == "slow":
            time.sleep(SLOW_S)
        if kind == "500":
            status, text = 500, json.dumps({"error": {"message": "internal"}})
        elif kind == "400":
            status, text = (400, json.dumps({"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16."}}))
        else:
            status, text = self._do(path, body, kind)
        if kind == "kill-after" and self.victim:
            os.kill(self.victim, signal.SIGKILL)
            time.sleep(HANG_S)
        if kind == "reset-after":
            handler.close_connection = True
            return
        if kind == "500-after":
            status, text = 500, json.dumps({"error": {"message": "internal"}})
        if kind == "garbage":
            text = "<html>"
        data = text.encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def _do(self, path: str, body: Any, kind: str) -> tuple[int, str]:
        if path == "/health":
            return 200, ""
        if path == "/version":
            return 200, '{"version": "0.32.0"}'
        if path == "/v1/models":
            cards = [{"id": self.base, "max_model_len": self.longest}]
            cards += [{"id": n, "root": p, "parent": self.base} for n, p in self.adapters.items()]
            return 200, json.dumps({"data": cards})
        if path == "/metrics":
            names = ",".join(sorted(self.busy))
            return 200, (
                f'vllm:num_requests_running{{engine="0"}} {len(self.busy)}\n'
                f'vllm:lora_requests_info{{max_lora="{self.slots}",running_lora_adapters="{names}",'
                f'waiting_lora_adapters=""}} {time.time()}\n{self.counters}'
            )
        name = str(body.get("lora_name", body.get("model")))
        if path == "/v1/load_lora_adapter":
            if name in self.adapters:
                return 400, json.dumps({"error": {"message": f"{name} has already been loaded"}})
            self.adapters[name] = "/other" if kind == "wrong-path" else body["lora_path"]
            return 200, f"Success: {name} added"
        if path == "/v1/unload_lora_adapter":
            if self.adapters.pop(name, None) is None:
                return 404, json.dumps({"error": {"message": f"{name} is not there"}})
            return 200, f"Success: {name} removed"
        if name not in self.adapters and name != self.base:
            return 404, json.dumps({"error": {"message": f"no model {name}"}})
        return 200, json.dumps({"choices": [] if kind == "no-token" else [{"text": "w"}]})
