from __future__ import annotations

import contextlib
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import crossplane
import pytest
import yaml

from packer.errors import IncompatibleError, ValidationError
from packer.export import quoting, routing
from packer.export.formats import export_plan
from packer.export.servers import Options, servers
from packer.plan import Plan


def planned(plan: Plan) -> dict[str, dict[str, float]]:
    """Adapter → server → share, straight from the plan."""
    table: dict[str, dict[str, float]] = {}
    for gpu, item in enumerate(plan.bins):
        for k, i in enumerate(item.adapters):
            table.setdefault(plan.workload.names[i], {})[f"gpu-{gpu}"] = item.shares[k]
    return table


def test_json_holds_servers_and_shares(hostile_plan: Plan) -> None:
    """Every adapter is routed to its servers, and shares of a replicated one sum to 1."""
    document = json.loads(export_plan(hostile_plan, "routing")["routing.json"])
    found = {
        name: {place["server"]: place["share"] for place in places} for name, places in document["adapters"].items()
    }
    want = planned(hostile_plan)
    assert set(found) == set(want)
    for name, places in found.items():
        assert places == pytest.approx(want[name])
        assert sum(places.values()) == pytest.approx(1.0)
    assert document["servers"]["gpu-1"] == "http://gpu-1:8000"


def test_each_server_has_its_own_address(toy_plan: Callable[..., Plan]) -> None:
    """One address for several servers would send adapters to servers without them; one server may have any."""
    options = Options(address="localhost:8000")
    with pytest.raises(ValidationError, match=r"\{name\}, \{index\} or \{port\}.* got 'localhost:8000'"):
        export_plan(toy_plan(("a", "b"), gpus=2), "litellm", options)
    assert "localhost:8000" in export_plan(toy_plan(("a", "b"), gpus=1), "litellm", options)["litellm.yaml"]


@pytest.mark.parametrize("host", ["127.0.0.1", "[fd00::1]"])
def test_addresses_follow_the_template(hostile_plan: Plan, host: str) -> None:
    """Servers on one host, also one with an IPv6 address, are distinguished by their ports."""
    options = Options(address=f"{host}:{{port}}", port=9100)
    document = json.loads(export_plan(hostile_plan, "routing", options)["routing.json"])
    assert list(document["servers"].values()) == [f"http://{host}:{9100 + k}" for k in range(3)]


@pytest.mark.parametrize(
    "address",
    [
        "x;y:80",
        "::1:80",
        "[x]:80",
        "{name}",
        "{name}:0",
        "{name}:65536",
        "a b:80",
        "$host:80",
        "http://x:80",
        "{name.bin}:80",
    ],
)
def test_bad_addresses_are_refused(hostile_plan: Plan, address: str) -> None:
    """An address is a host and a port, nothing else."""
    with pytest.raises(ValidationError, match="address"):
        export_plan(hostile_plan, "nginx", Options(address=address))


