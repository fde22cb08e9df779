"""The files of routers in front of running servers."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from packer.errors import LiveError, OutputError, ValidationError
from packer.live.fleet_file import ROUTING, Host, LiveFleet, RouterFile
from packer.live.router_file import RouterWriter
from packer.plan import Plan
from tests.live.stand_in import StandIn
from tests.live.test_act import FAST, plan_of  # noqa: F401 - a fixture

PLACED = [{"a": 1.0, "b": 0.25}, {"b": 0.75, "c": 1.0}]
RANKS = dict.fromkeys("abc", 8)
ROUTES = {"a": {0: 1.0}, "b": {0: 0.25, 1: 0.75}, "c": {1: 1.0}}


def _fleet(name: str, folder: Path) -> LiveFleet:
    """Two servers, with a router of this format."""
    hosts = (Host("http://10.0.0.1:9001", "left"), Host("http://10.0.0.2:9002", "right"))
    router = RouterFile(name, str(folder / "out"), adapters_claim="adapters", token_secret="hf")
    return LiveFleet(hosts, router, FAST)


@pytest.mark.parametrize("name", [each for each in ROUTING if each != "nginx"])
def test_each_format_has_the_servers_as_they_are(
    name: str,
    tmp_path: Path,
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """Files name the servers of the file of servers, and adapters only where they are routed."""
    writer = RouterWriter(_fleet(name, tmp_path), plan_of(PLACED), RANKS)
    texts = writer.texts({"a": {1: 1.0}})
    whole = "\n".join(texts.values())
    assert "right" in whole or "10.0.0.2:9002" in whole
    assert "left" not in whole
    assert "10.0.0.1" not in whole
    for file, text in texts.items():
        found = [] if file.endswith(".conf") else list(yaml.safe_load_all(text))
        assert found or text.startswith("#")
        objects = [each for each in found if isinstance(each, dict)]
        services = (each["spec"]["ports"] for each in objects if each.get("kind") == "Service")
        assert all(port["port"] == 9002 for ports in services for port in ports)
    writer.write(ROUTES)
    written = tmp_path / "out"
    assert (written.is_dir() and len(list(written.iterdir())) == len(texts)) or written.is_file()


@pytest.mark.parametrize(
    ("name", "part"),
    [("nginx", "[::1]:9001;"), ("envoy", 'address: "::1"'), ("litellm", "http://[::1]:9001/v1"),
     ("routing", '"http://[::1]:9001"')],
)  # fmt: skip
def test_ipv6_addresses_keep_their_port(
    name: str,
    part: str,
    tmp_path: Path,
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """An address with colons is in brackets wherever a port follows it."""
    fleet = replace(_fleet(name, tmp_path), servers=(Host("http://[::1]:9001", "left"), Host("http://h", "right")))
    texts = RouterWriter(fleet, plan_of(PLACED), RANKS).texts(ROUTES).values()
    assert any(part in text for text in texts)


@pytest.mark.parametrize("name", ROUTING)
def test_an_adapter_that_the_plan_lacks_is_an_adapter(
    name: str,
    tmp_path: Path,
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """`packer live follow --fleet` serves adapters that came after the plan: no format takes one for the base model."""
    writer = RouterWriter(_fleet(name, tmp_path), plan_of(PLACED), {"a": 8, "b": 8, "c": 8, "d": 8})
    known, new = (writer.texts({each: {0: 1.0}, "b": {0: 1.0}}) for each in "ad")
    for file, text in known.items():
        assert text.count("/adapters/a") == new[file].count("/adapters/d")


def test_a_first_file_that_is_refused_is_refused_again(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:  # noqa: F811
    """A file that the router did not take is no sign, at the next attempt, that it has these routes."""
    file = tmp_path / "routes.yaml"
    fleet = LiveFleet((Host("http://a:1"), Host("http://b:1")), RouterFile("envoy", str(file), "false"), FAST)
    for _ in range(2):
        with pytest.raises(LiveError, match=r"did not take its new routes: .* ended with status 1\.$"):
            RouterWriter(fleet, plan_of(PLACED), RANKS).write(ROUTES)
        assert not file.exists()


def test_a_refused_file_is_taken_back(tmp_path: Path, plan_of: Callable[..., Plan]) -> None:  # noqa: F811
    """The router's old file is there again where its command fails."""
    file = tmp_path / "routes.yaml"
    fleet = LiveFleet((Host("http://a:1"), Host("http://b:1")), RouterFile("envoy", str(file), "true"), FAST)
    RouterWriter(fleet, plan_of(PLACED), RANKS).write(ROUTES)
    before = file.read_text()
    broken = LiveFleet(fleet.servers, RouterFile("envoy", str(file), "echo bad >&2; false"), FAST)
    with pytest.raises(LiveError, match="did not take"):
        RouterWriter(broken, plan_of(PLACED), RANKS).write({"a": {1: 1.0}})
    assert file.read_text() == before


