"""What servers may answer instead of what they should: one table, by what is asked.

An answer is a function of the request's handler. The fast ones are tests; `benchmarks/live/faults.py` runs all.
"""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from itertools import repeat
from typing import NamedTuple

Answer = Callable[[BaseHTTPRequestHandler], None]
LONG_S = 30.0
"""Longer than any limit of the commands that are run against these servers."""


class Fault(NamedTuple):
    """`path`: which question is answered so. `answer`: how. `says`: pattern of packer's words. `slow`: it takes s."""

    path: str
    answer: Answer
    says: str
    slow: bool = False


def sent(*pieces: bytes, pause_s: float = 0.0) -> Answer:
    """These bytes, and the connection is closed."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        for piece in pieces:
            handler.wfile.write(piece)
            time.sleep(pause_s)

    return answer


def ok(body: bytes | str, *heads: str, status: str = "200 OK") -> Answer:
    """An answer of this content."""
    data = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", *heads, f"Content-Length: {len(data)}", "", ""]
    return sent("\r\n".join(lines).encode() + data)


def endless(piece: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n\r\n", pause_s: float = 0.0) -> Answer:
    """A piece again and again, until packer hangs up, at most for `LONG_S`."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        end = time.monotonic() + LONG_S
        with suppress(OSError):
            handler.wfile.write(head)
            for each in repeat(piece):
                handler.wfile.write(each)
                time.sleep(pause_s)
                if time.monotonic() > end:
                    return

    return answer


def silence(handler: BaseHTTPRequestHandler) -> None:
    """Nothing, until packer hangs up."""
    handler.connection.settimeout(LONG_S)
    with suppress(OSError):
        handler.connection.recv(1)


