from __future__ import annotations

import http.server
import json
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from packer.cli import run
from packer.errors import FileFormatError, LiveError, PackerError, ValidationError
from packer.operate.observe import observe_metrics
from packer.traces.assign import Ranks
from packer.traces.prometheus import SOURCES, CounterNames, fetch, parse, queries, read_export

LITELLM = SOURCES["litellm"]
CUSTOM = CounterNames("requests_total", "prompt_tokens_total", "generated_tokens_total", "adapter")


def matrix(series: dict[str, list[tuple[float, float]]], label: str = "adapter") -> dict[str, Any]:
    """An answer of query_range."""
    result = [{"metric": {label: name}, "values": [[t, str(v)] for t, v in rows]} for name, rows in series.items()]
    return {"status": "success", "data": {"resultType": "matrix", "result": result}}


def answers(**changes: Any) -> dict[str, Any]:
    """Two windows of 60 s: a has 60 and 120 requests, b has 6 and none; another one was idle."""
    return {
        "window_s": 60.0,
        "requests": matrix({"a": [(60, 60), (120, 120)], "b": [(60, 6)], "idle": [(60, 0)], "": [(60, 9)]}),
        "input_tokens": matrix({"a": [(60, 6000), (120, 12000)], "b": [(60, 1200)]}),
        "output_tokens": matrix({"a": [(60, 600), (120, 1200)], "b": [(60, 60)]}),
        **changes,
    }


def test_rates_and_lengths_per_adapter() -> None:
    """Increases become rates per window, and tokens per request; idle and nameless series are left out."""
    metrics = parse(answers(), CUSTOM)
    assert metrics.table.names == ("a", "b")
    np.testing.assert_allclose(metrics.table.rates, [[1.0, 0.1], [2.0, 0.0]])
    np.testing.assert_allclose(metrics.mean_input, [100, 200])
    np.testing.assert_allclose(metrics.mean_output, [10, 10])
    assert metrics.table.start_s.tolist() == [0.0, 60.0]
    assert not metrics.estimated


def test_a_window_counts_as_long_as_it_was_observed() -> None:
    """A Prometheus that is new, or was away, has a part of the first or the last window: rates are those of the part,
    and such windows are left out where others are whole."""
    seen = {"first": matrix({"": [(60, 40), (120, 61)]}), "last": matrix({"": [(60, 60), (120, 120)]})}
    metrics = parse(answers(**seen), CUSTOM)
    assert metrics.table.start_s.tolist() == [60.0]
    np.testing.assert_allclose(metrics.table.rates, [[2.0]])
    np.testing.assert_allclose(metrics.mean_input, [100])
    alone = {name: matrix({"a": [(60, count)]}) for name, count in (("requests", 60), ("input_tokens", 6000))}
    short = {"first": matrix({"": [(60, 41)]}), "last": matrix({"": [(60, 60)]})}
    metrics = parse(answers(**alone, **short), CUSTOM)
    np.testing.assert_allclose(metrics.table.rates, [[3.0]])
    assert metrics.table.busiest_s == (0.0, 20.0)


def test_hit_rates_become_shared_prefixes() -> None:
    """Hits over queries are those of all windows, and the fleet's prompts share what gives this rate."""
    counted = {
        "prefix_hits": matrix({"": [(60, 3000), (120, 6000)]}),
        "prefix_queries": matrix({"": [(60, 7200), (120, 12000)]}),
    }
    metrics = parse(answers(**counted), CUSTOM)
    assert metrics.hit_rate == pytest.approx(9000 / 19200)
    found = observe_metrics(metrics, Ranks({}, (8,)))
    assert found.fleet.shared_prefix_tokens.all()
    assert any("46.9% of the prompt tokens" in note for note in found.notes)
    drafted = {"drafts_kept": matrix({"": [(60, 90), (120, 30)]}), "drafts": matrix({"": [(60, 200), (120, 100)]})}
    drafts = observe_metrics(parse(answers(**drafted), CUSTOM), Ranks({}, (8,)))
    assert {adapter.acceptance for adapter in drafts.fleet.adapters} == {0.4}
    assert any("40.0% of the drafts" in note for note in drafts.notes)
    none = observe_metrics(parse(answers(), CUSTOM), Ranks({}, (8,)))
    assert {adapter.acceptance for adapter in none.fleet.adapters} == {None}
    assert not none.fleet.shared_prefix_tokens.any()
    assert "sum (increase(vllm:prefix_cache_hits_total[60s]))" in queries(CUSTOM, 60.0).values()


