"""HTTP requests to servers that may be slow, endless or untrusted: limited in size and time, without redirects. A key
is sent only in a header. It is never part of an address, message or file."""

from __future__ import annotations

import base64
import html
import http.client
import os
import re
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from packer.errors import ValidationError, shown
from packer.io.documents import parse_json

PIECE = 1 << 16
MAX_KEY = 16_384  # Largest number of characters of a key.
TITLE_WITHIN = 4096  # Characters of a page in which its title is sought.
MASK = "***"


@dataclass(frozen=True)
class Address:
    """Address of a server. `url`: without user and password. `authorization`: value of that header; "": no header."""

    url: str
    authorization: str = field(default="", repr=False)

    @property
    def headers(self) -> dict[str, str]:
        """Headers of each request."""
        return {"Authorization": self.authorization} if self.authorization else {}

    def masked(self, text: str) -> str:
        """A text with the key masked, because some servers repeat the key in errors."""
        kind, _, secret = self.authorization.partition(" ")
        plain = base64.b64decode(secret).decode().partition(":")[2] if kind == "Basic" else ""
        for each in filter(None, (secret, plain)):
            text = text.replace(each, MASK)
        return text

    def said(self, status: int, text: str) -> str:
        """What an answer other than 200 says, in one line, masked: an error's message, a page's title, else its text.
        Servers and gateways write {"error": {"message": …}}, {"message": …} or {"detail": …}, proxies HTML."""
        if 300 <= status < 400:
            return f"HTTP {status}: a redirect, which is not followed"
        found: Any = None
        with suppress(ValueError):
            found = parse_json(text)
        while isinstance(found, dict):
            values = (found.get(key) for key in ("error", "message", "detail", "title"))
            found = next((each for each in values if each and isinstance(each, (str, dict))), None)
        page = re.search(r"(?is)^\s*<.*?<title[^>]*>(.*?)</title>", text[:TITLE_WITHIN])
        words = found if isinstance(found, str) else html.unescape(page[1]) if page else text
        return f"HTTP {status}: {' '.join(self.masked(words).split())}".rstrip(": ")


def masked(text: str) -> str:
    """A text in which the logins and queries of addresses are masked."""
    return re.sub(r"(?<=//)[^/\s'\"]*@", f"{MASK}@", re.sub(r"(//[^\s'\"?]*)\?[^\s'\"]*", rf"\1?{MASK}", text))


def address_of(text: str, key: str = "") -> Address:
    """The address that a user typed.

    `text`: an address such as http://host:8000; user:password@ before the host serves as the key if `key` is "".
    `key`: a token (Bearer), or user:password (Basic).
    Raises `ValidationError`: `text` is not an HTTP address, or has a query or fragment, which might contain keys.
    """
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        good = good and text.isprintable() and " " not in text
    except ValueError:  # a port that is not a number, a bracket left open
        good = False
    if not good:
        raise ValidationError(f"Expected an address like http://host:8000, got {shown(bare(text))}.")
    if parts.query or parts.fragment:
        raise ValidationError(f"Expected an address without ? and #, got {shown(masked(text.split('#')[0]))}.")
    login, _, host = parts.netloc.rpartition("@")
    url = urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
    given = key or unquote(login)
    basic = f"Basic {base64.b64encode(given.encode()).decode()}"
    return Address(url, "" if not given else basic if ":" in given else f"Bearer {given}")


def bare(text: str) -> str:
    """An address as typed, perhaps without http://, with login and query masked."""
    return re.sub(r"(?s)[?#].*", f"?{MASK}", re.sub(r"(?s)^(.*?//)?.*@", rf"\1{MASK}@", text))


