"""The drift of a plan for Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from packer.errors import OutputError, ValidationError
from packer.export.formats import export_plan
from packer.operate.drift import Drift, drift
from packer.plan import Plan
from packer.report.metrics import Exporter, metrics_text, parse_address

SERVER_METRICS = {
    "packer_server_offered_tok_s": "offered_tok_s",
    "packer_server_predicted_throughput_tok_s": "total_token_throughput",
    "packer_server_predicted_ttft_ms": "mean_ttft_ms",
    "packer_server_predicted_itl_ms": "mean_itl_ms",
    "packer_server_predicted_kv_cache_tokens": "kv_cache_tokens",
    "packer_server_starved": "starved",
    "packer_server_memory_error": "memory_error",
}
PLAN_METRICS = (
    "packer_plan_offered_tok_s",
    "packer_plan_advice",
    "packer_plan_drifted_adapters",
    "packer_plan_new_adapters",
    "packer_plan_silent_adapters",
    "packer_server_headroom",
    "packer_watch_last_success_timestamp_seconds",
)


@pytest.fixture(scope="module")
def found(toy_plan: Callable[..., Plan]) -> Drift:
    """Light traffic at twice the planned rates."""
    plan = toy_plan(["a", "b", "c", "d"])
    return drift(plan, plan.workload.scaled(2.0))


def text_of(found: Drift, read_at_s: float) -> str:
    """The drift as it is served."""
    return metrics_text(found.evaluation.plan, found.to_dict(), read_at_s)


def samples(text: str) -> dict[tuple[str, str], float]:
    """(metric, value of its label) → value, as Prometheus's own parser reads the text."""
    return {
        (each.name, next(iter(each.labels.values()), "")): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_the_text_holds_the_drift(found: Drift) -> None:
    """Every figure of each server, the loads, the advice and the counts are there, by Prometheus's parser."""
    text = text_of(found, 1234.5)
    values = samples(text)
    for k, row in enumerate(found.evaluation.plan.evaluations):
        for name, figure in SERVER_METRICS.items():
            assert values[name, f"gpu-{k}"] == pytest.approx(float(getattr(row, figure)))
    assert values["packer_plan_offered_tok_s", "measured"] == pytest.approx(
        2 * values["packer_plan_offered_tok_s", "planned"]
    )
    advice = {each: values["packer_plan_advice", each] for each in ("keep", "watch", "replan")}
    assert advice == {"keep": 0.0, "watch": 1.0, "replan": 0.0}
    assert values["packer_plan_drifted_adapters", ""] == 4
    assert values["packer_watch_last_success_timestamp_seconds", ""] == 1234.5
    assert {family.name for family in text_string_to_metric_families(text)} == {*SERVER_METRICS, *PLAN_METRICS}


def test_a_server_that_breaks_has_a_headroom(toy_plan: Callable[..., Plan]) -> None:
    """The headroom of a server that breaks at the measured rates is 0: without a sample no alarm would be raised."""
    plan = toy_plan(["a", "b"], gpus=2)
    first, second = plan.workload.adapters
    fleet = replace(plan.workload, adapters=(replace(first, rate=1000.0), second))
    values = samples(text_of(drift(plan, fleet), 1.0))
    found = [values["packer_server_headroom", f"gpu-{k}"] for k in range(2)]
    assert found[0] == 0.0
    assert found[1] > 1.0


def test_the_dashboard_asks_for_what_is_served(toy_plan: Callable[..., Plan]) -> None:
    """Every metric of a plan that the dashboard draws is served; test_follow.py has those of live follow."""
    text = export_plan(toy_plan(["a"], gpus=1), "grafana")["dashboard.json"]
    queries = [target["expr"] for panel in json.loads(text)["panels"] for target in panel["targets"]]
    drawn = {name for query in queries for name in re.findall(r"packer_(?!live)\w+", query)}
    assert drawn
    assert drawn <= {*SERVER_METRICS, *PLAN_METRICS}


def test_metrics_are_served(found: Drift) -> None:
    """/metrics has the latest text, other paths are not found, and a port in use is an error with exit code 2."""
    exporter = Exporter()
    with exporter.listen("127.0.0.1:0") as port:
        exporter.text = text_of(found, 1.0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert answer.read().decode() == exporter.text
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10)
        with pytest.raises(OutputError, match="nothing can listen"), Exporter().listen(f"127.0.0.1:{port}"):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="This machine has no IPv6")
def test_metrics_are_served_on_an_ipv6_address() -> None:
    """An address in brackets is one of IPv6."""
    exporter = Exporter()
    exporter.text = "a 1\n"
    with exporter.listen("[::1]:0") as port:
        assert urllib.request.urlopen(f"http://[::1]:{port}/metrics", timeout=10).read() == b"a 1\n"


@pytest.mark.parametrize(
    "address",
    [
        "9877", ":9877", "host:", "host:x", "host:70000", "host:-1", "host:٣", "u:secret@h:9", "u:secret@h:x",
        "::1:9877", "::9877", "[::1:9877",
    ],
)  # fmt: skip
def test_bad_addresses_are_refused(address: str) -> None:
    """An address is a host and a port; a login in it is refused and not repeated."""
    with pytest.raises(ValidationError, match="HOST:PORT") as refused:
        parse_address(address)
    assert "secret" not in str(refused.value)


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed (Debian: prometheus)")
def test_a_real_prometheus_scrapes_it(found: Drift, tmp_path: Path) -> None:
    """A Prometheus server that scrapes packer answers queries of its metrics."""
    exporter = Exporter()
    exporter.text = text_of(found, time.time())
    with exporter.listen("127.0.0.1:0") as port:
        (tmp_path / "prometheus.yml").write_text(
            "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
            f"scrape_configs: [{{job_name: packer, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
        )
        result: list[dict[str, dict[str, str]]] | None = None
        for attempt in range(5):  # another process may take the port before Prometheus does: then it ends
            with socket.create_server(("127.0.0.1", 0)) as chosen:
                own = chosen.getsockname()[1]
            with (tmp_path / "said").open("wb") as said:
                process = subprocess.Popen(
                    [
                        "prometheus",
                        f"--config.file={tmp_path}/prometheus.yml",
                        f"--storage.tsdb.path={tmp_path}/data-{attempt}",
                        f"--web.listen-address=127.0.0.1:{own}",
                    ],
                    stdout=said,
                    stderr=said,
                )
            try:
                result = queried(process, own, "packer_plan_advice == 1")
            finally:
                process.terminate()
                process.wait(30)
            if result is not None:
                break
    assert result is not None, (tmp_path / "said").read_text()
    assert [each["metric"]["advice"] for each in result] == ["watch"]


def queried(process: subprocess.Popen[bytes], port: int, query: str) -> list[dict[str, dict[str, str]]] | None:
    """The answer of a Prometheus server, once it has one; None if it ends or has none after 60 s."""
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    end = time.monotonic() + 60.0
    while process.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                found: list[dict[str, dict[str, str]]] = json.load(answer)["data"]["result"]
                if found:
                    return found
        except OSError:
            pass
        time.sleep(0.1)
    return None