def test_vllm_shares_come_from_who_runs() -> None:
    """The rarer an adapter is seen running, the smaller its share of the counted total."""
    info = []
    for names, times in (("a,b", [15, 30]), ("a", [45]), ("", [60])):
        metric = {"running_lora_adapters": names, "waiting_lora_adapters": "", "max_lora": "4"}
        # A set that was current once is still exported later, with its old time as value.
        info.append(
            {
                "metric": metric,
                "values": [[t, str(max(u for u in times if u <= t))] for t in (15, 30, 45, 60) if t >= times[0]],
            }
        )
    running = {"status": "success", "data": {"resultType": "matrix", "result": info}}
    total = {
        name: matrix({"x": rows}, "model_name")
        for name, rows in (
            ("requests", [(60.0, 60.0)]),
            ("input_tokens", [(60.0, 6000.0)]),
            ("output_tokens", [(60.0, 600.0)]),
        )
    }
    metrics = parse({"window_s": 60.0, "running": running, **total}, SOURCES["vllm"])
    assert metrics.estimated
    assert metrics.table.names == ("a", "b")
    a, b = metrics.table.rates[0]
    assert a + b == pytest.approx(1.0)
    assert a / b == pytest.approx(np.log(1 - 3 / 4) / np.log(1 - 2 / 4))
    np.testing.assert_allclose(metrics.mean_input, [100, 100])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window_s": "x"}, "window_s"),
        ({"requests": {"status": "error", "error": "no"}}, "Prometheus says: no"),
        ({"requests": {"data": {"resultType": "vector", "result": []}}}, "matrix"),
        ({"requests": matrix({})}, "no request was counted"),
        ({"requests": matrix({"idle": [(60, 0)]})}, "no request of a named adapter"),
        ({"requests": matrix({"a": [(60, 60), (120, 1e308)]})}, "counts up to 1e"),
        ({"input_tokens": matrix({})}, "no input tokens"),
        ({"requests": None}, "matrix"),
        ({"requests": matrix({"a": [(float("nan"), 5)]})}, "matrix"),
        ({"requests": matrix({"a": [(float("inf"), 5)]})}, "matrix"),
        ({"output_tokens": {"data": {"resultType": "matrix", "result": [{"metric": 1}]}}}, "matrix"),
    ],
)
def test_bad_answers_are_refused(changes: dict[str, Any], message: str) -> None:
    """What isn't an answer with counts is refused, with the query's name."""
    with pytest.raises(FileFormatError, match=message):
        parse(answers(**changes), CUSTOM)


def test_bad_addresses_are_refused() -> None:
    """Only HTTP addresses are queried, and an absent server is an error of its own."""
    for url in (
        "file:///etc/passwd",
        "prometheus:9090",
        "http://",
        "http://localhost:abc",
        "http://localhost:99999",
        "http://[::1",
        "http://localhost:9090/a b",
    ):
        with pytest.raises(ValidationError, match="address"):
            fetch(url, CUSTOM, end_s=100, span_s=60, window_s=60)
    with pytest.raises(LiveError, match="can't be reached"):
        fetch("http://127.0.0.1:9", CUSTOM, end_s=100, span_s=60, window_s=60)


@pytest.fixture
def answering() -> Iterator[Callable[[bytes], str]]:
    """Starts a server that answers every request with given bytes, and gives its address."""
    servers = []

    def start(answer: bytes) -> str:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                """Read the request to its end, then answer."""
                length = 0
                while line := self.rfile.readline().strip().lower():
                    if line.startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                self.rfile.read(length)
                self.wfile.write(answer)

        server = socketserver.TCPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "Expected Prometheus at .* to answer in HTTP, got BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n[[[", "a matrix in JSON"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n[[[", "an answer cut after 3 of 9 bytes"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnope", "refused .* HTTP 404: nope"),
        (b"", "can't be reached"),
    ],
)
def test_what_is_no_answer_is_a_clear_error(answering: Callable[[bytes], str], answer: bytes, message: str) -> None:
    """Whatever a server sends instead of an answer, the error says what, and is never a fault of ours."""
    with pytest.raises(LiveError, match=message):
        fetch(answering(answer), CUSTOM, end_s=100, span_s=60, window_s=60)


def test_saved_answers_are_read_again(tmp_path: Path) -> None:
    """A saved file gives what the server gave; anything else is refused."""
    path = tmp_path / "saved.json"
    path.write_text(json.dumps(answers()))
    assert parse(read_export(path), CUSTOM).table.names == ("a", "b")
    for text in ("[]", "{}", "{", '{"requests": 1, "requests": 2}'):
        path.write_text(text)
        with pytest.raises(PackerError):
            read_export(path)


def test_queries_name_the_window() -> None:
    """A counter's increase is queried over one window, summed over everything but the adapter."""
    options = queries(SOURCES["envoy-ai-gateway"], 3600.0)["requests"]
    assert options == (
        "sum by (gen_ai_request_model) "
        '(increase(gen_ai_client_token_usage_token_count{gen_ai_token_type="input"}[3600s]))'
    )