def nginx_blocks(text: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Directives of an nginx file, by nginx's grammar."""
    path = tmp_path / "packer.conf"
    path.write_text(text)
    parsed = crossplane.parse(str(path), single=True, check_ctx=False, check_args=False)
    assert parsed["status"] == "ok", parsed["errors"]
    blocks: list[dict[str, Any]] = parsed["config"][0]["parsed"]
    return blocks


def look_up(rows: list[dict[str, Any]], value: str) -> str:
    """nginx's map (ngx_http_map_module): exact values without case, then regular expressions in order."""
    import re

    exact, patterns = {}, []
    for row in rows:
        source, target = row["directive"], row["args"][0]
        if source == "default":
            continue
        if source.startswith("~"):
            patterns.append((re.compile(source[1:]), target))
        else:
            key = source.removeprefix("\\").lower()
            assert key not in exact, "conflicting parameter"
            exact[key] = target
    if value.lower() in exact:
        return str(exact[value.lower()])
    return next((str(target) for pattern, target in patterns if pattern.search(value)), "")


def test_nginx_map_routes_every_name(hostile_plan: Plan, tmp_path: Path) -> None:
    """Each name, as it travels in the header, maps to its server or to its own split."""
    blocks = nginx_blocks(export_plan(hostile_plan, "nginx")["nginx.conf"], tmp_path)
    assert {block["directive"] for block in blocks} == {
        "upstream",
        "split_clients",
        "map_hash_bucket_size",
        "map_hash_max_size",
        "map",
        "server",
    }
    assert {"client_max_body_size": ["0"]}.items() <= {
        each["directive"]: each["args"] for block in blocks if block["directive"] == "server" for each in block["block"]
    }.items()  # nginx's own limit is below the prompts of long contexts
    rows = next(block["block"] for block in blocks if block["directive"] == "map")
    for name, places in planned(hostile_plan).items():
        target = look_up(rows, quoting.header_key(name))
        if len(places) == 1:
            assert target == next(iter(places))
        else:
            split = next(b for b in blocks if b["directive"] == "split_clients" and b["args"][1] == target)
            assert [row["args"][0] for row in split["block"]] == sorted(places)
    assert look_up(rows, "unknown") == ""
    keys = {block["args"][0] for block in blocks if block["directive"] == "split_clients"}
    by_session = next(b["block"] for b in blocks if b["directive"] == "map" and b["args"][1] == "$packer_session")
    assert keys == {"$packer_session"}
    assert [row["directive"] for row in by_session] == ["default", ""]


def test_nginx_gives_no_replica_a_share_of_0(toy_plan: Callable[..., Plan]) -> None:
    """A percentage of 0.00 is an error to nginx: the smallest share becomes 0.01 %, and all add up to at most 100 %."""
    plan = toy_plan(["a", "b", "c"], gpus=3, replicated=True)
    given = (1e-6, 0.999_99, 9e-6)
    bins = [
        replace(item, shares=tuple(share if part < 1 else part for part in item.shares))
        for item, share in zip(plan.bins, given, strict=True)
    ]
    text = export_plan(replace(plan, bins=tuple(bins)), "nginx")["nginx.conf"]
    assert re.findall(r"(\S+) gpu-\d;", text)[:3] == ["0.01%", "99.98%", "*"]


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed (Debian: nginx-light)")
def test_nginx_accepts_the_file(hostile_plan: Plan, tmp_path: Path) -> None:
    """nginx itself reads the file, long and colliding names included."""
    options = Options(address="127.0.0.1:{port}")
    included = tmp_path / "packer.conf"
    included.write_text(export_plan(hostile_plan, "nginx", options)["nginx.conf"])
    main = tmp_path / "nginx.conf"
    main.write_text(f"pid {tmp_path}/pid;\nevents {{}}\nhttp {{ access_log off; include {included}; }}\n")
    run = subprocess.run(
        [shutil.which("nginx") or "nginx", "-t", "-q", "-c", main, "-e", tmp_path / "error.log", "-p", tmp_path],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_header_keys_are_distinct_and_decode(hostile_plan: Plan) -> None:
    """No two names share a key, keys are plain ASCII, and decoding gives the name back."""
    keys = {name: quoting.header_key(name) for name in hostile_plan.workload.names}
    assert len(set(keys.values())) == len(keys)
    for name, key in keys.items():
        assert key.isascii()
        assert key.isprintable()
        assert not set(key) & set("\"'\\;{}$~ <>")
        assert urllib.parse.unquote(key, errors="surrogatepass") == name


def test_envoy_routes_every_name(hostile_plan: Plan) -> None:
    """Each header value leads to the planned clusters with the planned weights."""
    document = yaml.safe_load(export_plan(hostile_plan, "envoy")["envoy.yaml"])
    clusters = {cluster["name"] for cluster in document["clusters"]}
    routes = document["route_config"]["virtual_hosts"][0]["routes"]
    found = {}
    for route in routes:
        key = route["match"]["headers"][0]["string_match"]["exact"]
        action = route["route"]
        parts = action.get("weighted_clusters", {"clusters": [{"name": action.get("cluster"), "weight": 10_000}]})
        found[key] = {part["name"]: part["weight"] / 10_000 for part in parts["clusters"]}
        assert set(found[key]) <= clusters
    for name, places in planned(hostile_plan).items():
        assert found[quoting.header_key(name)] == pytest.approx(places, abs=1e-3)


def test_gateway_api_routes_every_name(hostile_plan: Plan) -> None:
    """Each header value leads to the planned Services; no route has more than 16 rules."""
    text = export_plan(hostile_plan, "gateway-api", Options(namespace="ml"))["httproutes.yaml"]
    found = {}
    for route in yaml.safe_load_all(text):
        assert (route["kind"], route["metadata"]["namespace"]) == ("HTTPRoute", "ml")
        rules = route["spec"]["rules"]
        assert 1 <= len(rules) <= 16
        for rule in rules:
            assert rule["timeouts"] == {"request": "3600s"}  # of Envoy Gateway 15 s, which cuts long answers
            (header,) = rule["matches"][0]["headers"]
            assert header["name"] == "X-Adapter"
            assert len(header["value"]) <= 4096
            found[header["value"]] = {
                each["name"]: each["weight"] / 10_000 for each in rule["backendRefs"] if each["port"] == 8000
            }
    for name, places in planned(hostile_plan).items():
        assert found[quoting.header_key(name)] == pytest.approx(places, abs=1e-3)


def test_gateway_api_refuses_more_backends_than_a_rule_has(toy_plan: Callable[..., Plan]) -> None:
    """A rule of an HTTPRoute has at most 16 backends: an adapter on 17 servers is named, one on 16 is exported."""
    with pytest.raises(IncompatibleError, match=r"at most 16 servers.*got 'hot' on 17: use nginx"):
        export_plan(toy_plan(["hot"], gpus=17, replicated=True), "gateway-api")
    text = export_plan(toy_plan(["hot"], gpus=16, replicated=True), "gateway-api")["httproutes.yaml"]
    assert len(yaml.safe_load(text)["spec"]["rules"][0]["backendRefs"]) == 16


def test_weights_are_whole_and_complete(hostile_plan: Plan) -> None:
    """Rounded weights lose no server and sum to 10,000."""
    server, *_ = servers(hostile_plan, Options())
    for shares in ([1.0], [0.5, 0.5], [1 / 3] * 3, [0.99999, 0.00001], [1 / 7] * 7):
        parts = [weight for _, weight in routing.weights([(server, share) for share in shares])]
        assert sum(parts) == 10_000
        assert min(parts) >= 1


def test_litellm_lists_every_adapter(hostile_plan: Plan) -> None:
    """Each adapter is a model group with one weighted deployment per server; nothing reads as a variable."""
    document = yaml.safe_load(export_plan(hostile_plan, "litellm")["litellm.yaml"])
    groups: dict[str, dict[str, float]] = {}
    for entry in document["model_list"]:
        parameters = entry["litellm_params"]
        assert parameters["model"] == f"hosted_vllm/{entry['model_name']}"
        assert not any(str(value).startswith("os.environ/") for value in parameters.values())
        server = parameters["api_base"].removeprefix("http://").removesuffix(":8000/v1")
        groups.setdefault(entry["model_name"], {})[server] = parameters["weight"] / 10_000
    want = planned(hostile_plan)
    assert set(groups) == set(want)
    for name, places in groups.items():
        assert places == pytest.approx(want[name], abs=1e-3)


class _Echo(http.server.BaseHTTPRequestHandler):
    """A stand-in for a server that answers with its own port."""

    def do_GET(self) -> None:
        """Say who was reached."""
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = str(self.server.server_address[1]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - http.server's name

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Silence."""


@pytest.fixture
def nginx(hostile_plan: Plan, tmp_path: Path) -> Iterator[tuple[int, list[int]]]:
    """A real nginx with the exported file in front of three servers: its port, and theirs."""
    binary = shutil.which("nginx")
    if binary is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    echoes = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Echo) for _ in hostile_plan.bins]
    ports = [echo.server_address[1] for echo in echoes]
    for echo in echoes:
        threading.Thread(target=echo.serve_forever, daemon=True).start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    text = export_plan(hostile_plan, "nginx", Options(address="127.0.0.1:{port}"))["nginx.conf"]
    for gpu, real in enumerate(ports):
        text = text.replace(f"server 127.0.0.1:{8000 + gpu};", f"server 127.0.0.1:{real};")
    (tmp_path / "packer.conf").write_text(text.replace("listen 8080", f"listen 127.0.0.1:{port}"))
    folders = " ".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = tmp_path / "nginx.conf"
    main.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
        f"http {{ access_log off; {folders} include {tmp_path}/packer.conf; }}\n"
    )
    with subprocess.Popen([binary, "-c", main, "-e", tmp_path / "error.log", "-p", tmp_path]) as process:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert time.monotonic() < deadline, (tmp_path / "error.log").read_text()
            time.sleep(0.05)
        yield port, ports
        process.terminate()
    for echo in echoes:
        echo.shutdown()
        echo.server_close()


def test_real_nginx_routes_every_name(hostile_plan: Plan, nginx: tuple[int, list[int]]) -> None:
    """A request with the name's header key reaches one of its servers; an unknown name is refused."""
    port, servers = nginx

    def reached(key: str, body: bytes | None = None) -> int:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, {"X-Adapter": key})
        with urllib.request.urlopen(request, timeout=20) as answer:
            return servers.index(int(answer.read()))

    for name, places in planned(hostile_plan).items():
        assert f"gpu-{reached(quoting.header_key(name))}" in places
    split = {reached(quoting.header_key("plain")) for _ in range(60)}
    assert split == {0, 1, 2}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        reached("unknown")
    assert reached(quoting.header_key("plain"), b"x" * 2_000_000) in range(3)  # a long prompt


def test_ports_of_a_shared_host_end_at_the_last_one(hostile_plan: Plan) -> None:
    """The last of n servers on one host listens at the first port + n - 1, which must be a port too."""
    for name, options in (
        ("vllm", Options(port=65_534)),
        ("compose", Options(port=65_534)),
        ("routing", Options(port=65_534, address="127.0.0.1:{port}")),
    ):
        with pytest.raises(ValidationError, match=r"at most 65535, got 65534 \+ 2"):
            export_plan(hostile_plan, name, options)
        assert "65535" in "".join(export_plan(hostile_plan, name, replace(options, port=65_533)).values())
    assert export_plan(hostile_plan, "k8s", Options(port=65_535, adapters_claim="adapters"))


@pytest.mark.parametrize("address", ["[....]:80", "[:]:80", "[80]:80", "fd00::1:80"])
def test_what_is_no_address_is_refused(hostile_plan: Plan, address: str) -> None:
    """A gateway would not start with it."""
    with pytest.raises(ValidationError, match="Expected an address like"):
        export_plan(hostile_plan, "routing", Options(address=address))
