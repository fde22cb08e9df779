"""A small server with vLLM's protocol, with faults on demand; it starts fast: standard library only.

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
from contextlib import suppress
from pathlib import Path

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

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of a connection, one after the other, until it is closed."""
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(writer, request.split(" ")[1], headers.get("authorization", ""), body)
        writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, given: str, body: bytes) -> None:
        if path == "/health":
            await _say(writer, 503 if self.fault == "slow-start" else 200)
        elif path == "/version":
            await _say(writer, 200, {"version": "0.32.0+fake"})
        elif path == "/v1/models":
            await _say(writer, 200, {"data": [{"id": name} for name in self.names]})
        elif path == "/metrics":
            await self._metrics(writer)
        elif path == "/v1/completions":
            await self._completions(writer, given, json.loads(body))
        else:
            await _say(writer, 404)

    async def _metrics(self, writer: asyncio.StreamWriter) -> None:
        page = PAGE.format(running=self.running, tokens=self.tokens).encode()
        if self.fault == "no-metrics":
            return await _say(writer, 404)
        if self.fault == "big-metrics":
            await _begin(writer)
            while True:
                await _send(writer, b"vllm:num_requests_running 1\n" * 1000)
        if self.fault == "bad-metrics":
            bad = page.replace(b'num_gpu_blocks="129"', 'num_gpu_blocks="²"'.encode())
            page = b"# \xff\xfe\n" + bad + b"vllm:num_preemptions_total{ \n"
        if self.fault == "restart":
            self.looks += 1
            counted = b'preemptions_total{engine="0"} '
            page = page.replace(counted + b"0", counted + str(9 - self.looks).encode())
        if self.fault == "renamed":
            page = page.replace(b"vllm:", b"vllm:new_")
        return await _say(writer, 200, page)

    async def _completions(self, writer: asyncio.StreamWriter, given: str, body: dict) -> None:
        if self.fault == "http500":
            return await _say(writer, 500, {"error": {"message": "internal"}})
        if self.fault == "key" and given != os.environ["FAKE_KEY"]:
            return await _say(writer, 401, {"error": {"message": f"wrong key: {given[7:]}"}})
        refused = self.fault == "refuse" and body["model"] == self.detail
        if refused or body["model"] not in self.names:
            return await _say(writer, 404, {"error": {"message": f"no model {body['model']}"}})
        if self.fault == "die" and self.answered >= int(self.detail):
            os._exit(3)
        if self.fault == "hang" and self.answered >= int(self.detail):
            await asyncio.sleep(3600)
        return await self._stream(writer, body)

    async def _stream(self, writer: asyncio.StreamWriter, body: dict) -> None:
        await _begin(writer)
        self.running += 1
        try:
            n = body["max_tokens"]
            for _ in range(n):
                await asyncio.sleep(self.step_s)
                self.tokens += 1
                await _event(writer, {"choices": [{"text": "w", "index": 0}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
            await _event(writer, {"choices": [], "usage": usage})
            await _send(writer, b"data: [DONE]\n\n")
            await _send(writer, b"")
        finally:
            self.running -= 1
        self.answered += 1


async def _say(writer: asyncio.StreamWriter, status: int, content: object = b"") -> None:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    await writer.drain()


async def _begin(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 -\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    await writer.drain()


async def _send(writer: asyncio.StreamWriter, piece: bytes) -> None:
    """A chunk; an empty one ends the answer."""
    writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
    await writer.drain()


async def _event(writer: asyncio.StreamWriter, event: dict) -> None:
    await _send(writer, b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")


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
    asyncio.run(listen(fake, arguments.port))


async def listen(fake: Fake, port: int) -> None:
    server = await asyncio.start_server(fake.serve, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    main()
