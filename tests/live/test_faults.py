"""Whatever a server answers, packer ends soon, with words about that server and the exit code for it."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import RequestTrace
from packer.cli import run
from packer.io.profiles import load_profile
from packer.live import act, client, results
from packer.live.client import run_load
from packer.live.load import LoadJob
from packer.planning.solve import solve
from packer.workload import Workload
from tests.live.certificates import UNTRUSTED, untrusted_server
from tests.live.faults import (
    APPLIED,
    ASKED,
    DONE,
    EVENT,
    PROMETHEUS,
    STREAM,
    STREAMED,
    TOKEN,
    Answer,
    Fault,
    ok,
    sent,
    usage,
)
from tests.live.stand_in import StandIn


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    """A server with an adapter."""
    found = StandIn({"a": "/a"})
    yield found
    found.close()


def fast(faults: dict[str, Fault]) -> list[str]:
    """Those that need not wait."""
    return [name for name, fault in faults.items() if not fault.slow]


def check(fault: Fault, words: list[str], code: int, server: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command against a server with this fault."""
    server.raw = {fault.path: fault.answer}
    found = run(words)
    out, err = capsys.readouterr()
    said = re.sub(r"\s+", " ", out + err)
    assert re.search(fault.says, said), said[-2000:]
    assert found == code, said[-2000:]
    assert "Traceback" not in err
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", out + err)
    assert len(err) < 2000


@pytest.mark.parametrize("name", fast(ASKED))
def test_the_doctor_says_what_is_wrong(
    name: str, server: StandIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damaged, endless and foreign answers to its questions."""
    monkeypatch.setenv("COLUMNS", "300")
    check(ASKED[name], ["live", "doctor", "--url", server.url], 3, server, capsys)


@pytest.mark.parametrize("name", fast(PROMETHEUS))
def test_prometheus_may_answer_anything(
    name: str, server: StandIn, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No fleet is written from what is not an answer."""
    words = ["workload", "from-metrics", "--url", server.url, "--rank", "8", "-o", str(tmp_path / "w.csv")]
    check(PROMETHEUS[name], words, 3, server, capsys)
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a plan for one server."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    solve(Workload([Adapter("a", 8, 0.1)]), profile, objective="gpus", predictor="tree").save(path)
    return path


@pytest.mark.parametrize("name", fast(APPLIED))
def test_nothing_is_applied_to_a_server_that_answers_so(
    name: str, server: StandIn, capsys: pytest.CaptureFixture[str], plan: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Which adapters it holds is not known: nothing is asked but this. A server of another model is wrong input."""
    monkeypatch.setattr(act, "POLL_S", 0.01)
    (tmp_path / "servers.toml").write_text(f'schema = 1\n[[servers]]\nurl = "{server.url}"\n')
    server.calls.clear()
    words = ["live", "apply", str(plan), "--servers", str(tmp_path / "servers.toml"), "--dry-run"]
    check(APPLIED[name], words, 2 if "serves" in APPLIED[name].says else 3, server, capsys)
    assert {path for path, _ in server.calls} <= {"/v1/models", "/metrics"}


def load(server: StandIn, answer: Answer, patience_s: float = 0.4) -> results.LoadResult:
    """Three requests of two tokens, answered so. `patience_s`: how long the answers may take."""
    server.raw = {"/v1/completions": answer}
    n = np.ones(3, dtype=np.int64)
    trace = RequestTrace(0.01 * np.arange(3), 0 * n, 5 * n, 2 * n)
    job = LoadJob(server.url, ("a",), trace, 0.1, drain_s=patience_s, metrics_interval_s=0.0)
    return asyncio.run(run_load(replace(job, stall_s=0.75 * patience_s)))


@pytest.mark.parametrize("name", STREAMED)
def test_a_stream_may_be_anything(name: str, server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests have failed, or the server hangs: none counts as served, and the run says why."""
    monkeypatch.setattr(client, "END_S", 0.1)
    monkeypatch.setattr(client, "ERROR_S", 0.2)
    answer, says = STREAMED[name]
    found = load(server, answer)
    said = f"{found.ended} {' '.join(found.errors)} {found.fault}"
    assert found.fault is not None, said
    assert re.search(says, said), said
    assert not len(found.done)
    assert max(map(len, [found.ended, *found.errors])) < 400


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("kind", UNTRUSTED)
def test_a_server_with_a_bad_certificate_is_asked_nothing(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that is unknown, another host's or out of date: said in words, and no question is sent."""
    monkeypatch.setenv("COLUMNS", "300")
    server, environment = untrusted_server(kind, tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    url = server.url.replace("http:", "https:")
    asked = ["workload", "from-metrics", "--url", url, "--rank", "8", "-o", str(tmp_path / "w.csv")]
    for words in (["live", "doctor", "--url", url], asked):
        assert run(words) == 3
        out, err = capsys.readouterr()
        assert re.search(UNTRUSTED[kind][-1], re.sub(r"\s+", " ", out + err))
        assert "Traceback" not in err
    assert not server.calls
    server.close()


def test_an_idle_connection_is_not_used_again(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM closes connections that were idle for 5 s: a request on one that is just being closed would fail."""
    assert client.KEEP_ALIVE_S < 5
    monkeypatch.setattr(client, "KEEP_ALIVE_S", 1e-9)
    connections = set()

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.close_connection = False
        connections.add(handler.client_address)
        ok(EVENT * 2 + b"data: [DONE]\n\n")(handler)

    assert len(load(server, answer, 20.0).done) == 3
    assert len(connections) == 3


@pytest.mark.parametrize(("begin", "separators"), [(b"data: ", (", ", ": ")), (b"data:", (",", ":"))])
def test_a_gateway_may_write_events_in_its_own_way(begin: bytes, separators: tuple[str, str], server: StandIn) -> None:
    """Spaces in JSON, and none after the field's name: the events are vLLM's all the same."""
    objects = (TOKEN, TOKEN, usage(prompt_tokens=5, completion_tokens=2))
    lines = [*(json.dumps(each, separators=separators).encode() for each in objects), DONE]
    found = load(server, sent(STREAM + b"".join(begin + line + b"\n\n" for line in lines)), 20.0)
    assert (len(found.done), found.errors) == (3, {})