def reset(after: bytes = b"") -> Answer:
    """The connection is cut by RST."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(after)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()

    return answer


def models(*cards: object) -> Answer:
    """A list of models."""
    return ok(json.dumps({"data": list(cards)}))


def events(*texts: object, end: bytes = b"") -> Answer:
    """A stream of events, as it should be framed."""
    lines = (t if isinstance(t, bytes) else json.dumps(t, separators=(",", ":")).encode() for t in texts)
    return sent(STREAM + b"".join(b"data: " + line + b"\n\n" for line in lines) + end)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = {"choices": [{"text": "w"}]}
DONE = b"[DONE]"
EVENT = b'data: {"choices":[{"text":"w"}]}\n\n'


def usage(**counts: object) -> dict[str, object]:
    """The last event."""
    return {"choices": [], "usage": counts}


def http_faults(path: str, what: str) -> dict[str, Fault]:
    """How HTTP itself may go wrong; `what`: pattern of what is said of a path that can't be read."""
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    head = b"HTTP/1.1 200 OK\r\n"
    answers: dict[str, tuple[Answer, bool]] = {
        "nothing, closed": (sent(), False),
        "bytes that are no HTTP": (sent(b"\x00\xff\x16\x03\x01 what\r\n\r\n"), False),
        "half a head": (sent(head + b"Content-Le"), False),
        "a status that is no number": (sent(b"HTTP/1.1 abc OK\r\n\r\n"), False),
        "an unknown version": (sent(b"HTTP/9.9 200 OK\r\n\r\n"), False),
        "a head of 500 lines": (sent(head + b"X: y\r\n" * 500 + b"\r\n"), False),
        "a head line of 1 MB": (sent(head + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n"), False),
        "less than its length": (sent(head + b"Content-Length: 500\r\n\r\nabc"), False),
        "a length that is no number": (sent(head + b"Content-Length: many\r\n\r\n{}"), False),
        "a chunk of no size": (sent(chunked + b"zz\r\nabc\r\n"), False),
        "a chunk that is cut": (sent(chunked + b"500\r\nabc"), False),
        "status 204": (sent(b"HTTP/1.1 204 No Content\r\n\r\n"), False),
        "status 401": (ok("no", status="401 Unauthorized"), False),
        "status 404": (ok("no", status="404 Not Found"), False),
        "status 429": (ok("later", "Retry-After: 9", status="429 Too Many Requests"), False),
        "status 500 of 2 MB": (ok(b"no" * (1 << 20), status="500 Internal Server Error"), False),
        "status 503": (ok("", status="503 Service Unavailable"), False),
        "status 999": (ok("", status="999 What"), False),
        "a redirect": (ok("", "Location: http://127.0.0.1:9/x", status="307 Temporary Redirect"), False),
        "a redirect without an address": (ok("", status="301 Moved Permanently"), False),
        "a reset": (reset(), False),
        "a reset in the content": (reset(head + b"Content-Length: 500\r\n\r\nabc"), False),
        "no end": (endless(b"x" * 65_536), False),
        "chunks without end": (endless(b"10000\r\n" + b"x" * 65_536 + b"\r\n", chunked), False),
        "silence": (silence, True),
        "a byte every 0.2 s": (endless(b"x", pause_s=0.2), True),
        "a head without end": (endless(b"X", head, pause_s=0.2), True),
        "statuses 100 without end": (endless(b"HTTP/1.1 100 Continue\r\n\r\n", b"", pause_s=0.001), True),
    }
    return {f"{path}: {name}": Fault(path, answer, what, slow) for name, (answer, slow) in answers.items()}


def contents(path: str, says: str, bodies: Iterable[tuple[str, bytes | str]]) -> dict[str, Fault]:
    """Answers with contents that are wrong."""
    return {f"{path}: {name}": Fault(path, ok(body), says) for name, body in bodies}


WRONG_JSON: tuple[tuple[str, bytes | str], ...] = (
    ("empty", ""), ("no JSON", "<html>"), ("a list", "[]"), ("null", "null"), ("a number", "5"),
    ("5,000 digits", '{"data": ' + "9" * 5000 + "}"), ("deep", "[" * 50_000), ("not UTF-8", b'{"data": "\xff\xfe"}'),
    ("gzip", gzip.compress(b"{}")), ("NaN", '{"data": NaN}'), ("NULs", bytes(100)),
    ("one key twice", '{"data": 1, "data": 2}'),
)  # fmt: skip

ASKED = {
    **http_faults("/v1/models", r"MISSING adapters (0 adapters|\S+ can't be reached: |\S+/v1/models answers )"),
    **contents("/v1/models", "MISSING adapters 0 adapters", WRONG_JSON),
    **contents("/version", "MISSING version .*without a version", WRONG_JSON[:6]),
    "/v1/models: a title as a name": Fault("/v1/models", models({"id": "base"}, {"id": "\x1b]0;t\x07"}),
        "ok adapters 1 "),
    "/v1/models: 50,000 models": Fault("/v1/models", models(*({"id": f"a{k}"} for k in range(50_000))),
        "49999 adapters"),
    "/v1/models: no names": Fault("/v1/models", models({"name": "a"}), "0 adapters"),
    "/health: 503": Fault("/health", ok("", status="503 no"), "health answers 503"),
    "/health: a redirect": Fault("/health", ok("", "Location: /x", status="302 no"), "not followed"),
    "/health: no end": Fault("/health", endless(b"x" * 65_536), "more than 4,194,304 bytes"),
    "/metrics: no figures": Fault("/metrics", ok("# nothing\n"), "MISSING metrics without running"),
    "/metrics: not UTF-8": Fault("/metrics", ok(b"\xff\xfe\n" * 99), "MISSING metrics without running"),
    "/metrics: no end": Fault("/metrics", endless(b"vllm:num_requests_running 1\n" * 999), "more than 4,194,304 bytes"),
    "/metrics: NaN": Fault("/metrics", ok("vllm:num_requests_running NaN\nvllm:num_requests_waiting -1\n"),
        "without running, waiting"),
}  # fmt: skip
"""What `packer live doctor --url` asks; it ends with exit code 3 unless all is well."""

APPLIED = {
    **http_faults("/v1/models", "gpu-0: /v1/models"),
    **contents("/v1/models", "/v1/models is not a list of models", WRONG_JSON[:-1]),
    "/v1/models: an error that is no text": Fault(
        "/v1/models", ok('{"error": {"message": {"a": 1}}}', status="500 no"), "HTTP 500: {.error"
    ),
    "/v1/models: a proxy's page": Fault(
        "/v1/models",
        ok("<html>\r\n<head><title>502 Bad\r\nGateway</title>", status="502 no"),
        "HTTP 502: 502 Bad Gateway[.]",
    ),
    "/v1/models: a deep error": Fault("/v1/models", ok("[" * 50_000, status="500 no"), "HTTP 500"),
    "/v1/models: another model": Fault("/v1/models", models({"id": "\x1b]0;t\x07"}), "serves '.x1b"),
    "/v1/models: a length of text": Fault(
        "/v1/models", models({"id": "tiny", "max_model_len": "9" * 99}), "the plan is for|serves"
    ),
}
"""What `packer live apply --dry-run` asks first; it ends with exit code 2 or 3."""

STREAMED = {
    "no token": (events(usage(prompt_tokens=5, completion_tokens=0), DONE), "ended before its last token"),
    "one token of two": (events(TOKEN, DONE), "ended before its last token"),
    "three tokens of two": (events(TOKEN, TOKEN, TOKEN, usage(completion_tokens=3), DONE),
        "more tokens than max_tokens"),
    "tokens without end": (endless(EVENT, STREAM), "does not end: it has more tokens"),
    "open after the last token": (endless(b": ping\n", STREAM + EVENT * 2, 0.05), "does not end after its last"),
    "comments without end": (endless(b": ping\n\n", STREAM, 0.02), "hangs"),
    "silence": (silence, "hangs"),
    "silence after a token": (lambda h: (events(TOKEN)(h), h.wfile.flush(), silence(h))[0], "hangs"),
    "a line without end": (endless(b"x" * 65_536, STREAM), "ValueError|LineTooLong|too long|Chunk"),
    "an event that is no JSON": (events(b"hello", b"hello", DONE), "no event of a completion"),
    "an event that is a list": (events([], [], DONE), "no event of a completion"),
    "usage of text": (events(TOKEN, TOKEN, usage(completion_tokens="two"), DONE), "counts of tokens"),
    "usage of null": (events(TOKEN, TOKEN, usage(completion_tokens=None), DONE), "counts of tokens"),
    "usage below 0": (events(TOKEN, TOKEN, usage(completion_tokens=-2), DONE), "counts of tokens"),
    "usage of 1e400": (events(TOKEN, TOKEN, b'{"choices":[],"usage":{"completion_tokens":1e400}}', DONE),
        "counts of tokens"),
    "usage of 30 digits": (events(TOKEN, TOKEN, usage(completion_tokens=10**30), DONE), "counts of tokens"),
    "usage that is a list": (events(TOKEN, TOKEN, b'{"choices":[],"usage":[1]}', DONE), "counts of tokens"),
    "usage of another prompt": (events(TOKEN, TOKEN, usage(prompt_tokens=9, completion_tokens=2), DONE),
        "9 prompt tokens, 5 were"),
    "an error in the stream": (events(TOKEN, b'{"error": {"message": "out of memory"}}'), "out of memory"),
    "a title in an error": (ok('{"error": {"message": "\x1b]0;t\x07"}}', status="400 no"), "HTTP 400"),
    "an error without end": (endless(b"no" * 9999, b"HTTP/1.1 500 no\r\n\r\n"), "HTTP 500: nono"),
    "status 401": (ok("no", status="401 no"), "HTTP 401: no"),
    "an error of vLLM's": (ok('{"error": {"message": "no such model"}}', status="404 no"), "HTTP 404: no such model"),
    "a proxy's page": (ok("<html>\n<title>Bad\nGateway</title>", status="502 no"), "HTTP 502: Bad Gateway(?!<)"),
    "status 429": (ok("later", status="429 no"), "HTTP 429: later"),
    "status 503": (ok("", status="503 no"), "HTTP 503"),
    "a redirect": (ok("", "Location: http://127.0.0.1:9/", status="308 no"),
        "HTTP 308: a redirect, which is not followed"),
    "a page": (ok("<html>", "Content-Type: text/html"), "ended before its last token"),
    "nothing, closed": (sent(), "Disconnected|disconnected|Connection"),
    "no HTTP": (sent(b"\x00\xff\x00\r\n\r\n"), "BadStatusLine|ClientResponseError|HttpProcessing|400"),
    "cut after a token": (sent(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + EVENT),
        "ClientPayloadError|payload"),
    "a reset": (reset(), "Connection|Disconnected|disconnected|reset"),
    "a reset after a token": (reset(STREAM + EVENT), "Connection|Payload|reset|ended before"),
    "gzip": (ok(gzip.compress(b"data: x\n\n"), "Content-Encoding: gzip"), "ended before its last token"),
}  # fmt: skip
"""Answers to a request of five prompt tokens for two tokens, and what the failed requests say."""

PROMETHEUS = {
    **http_faults("/api/v1/query_range", "Prometheus"),
    **contents("/api/v1/query_range", "Prometheus", WRONG_JSON),
}
"""What `packer workload from-metrics` asks; it ends with exit code 3 and writes nothing."""