def test_no_key_is_in_what_a_command_says(
    tmp_path: Path,
    plan_of: Callable[..., Plan],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A user's command may print the servers' key; packer's errors, which enter files, do not have it."""
    monkeypatch.setenv("FLEET_KEY", "sesame-4711")
    router = RouterFile("nginx", str(tmp_path / "routes.conf"), "echo key $FLEET_KEY; false")
    fleet = LiveFleet((Host("http://a:1"), Host("http://b:1")), router, FAST, api_key_env="FLEET_KEY")
    with pytest.raises(LiveError, match=r"status 1: key \*\*\*$"):
        RouterWriter(fleet, plan_of(PLACED), RANKS).write(ROUTES)


def test_whatever_a_router_file_contains_is_taken_back(
    tmp_path: Path,
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """The old file need not be text; a folder in its place is refused, with the key that names it."""
    file = tmp_path / "routes.conf"
    file.write_bytes(b"\xff\xfe")
    broken = LiveFleet((Host("http://a:1"), Host("http://b:1")), RouterFile("nginx", str(file), "false"), FAST)
    with pytest.raises(LiveError, match="did not take"):
        RouterWriter(broken, plan_of(PLACED), RANKS).write(ROUTES)
    assert file.read_bytes() == b"\xff\xfe"
    for kind, path, rule in (("nginx", tmp_path, "a file"), ("routing", file, "a folder")):
        wrong = replace(broken, router=RouterFile(kind, str(path)))
        with pytest.raises(OutputError, match=rf"`file` of \[router\] to be {rule} for the format {kind}, got"):
            RouterWriter(wrong, plan_of(PLACED), RANKS).write(ROUTES)


def test_addresses_that_a_router_file_cannot_hold_are_refused(plan_of: Callable[..., Plan]) -> None:  # noqa: F811
    """An address with TLS or a path is not silently cut."""
    fleet = LiveFleet((Host("https://a:1"), Host("http://b:1/v2")), RouterFile("nginx", "x"), FAST)
    with pytest.raises(ValidationError, match="behind a router file"):
        RouterWriter(fleet, plan_of(PLACED), RANKS)


@pytest.fixture
def nginx(tmp_path: Path) -> Iterator[tuple[Path, int, str]]:
    """A running nginx: the file that it includes, its port, and the command that makes it read the file."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    included, main = tmp_path / "packer.conf", tmp_path / "nginx.conf"
    included.write_text(f"server {{ listen {port}; }}\n")
    main.write_text(f"daemon off; pid {tmp_path}/pid;\nevents {{}}\nhttp {{ access_log off; include {included}; }}\n")
    command = f"{program} -q -c {main} -e {tmp_path}/error.log -p {tmp_path}"
    server = subprocess.Popen(command.split())
    for _ in range(100):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.05)
    # The exported file listens on 8080, which may be taken here.
    there = f"sed -i s/8080/{port}/ {included} && {command} -t && {command} -s reload"
    yield included, port, there
    server.terminate()
    server.wait(10)


def test_a_running_nginx_follows_the_routes(
    nginx: tuple[Path, int, str],
    plan_of: Callable[..., Plan],  # noqa: F811
) -> None:
    """After each change requests reach the server that the routes name, and a bad file is not taken."""
    included, port, reload = nginx
    servers = [StandIn({name: name for name in "abc"}) for _ in range(2)]
    hosts = tuple(Host(each.url) for each in servers)
    writer = RouterWriter(LiveFleet(hosts, RouterFile("nginx", str(included), reload), FAST), plan_of(PLACED), RANKS)

    def served(name: str) -> int:
        """The server that answers a request; −1: nginx itself, which has not read the file yet."""
        body = json.dumps({"model": name}).encode()
        headers = {"X-Adapter": name, "Content-Type": "application/json", "Connection": "close"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        before = len(servers[0].calls)
        try:
            urllib.request.urlopen(request, timeout=5).close()
        except urllib.error.HTTPError:
            return -1
        return int(len(servers[0].calls) == before)

    for target in (0, 1, 0):
        writer.write({"a": {target: 1.0}})
        end = time.monotonic() + 5.0
        alike = 0  # old workers of nginx accept requests for a moment longer
        while alike < 10 and time.monotonic() < end:
            alike = alike + 1 if served("a") == target else 0
        assert alike == 10
    for each in servers:
        each.close()