def key_of(source: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """The key in `source`, the name of an environment variable or @FILE; "" without `source`. Raises `ValidationError`:
    the variable or file does not exist, or does not hold a key of one line."""
    if not source:
        return ""
    if source.startswith("@"):
        try:
            with Path(source[1:]).open(encoding="utf-8") as file:
                key = file.read(MAX_KEY + 2).strip()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or "it is not a text"
            raise ValidationError(f"Expected a file with a key, {shown(source[1:])} can't be read: {reason}.") from None
    elif source in environment:
        key = environment[source].strip()
    else:
        # The message must not repeat a key that was typed instead of a variable's name.
        name = shown(source) if re.fullmatch("[A-Z_][A-Z0-9_]*", source) else "the one named"
        raise ValidationError(f"Expected an environment variable that holds the key, {name} is not set.")
    if not key or len(key) > MAX_KEY or not (key.isascii() and key.isprintable()):
        raise ValidationError(f"Expected a key of one line of ASCII characters in {shown(source)}.")
    return key


def ask(
    where: Address, path: str, *, body: bytes | None = None, limit_bytes: int, total_s: float,
    content_type: str = "application/x-www-form-urlencoded", thin: Callable[[bytes], bytes] | None = None,
) -> tuple[int, bytes]:  # fmt: skip
    """Send a GET, or a POST with `body`, and return status and content of the response. Redirects are not followed.

    `thin`: returns the part of what came so far that is needed, so that longer responses keep within `limit_bytes`.
    Raises `OSError`: no response, or not a complete one within `total_s` and `limit_bytes`;
    `http.client.HTTPException`: the response is not HTTP.
    """
    parts = urlsplit(where.url)
    tls = ssl.create_default_context() if parts.scheme == "https" else None
    kind = partial(http.client.HTTPSConnection, context=tls) if tls else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=total_s)
    late = threading.Event()
    sockets: list[socket.socket] = []

    def cut() -> None:
        late.set()
        for each in (*sockets, connection.sock):
            if each is not None:
                with suppress(OSError):
                    socket.socket.shutdown(each, socket.SHUT_RDWR)

    timer = threading.Timer(total_s, cut)
    timer.daemon = True
    timer.start()
    data, read = b"", 0
    try:
        connection.sock = _connected(parts.hostname or "", connection.port, total_s)
        connection.sock.settimeout(total_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sockets.append(connection.sock)
        if tls:
            tls.set_alpn_protocols(["http/1.1"])
            connection.sock = tls.wrap_socket(connection.sock, server_hostname=parts.hostname)
            sockets.append(connection.sock)
        head = {"Accept-Encoding": "identity", **where.headers}
        head |= {} if body is None else {"Content-Type": content_type}
        connection.request("GET" if body is None else "POST", parts.path + path, body, head)
        response = connection.getresponse()
        data, read = _content(response, limit_bytes, thin)
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        timer.cancel()
        connection.close()
    if late.is_set():
        raise TimeoutError(f"no whole answer within {total_s:g} s")
    if len(data) > limit_bytes:
        raise OSError(f"an answer of more than {limit_bytes:,} bytes")
    if response.length and response.status == 200:  # bytes that are missing
        raise OSError(f"an answer cut after {read:,} of {read + response.length:,} bytes")
    coding = response.headers.get("Content-Encoding", "identity")
    if data and response.status == 200 and coding.lower() != "identity":
        raise OSError(f"an answer compressed as {shown(coding)}, although an uncompressed one was asked for")
    return response.status, data


def _content(
    response: http.client.HTTPResponse, limit_bytes: int, thin: Callable[[bytes], bytes] | None
) -> tuple[bytes, int]:
    """Content of a response, thinned, and how many bytes were read; both end once the content exceeds the limit."""
    data, read = bytearray(), 0
    while len(data) <= limit_bytes and (piece := response.read1(PIECE)):
        data += piece
        read += len(piece)
        if thin is not None and len(data) > limit_bytes // 2:
            data[:] = thin(bytes(data))
    return thin(bytes(data)) if thin is not None and response.status == 200 else bytes(data), read


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """Connect; each address of a host but the last, such as IPv6 where no route is, gets a quarter of the time."""
    found: list[Any] = [where[:2] for *_, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for where in found[:-1]:
        with suppress(OSError):
            return socket.create_connection(where, timeout_s / 4)
    return socket.create_connection(found[-1] if len(found) > 1 else (host, port), timeout_s)
