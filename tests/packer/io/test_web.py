"""What a server sends is limited in size and time, is never followed elsewhere, and a key is part of no message."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from packer.errors import ValidationError
from packer.io.web import Address, address_of, ask, key_of, masked

Send = Callable[[bytes], object]
Script = Callable[[Send, bytes], None]
"""Writes an answer; called with what sends bytes and with the request's head."""
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@pytest.fixture
def serve() -> Iterator[Callable[[Script], str]]:
    """Starts a server that a script answers for, and gives its address."""
    sockets = []

    def start(script: Script) -> str:
        listener = socket.create_server(("127.0.0.1", 0))
        sockets.append(listener)

        def answer(connection: socket.socket) -> None:
            with connection, suppress(OSError):
                head = b""
                while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                    head += piece
                script(connection.sendall, head)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    yield start
    for each in sockets:
        each.close()


def test_an_answer_is_read_whole(serve: Callable[[Script], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """GET and POST, with and without a length, in pieces. A body does not wait until its head was received."""
    heads: list[bytes] = []
    chosen: list[object] = []
    monkeypatch.setattr(socket.socket, "setsockopt", lambda _self, *option: chosen.append(option))

    def script(send: Send, head: bytes) -> None:
        heads.append(head)
        send(b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")

    where = Address(serve(script) + "/base", "Bearer x")
    assert ask(where, "/a", limit_bytes=5, total_s=5.0) == (201, b"abcde")
    assert ask(where, "/b", body=b"q=1", limit_bytes=5, total_s=5.0) == (201, b"abcde")
    assert heads[0].startswith(b"GET /base/a HTTP/1.1\r\n")
    assert heads[1].startswith(b"POST /base/b HTTP/1.1\r\n")
    assert all(b"Authorization: Bearer x\r\n" in head for head in heads)
    assert chosen.count((socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)) == 2


def dribble(what: bytes) -> Script:
    """A byte every hundredth of a second, for a minute."""

    def script(send: Send, _head: bytes) -> None:
        for k in range(6000):
            send(what[k : k + 1] or b"x")
            time.sleep(0.01)

    return script


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
def test_a_slow_answer_ends_at_the_limit(serve: Callable[[Script], str], start: bytes) -> None:
    """Bytes that come one by one, in the head or in the body, win no more time."""
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match=r"no whole answer within 0\.4 s"):
        ask(Address(serve(dribble(start))), "/", limit_bytes=100_000, total_s=0.4)
    assert time.monotonic() - begin < 30.0


def test_an_endless_answer_ends_at_the_limit(serve: Callable[[Script], str]) -> None:
    """No more is read than the limit, whatever the server announces."""

    def endless(send: Send, _head: bytes) -> None:
        send(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n")
        while True:
            send(b"x" * 65536)

    with pytest.raises(OSError, match="more than 100,000 bytes"):
        ask(Address(serve(endless)), "/", limit_bytes=100_000, total_s=60.0)


def test_an_address_that_leads_nowhere_hides_no_other(
    serve: Callable[[Script], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name may have an address that is not routed, as of IPv6: the next one is asked in time."""
    port = int(serve(lambda send, _head: send(OK)).rpartition(":")[2])
    with socket.socket() as silent, ExitStack() as stack:
        silent.bind(("127.0.0.2", port))
        silent.listen(0)
        for _ in range(4):  # a full queue answers no further connection
            full = stack.enter_context(socket.socket())
            full.setblocking(False)
            full.connect_ex(("127.0.0.2", port))
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{k}", port)) for k in (2, 1)]
        real = socket.getaddrinfo
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda host, *a, **k: found if host == "both" else real(host, *a, **k)
        )
        assert ask(Address(f"http://both:{port}"), "", limit_bytes=9, total_s=2.0) == (200, b"ok")


def test_an_address_that_answers_late_has_the_whole_time(
    serve: Callable[[Script], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of several addresses gets a quarter of the time to connect, and all of it to answer."""

    def late(send: Send, _head: bytes) -> None:
        time.sleep(0.3)
        send(OK)

    port = int(serve(late).rpartition(":")[2])
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))] * 2
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *a, **k: found if host == "both" else real(host, *a, **k))
    assert ask(Address(f"http://both:{port}"), "", limit_bytes=9, total_s=0.8) == (200, b"ok")


def test_a_cut_answer_is_refused(serve: Callable[[Script], str]) -> None:
    """Half a page of figures is no page, whose other figures would count as absent; an error keeps its status."""

    def found(code: int, length: int) -> tuple[int, bytes]:
        url = serve(lambda send, _head: send(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\nok" % (code, length)))
        return ask(Address(url), "", limit_bytes=9, total_s=5.0)

    with pytest.raises(OSError, match="cut after 2 of 5 bytes"):
        found(200, 5)
    assert (found(200, 2), found(502, 5)) == ((200, b"ok"), (502, b"ok"))


def test_a_compressed_answer_is_refused(serve: Callable[[Script], str]) -> None:
    """A compressed answer, which was not asked for, is no text of its server; an error keeps its status."""
    head = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\nContent-Encoding: %s\r\n\r\nok"

    def status(code: int, coding: bytes) -> int:
        url = serve(lambda send, _head: send(head % (code, coding)))
        return ask(Address(url), "", limit_bytes=9, total_s=5.0)[0]

    with pytest.raises(OSError, match="compressed as 'gzip', although an uncompressed one was asked for"):
        status(200, b"gzip")
    assert (status(200, b"Identity"), status(502, b"gzip")) == (200, 502)


def test_a_redirect_is_an_answer(serve: Callable[[Script], str]) -> None:
    """The other address gets nothing: neither the question nor the key."""
    asked: list[bytes] = []
    other = serve(lambda send, head: (asked.append(head), send(OK))[0])
    moved = f"HTTP/1.1 307 Moved\r\nLocation: {other}/\r\nContent-Length: 0\r\n\r\n".encode()
    where = serve(lambda send, _head: [send(moved)][0] and None)
    assert ask(Address(where, "Bearer x"), "/", body=b"q", limit_bytes=10, total_s=5.0) == (307, b"")
    assert asked == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"error": {"message": "no\\nroom", "code": 1}}', ": no room"),
        ('{"object": "error", "message": "no room"}', ": no room"),
        ('{"detail": "no room"}', ": no room"),
        ('{"error": true, "message": "no room"}', ": no room"),
        ('{"detail": [1]}', ': {"detail": [1]}'),
        ("<!DOCTYPE html>\n<head><title lang=en>\n502 &amp; no</title><b>", ": 502 & no"),
        ("<title>" * 500_000, None),
        ("<title" * 500_000, None),
        ("the key is a&quot;b", ": the key is a&quot;b"),
        ("<p><title>the key is a&quot;b</title>", ": the key is ***"),
        ("  no \r\n room: ", ": no room"),
        ("", ""),
    ],
)
def test_an_error_is_said_in_one_line(text: str, words: str | None) -> None:
    """A server's message or a page's title, without the key, however large and nested the answer is."""
    found = Address("http://host", 'Bearer a"b').said(502, text)
    assert "\n" not in found
    assert words is None or found == f"HTTP 502{words}"