class Gateway(http.server.BaseHTTPRequestHandler):
    """An exporter whose counters grow by the clock: "a" 20 requests a second, "b" 5."""

    started = 0.0

    def do_GET(self) -> None:
        """Counters as text."""
        age = time.time() - Gateway.started
        lines = []
        for name, rate, inputs, outputs in (("a", 20.0, 100, 10), ("b", 5.0, 40, 80)):
            count = rate * age
            labels = f'{{requested_model="{name}",team="x"}}'
            lines += [
                f"litellm_proxy_total_requests_metric_total{labels} {count}",
                f"litellm_input_tokens_metric_total{labels} {count * inputs}",
                f"litellm_output_tokens_metric_total{labels} {count * outputs}",
            ]
        body = ("\n".join(lines) + "\n").encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Silence."""


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus server that has scraped the exporter for some seconds."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("Prometheus is not installed (Debian: prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    Gateway.started = time.time() - 1000
    exporter = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    target = f"127.0.0.1:{exporter.server_address[1]}"
    (folder / "config.yml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
        f"scrape_configs: [{{job_name: gateway, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = [
        binary,
        f"--config.file={folder}/config.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    url = f"http://127.0.0.1:{port}"
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            deadline = time.monotonic() + 60
            while _samples(url) < 16:
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.25)
            yield url
        finally:
            process.terminate()
            exporter.shutdown()
            exporter.server_close()


def _samples(url: str) -> int:
    """How many scrapes the server has."""
    query = "count_over_time(litellm_proxy_total_requests_metric_total%7Brequested_model%3D%22a%22%7D%5B1h%5D)"
    try:
        with urllib.request.urlopen(f"{url}/api/v1/query?query={query}", timeout=5) as answer:
            return int(json.load(answer)["data"]["result"][0]["value"][1])
    except (urllib.error.URLError, IndexError):
        return 0


def test_real_server_gives_the_rates(prometheus: str) -> None:
    """What a real Prometheus scraped gives back each adapter's rate and lengths."""
    answers_now = fetch(prometheus, SOURCES["litellm"], end_s=time.time(), span_s=6.0, window_s=3.0)
    metrics = parse(answers_now, SOURCES["litellm"])
    assert metrics.table.names == ("a", "b")
    np.testing.assert_allclose(metrics.table.rates[-1], [20.0, 5.0], rtol=0.3)
    np.testing.assert_allclose(metrics.mean_input, [100, 40], rtol=0.01)
    np.testing.assert_allclose(metrics.mean_output, [10, 80], rtol=0.01)


def test_command_reads_a_real_server_and_its_saved_answers(
    prometheus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """from-metrics writes a workload and loads; the saved answers give the same without the server."""
    from packer.io.workloads import read_workload

    first, second, saved = (str(tmp_path / name) for name in ("a.csv", "b.csv", "saved.json"))
    loads = str(tmp_path / "loads.csv")
    common = ["workload", "from-metrics", "--rank", "32", "--at", "peak"]
    options = ["--url", prometheus, "--window", "3", "--span", "6"]
    assert run([*common, *options, "--save", saved, "-o", first, "--loads", loads]) == 0
    assert run([*common, "--input", saved, "-o", second, "--json"]) == 0
    assert Path(first).read_text() == Path(second).read_text()
    fleet = read_workload(first)
    assert fleet.names == ("a", "b")
    assert fleet.ranks.tolist() == [32, 32]
    assert Path(loads).read_text().startswith("adapter,peak,mean,p50,p95,each-peak\n")
    capsys.readouterr()


def test_a_new_server_gives_the_rates_of_the_time_that_it_has(prometheus: str) -> None:
    """A window that began before the first sample is not counted in full."""
    metrics = parse(fetch(prometheus, SOURCES["litellm"], end_s=time.time(), span_s=600.0, window_s=600.0), LITELLM)
    np.testing.assert_allclose(metrics.table.rates, [[20.0, 5.0]], rtol=0.5)


def test_refused_query_is_reported(prometheus: str) -> None:
    """What Prometheus says of a bad query reaches the user."""
    source = CounterNames("rate(", "x", "y", "z")
    with pytest.raises(LiveError, match="parse error"):
        fetch(prometheus, source, end_s=time.time(), span_s=6.0, window_s=3.0)


def test_skipped_models_are_left_out_of_vllms_own_metrics() -> None:
    """The shares of the others stay: requests to the base model are not theirs. Names that no request has are said."""
    times = [3600.0, 7200.0]

    def series(*rows: tuple[dict[str, str], list[list[Any]]]) -> dict[str, Any]:
        found = [{"metric": labels, "values": values} for labels, values in rows]
        return {"status": "success", "data": {"resultType": "matrix", "result": found}}

    first, second = ({"running_lora_adapters": names} for names in ("a,base", "b"))
    seen = {
        "window_s": 3600.0,
        "requests": series(({}, [[t, "100"] for t in times])),
        **{key: series(({}, [[t, "9000"] for t in times])) for key in ("input_tokens", "output_tokens")},
        "running": series((first, [[times[0], "1"]]), (second, [[times[1], "2"]])),
    }
    read = parse(seen, SOURCES["vllm"], skip=("base", "bose"))
    every, some = parse(seen, SOURCES["vllm"]).table, read.table
    first_note, second_note, *_ = observe_metrics(read, Ranks({}, (8,), ("bass",))).notes
    assert first_note == "no request names bose (--skip): traffic is to a, b"
    assert second_note == "no request names bass (--base): traffic is to a, b"
    assert (every.names, some.names) == (("a", "b", "base"), ("a", "b"))
    np.testing.assert_allclose(some.rates, every.rates[:, :2])
