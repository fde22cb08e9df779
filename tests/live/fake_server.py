"""A small server with vLLM's protocol, with faults on demand; standard library and aiohttp only.

It ignores vLLM's flags that it doesn't know. Environment: FAKE_FAULT, one of

    die:N        exit with status 3 after N answered requests
    hang:N       stop answering (streams stall) after N answered requests
    http500      every completion answers 500
    refuse:NAME  completions of that adapter answer 404
    no-metrics   /metrics answers 404
    bad-metrics  a byte of /metrics is not UTF-8, a line is damaged, counts are no numbers
    big-metrics  /metrics never ends
    restart      counters fall during a run
    key          only requests with the authorization of FAKE_KEY are answered; errors repeat the key
    renamed      /metrics has other names
    memory       print vLLM's out-of-memory message and exit at start
    port         print that the address is in use and exit, the first FAKE_PORT_FAILURES starts
    slow-start   never become healthy
    children     start a child process that ignores SIGTERM
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from aiohttp import web

PAGE = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0"}} {running}
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0"}} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0"}} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{{engine="0"}} 0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0"}} {tokens}
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{{block_size="32",num_gpu_blocks="129"}} 1
"""


class Fake:
    """Answers requests token by token, `step_s` apart, whatever the batch."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        fault = os.environ.get("FAKE_FAULT", "")
        self.fault, _, self.detail = fault.partition(":")
        self.step_s = float(os.environ.get("FAKE_STEP_S", "0.002"))
        self.names = ["base", *(json.loads(part)["name"] for part in arguments.lora_modules)]
        self.running = self.tokens = self.answered = self.looks = 0

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response(status=503 if self.fault == "slow-start" else 200)

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0+fake"})

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.names]})

    async def _metrics(self, _request: web.Request) -> web.Response:
        if self.fault == "no-metrics":
            return web.Response(status=404)
        if self.fault == "big-metrics":
            return await self._endless(_request, b"vllm:num_requests_running 1\n" * 1000)
        page = PAGE.format(running=self.running, tokens=self.tokens)
        if self.fault == "bad-metrics":
            bad = (
                page.replace('num_gpu_blocks="129"', 'num_gpu_blocks="²"').encode()
                + b"vllm:num_preemptions_total{ \n"
            )
            return web.Response(body=b"# \xff\xfe\n" + bad)
        if self.fault == "restart":
            self.looks += 1
            page = page.replace(
                'preemptions_total{engine="0"} 0', f'preemptions_total{{engine="0"}} {9 - self.looks}'
            )
        return web.Response(text=page.replace("vllm:", "vllm:new_") if self.fault == "renamed" else page)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self.fault == "http500":
            return web.json_response({"error": {"message": "internal"}}, status=500)
        given = request.headers.get("Authorization", "")
        if self.fault == "key" and given != os.environ["FAKE_KEY"]:
            return web.json_response({"error": {"message": f"wrong key: {given[7:]}"}}, status=401)
        refused = self.fault == "refuse" and body["model"] == self.detail
        if refused or body["model"] not in self.names:
            return web.json_response({"error": {"message": f"no model {body['model']}"}}, status=404)
        if self.fault == "die" and self.answered >= int(self.detail):
            os._exit(3)
        if self.fault == "hang" and self.answered >= int(self.detail):
            await asyncio.sleep(3600)
        return await self._stream(request, body)

    async def _stream(self, request: web.Request, body: dict) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            n = body["max_tokens"]
            for _ in range(n):
                await asyncio.sleep(self.step_s)
                self.tokens += 1
                await self._send(response, {"choices": [{"text": "w", "index": 0}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
            await response.write(
                b"data: "
                + json.dumps({"choices": [], "usage": usage}, separators=(",", ":")).encode()
                + b"\n\n"
            )
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        self.answered += 1
        return response

    async def _endless(self, request: web.Request, piece: bytes, status: int = 200) -> web.StreamResponse:
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        while True:
            await response.write(piece)

    async def _send(self, response: web.StreamResponse, event: dict) -> None:
        await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


def fail_to_bind() -> None:
    """Fail as if the port were taken, as often as given."""
    counter = Path(os.environ["FAKE_COUNTER"])
    starts = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(starts + 1))
    if starts < int(os.environ["FAKE_PORT_FAILURES"]):
        sys.stdout.write("ERROR: [Errno 98] address already in use\n")
        sys.exit(1)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int)
    parser.add_argument("--lora-modules", nargs="*", default=[])
    arguments, _rest = parser.parse_known_args()
    fake = Fake(arguments)
    if fake.fault == "memory":
        sys.stdout.write("ValueError: No available memory for the cache blocks. Try increasing\n")
        sys.exit(1)
    if fake.fault == "port":
        fail_to_bind()
    if fake.fault == "children":
        code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code])
        Path(os.environ["FAKE_COUNTER"]).write_text(str(child.pid))
        time.sleep(0.3)
    app = web.Application()
    app.router.add_get("/health", fake._health)
    app.router.add_get("/version", fake._version)
    app.router.add_get("/v1/models", fake._models)
    app.router.add_get("/metrics", fake._metrics)
    app.router.add_post("/v1/completions", fake._completions)
    web.run_app(
        app, host="127.0.0.1", port=arguments.port, print=None, handle_signals=True, shutdown_timeout=0.05
    )


if __name__ == "__main__":
    main()