def test_a_login_is_taken_out_of_an_address() -> None:
    """What an address shows is never its password; neither is what is shown of an object."""
    found = address_of("https://user:p%40ss@host:8443/path/")
    assert found.url == "https://host:8443/path"
    assert found.headers == {"Authorization": "Basic " + base64.b64encode(b"user:p@ss").decode()}
    assert "Basic" not in repr(found)
    assert address_of("http://host", "sk-1").headers == {"Authorization": "Bearer sk-1"}
    assert address_of("http://[::1]:80").url == "http://[::1]:80"
    assert address_of("http://host").headers == {}
    assert found.masked(f"bad key {found.authorization[6:]}, {'p@ss'}!") == "bad key ***, ***!"


@pytest.mark.parametrize(
    "text",
    ["host:80", "ftp://u:secret@host", "http://u:secret@", "http://h?token=secret", "http://u:secret@h:x", "http://h#secret",
     "u:secret@h:80", "h:80?key=secret", "//u:secret@h", "http:/u:s@secret@h",
     "http://h/a b", "http://h/\x1b[0m", "http://[::1", "http://h:0", "http://h:99999"],
)  # fmt: skip
def test_a_bad_address_is_refused_without_its_secret(text: str) -> None:
    """Only HTTP addresses without a query; the message shows no login, query or control character."""
    with pytest.raises(ValidationError, match="Expected an address") as caught:
        address_of(text)
    assert "secret" not in str(caught.value)
    assert str(caught.value).isprintable()


def test_addresses_in_a_text_are_masked() -> None:
    """Logins and queries of every address in it."""
    text = "http://a:b@h/x?k=1 and https://c@i 'http://j?l=2'"
    assert masked(text) == "http://***@h/x?*** and https://***@i 'http://j?***'"


def test_a_key_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    """A file's last newline is no part of it."""
    (tmp_path / "key").write_text("sk-file\n", "utf-8")
    assert key_of("NAME", {"NAME": " sk-1 "}) == "sk-1"
    assert key_of(f"@{tmp_path}/key") == "sk-file"
    assert key_of(None) == key_of("") == ""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "a key of one line"),
        ("a\nb", "a key of one line"),
        ("é", "a key of one line"),
        ("x" * 20_000, "one line"),
    ],
)
def test_what_is_no_key_is_refused_and_not_shown(tmp_path: Path, value: str, message: str) -> None:
    """Empty, of several lines, of other signs: it would break a header."""
    (tmp_path / "key").write_text(value, "utf-8")
    for source, environment in (("NAME", {"NAME": value}), (f"@{tmp_path}/key", {})):
        with pytest.raises(ValidationError, match=message):
            key_of(source, environment)
    with pytest.raises(ValidationError, match="is not set"):
        key_of("NAME", {})
    with pytest.raises(ValidationError, match="can't be read: No such file"):
        key_of(f"@{tmp_path}/none")


def test_a_key_in_place_of_a_name_is_not_repeated() -> None:
    """A name is capitals; anything else may be the key itself, typed where its name belongs."""
    with pytest.raises(ValidationError, match="'MY_KEY_2' is not set"):
        key_of("MY_KEY_2", {})
    for key in ("sk-secret", "hf_Secret", "secret:secret"):
        with pytest.raises(ValidationError, match="the one named is not set") as caught:
            key_of(key, {})
        assert key not in str(caught.value)
