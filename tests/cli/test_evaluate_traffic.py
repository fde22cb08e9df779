"""`packer evaluate` with measured traffic from the command line."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.arrival import Arrivals, RequestTrace
from packer.cli import run
from packer.io.workloads import read_workload
from packer.operate.drift import with_base
from packer.plan import Plan, Status
from packer.workload import Workload

Capture = pytest.CaptureFixture[str]
NAMES = ["a", "b", "c", "d"]
START = 1e9 + 1234.5


@pytest.fixture
def plan(toy_plan: Callable[..., Plan]) -> Plan:
    """Four light adapters on two servers; their rates are 0.10, 0.11, 0.12 and 0.13 req/s."""
    return toy_plan(NAMES)


@pytest.fixture
def plan_path(plan: Plan, tmp_path: Path) -> str:
    """The plan as a file."""
    path = tmp_path / "plan.json"
    plan.save(path)
    return str(path)


def line(second: float, model: str) -> str:
    """A request of 200 + 190 tokens."""
    return json.dumps({"time": second, "model": model, "prompt_tokens": 200, "completion_tokens": 190})


def traffic(seconds: float, factor: float = 1.0) -> str:
    """A log in which every adapter of the plan has `factor` times its rate."""
    lines = []
    for k, name in enumerate(NAMES):
        gap_s = 1 / ((0.1 + 0.01 * k) * factor)
        lines += [line(START + gap_s * n, name) for n in range(int(seconds / gap_s))]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("factor", "extra", "advice", "code"),
    [
        (1, (), "keep", 0),
        (1, ("new",), "watch", 0),
        (1, ("new", "newer"), "replan", 3),
        (1000, (), "replan", 3),
    ],
)
def test_traffic_advises(
    plan_path: str, tmp_path: Path, capsys: Capture, factor: int, extra: tuple[str, ...], advice: str, code: int
) -> None:
    """Traffic as planned is kept, new adapters are reported, and a broken server needs a new plan, as do new adapters
    with much of the load."""
    window = 100 if factor == 1 else 10
    log, seen = tmp_path / "log.jsonl", tmp_path / "seen.csv"
    # At moments of their own: requests that come at once would be bursts.
    others = [line(START + 10 * n + 3.7 + k, name) for n in range(30) for k, name in enumerate(extra)]
    log.write_text(traffic(3 * window, factor) + "\n".join(others))
    words = [
        "evaluate",
        plan_path,
        "--log",
        str(log),
        "--window",
        str(window),
        "--json",
        "--seen",
        str(seen),
        "--rank",
        "8",
    ]
    assert run(words) == code
    found = json.loads(capsys.readouterr().out)
    assert found["advice"] == advice
    assert found["new_adapters"] == list(extra)
    assert found["arrivals"] == "poisson"
    assert seen.read_text().count("\n") >= 5


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--rank", "8"), 0), (("--rank", "64"), 3)])
def test_new_adapters_are_judged_where_they_would_be_served(
    plan_path: str, tmp_path: Path, capsys: Capture, words: tuple[str, ...], code: int
) -> None:
    """They go to the least loaded server with large enough slots, as with --add, at the plan's largest rank if none is
    given; one that no server can hold has no server, and the plan does not hold."""
    log = tmp_path / "log.jsonl"
    log.write_text(traffic(300) + "\n".join(line(START + 10 * n, "new") for n in range(30)))
    given = ["evaluate", plan_path, "--log", str(log), "--window", "100", *words]
    assert run([*given, "--json"]) == code
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (found["new_adapters"], found["advice"]) == (["new"], "replan" if code else "watch")
    assert (found["unplaced"], found["holds"]) == (["new"] if code else [], not code)
    assert sum(each["adapters"] for each in found["servers"]) == (4 if code else 5)
    assert ("new: no rank is given (--rank); taken to be 8" in err) == (not words)
    assert run(given) == code
    out = " ".join(capsys.readouterr().out.split())
    where = "No server has slots large enough for: new." if code else "The plan holds."
    assert where in out
    assert ("Evaluated on the least loaded servers" in out) == (not code)


@pytest.mark.parametrize(("name", "words"), [("models/toy-7b", ()), ("alias", ("--base", "alias")), ("alias", ())])
def test_requests_to_the_base_model_need_no_adapter(
    plan_path: str, tmp_path: Path, capsys: Capture, name: str, words: tuple[str, ...]
) -> None:
    """The base model, by its own name or one that --base gives, is on every server: its requests are evaluated there,
    and are no new adapter, which they are under an unknown name."""
    log, seen = tmp_path / "log.jsonl", tmp_path / "seen.csv"
    log.write_text(traffic(300) + "\n".join(line(START + 10 * n, name) for n in range(30)))
    known = name != "alias" or bool(words)
    given = ["evaluate", plan_path, "--log", str(log), "--window", "100", *words, "--seen", str(seen)]
    assert run([*given, "--json", "--rank", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["new_adapters"] == ([] if known else [name])
    assert sum(each["adapters"] for each in found["servers"]) == 5
    assert [(each["adapter"], each["planned"]) for each in found["drifted"]] == [(name, 0.0)] * known
    fleet = read_workload(seen)
    assert fleet.ranks[fleet.names.index(name)] == (0 if known else 8)


def test_the_base_model_has_the_name_of_the_plan(plan: Plan) -> None:
    """A plan and a log may call the base model by different names: its requests are matched."""
    own = replace(plan.workload.adapters[3], name="base", rank=0)
    planned = replace(plan, workload=replace(plan.workload, adapters=(*plan.workload.adapters[:3], own)))
    seen = with_base(planned, Workload([Adapter("a", 1, 1.0), Adapter("alias", 1, 2.0)]), ["alias"])
    assert [(each.name, each.rank) for each in seen.adapters] == [("a", 1), ("base", 0)]


def test_a_log_longer_than_the_window_is_not_diluted(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """66 minutes at the planned rates, seen through a window of an hour, show the planned rates."""
    log = tmp_path / "log.jsonl"
    log.write_text(traffic(66 * 60))
    assert run(["evaluate", plan_path, "--log", str(log), "--tolerance", "0.03", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["advice"], found["drifted"]) == ("keep", [])
    log.write_text(traffic(1200))  # a shorter one does not show an hour
    run(["evaluate", plan_path, "--log", str(log)])
    assert "Busiest 19.9 min: offered load" in capsys.readouterr().out


def test_a_log_is_read_in_other_words(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """Columns under other names, models that are no adapters and what stands before adapters' names are given as to
    other commands that read logs; without a log they are refused."""
    log = tmp_path / "log.jsonl"
    lines = [json.loads(text) for text in traffic(300).splitlines()]
    lines += [{**each, "model": "judge"} for each in lines[:40]]
    other = [{"lora": f"vllm/{each.pop('model')}", **each} for each in lines]
    log.write_text("\n".join(map(json.dumps, other)))
    words = ["evaluate", plan_path, "--window", "100"]
    given = ["--key", "model=lora", "--skip", "judge", "--strip-prefix", "vllm/"]
    assert run([*words, "--log", str(log), *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["advice"], found["new_adapters"]) == ("keep", [])
    for k in (0, 2, 4):
        assert run([*words, *given[k : k + 2]]) == 2
        assert "says how a log is read: expected --log LOG with it" in capsys.readouterr().err


def test_a_log_is_evaluated_with_its_bursts_and_its_requests(plan: Plan, tmp_path: Path, capsys: Capture) -> None:
    """Its bursts take the place of the plan's, its busiest window is replayed as it was; advice has the file."""
    path, log = tmp_path / "limited.json", tmp_path / "log.jsonl"
    replace(plan, objective="recommend").save(path)
    log.write_text(traffic(3600))
    words = ["evaluate", str(path), "--log", str(log)]
    assert run([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["arrivals"], found["replayed"]["holds"]) == ("poisson", True)
    assert found["replayed"]["text"].startswith("Serves 100 %, keeps p95 TTFT 2 s")
    rush = [line(START + 60.0 * (n // 40) + 0.01 * (n % 40), NAMES[n % 4]) for n in range(2400)]
    log.write_text("\n".join(rush))
    assert run([*words, "--slo", "p95_ttft_ms=14"]) == 3
    out = " ".join(capsys.readouterr().out.split())
    assert "With the requests of that window as they were: serves 100 %, breaks p95 TTFT 14 ms" in out
    assert f"Plan again: --seen seen.csv writes this traffic, packer solve seen.csv --from {path}." in out
    assert run([*words, "--slo", "p95_ttft_ms=14", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["arrivals"], found["replayed"]["holds"]) == ("bursty", False)


def test_a_replayed_trace_does_not_hide_the_measured_rates(plan: Plan, tmp_path: Path, capsys: Capture) -> None:
    """A plan made for a replayed trace is evaluated at the rates that were measured, and that is said."""
    n = 40
    requests = RequestTrace(np.arange(n) * 2.0, np.arange(n, dtype=np.int64) % 4, np.full(n, 200), np.full(n, 190))
    fleet = plan.workload.with_arrivals(Arrivals("trace", trace=requests))
    path, log = tmp_path / "traced.json", tmp_path / "log.jsonl"
    replace(plan, workload=fleet).save(path)
    log.write_text(traffic(30, 1000))
    words = ["evaluate", str(path), "--log", str(log), "--window", "10"]
    assert run([*words[:-2], "--base", "bose", *words[-2:]]) == 3
    said = capsys.readouterr()
    assert "evaluated with Poisson arrivals" in said.out
    assert "no request names bose (--base): traffic is to a, b, c, d" in said.err
    log.write_text(traffic(300))
    assert run([*words[:-1], "100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["advice"], found["arrivals"]) == ("keep", "poisson")


def test_measured_traffic_that_breaks_the_limits_needs_another_plan(
    plan: Plan, tmp_path: Path, capsys: Capture
) -> None:
    """A plan that was made for latency limits is not kept where servers serve their load and break them."""
    path, log = tmp_path / "limited.json", tmp_path / "log.jsonl"
    first, *others = plan.workload.adapters
    fleet = replace(plan.workload, adapters=(replace(first, rate=0.0), *others))
    replace(plan, objective="slo", limits={"mean_ttft_ms": 1e-3}, workload=fleet).save(path)
    log.write_text(traffic(300))
    words = ["evaluate", str(path), "--log", str(log), "--window", "100"]
    assert run(words) == 3
    out = capsys.readouterr().out
    assert "The plan breaks its latency limits." in out
    assert "slow" in out
    assert "from 0" in out  # the adapter was planned as idle
    log.write_text("\n".join(line(START + 10 * n, "new") for n in range(30)))
    assert run([*words, "--rank", "64"]) == 3
    out = capsys.readouterr().out
    assert "The servers hold, but 1 adapter has no server." in out


def test_traffic_needs_a_source(plan_path: str, capsys: Capture) -> None:
    """Without a server, a saved answer or a log there is nothing to measure again and again."""
    assert run(["evaluate", plan_path, "--every", "5"]) == 2
    assert "--url" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--log l.jsonl --url http://p:9090", "--url has no effect with --log"),
        ("--log l.jsonl --input saved.json", "--input has no effect with --log"),
        ("--log l.jsonl --gateway vllm", "--gateway has no effect with --log"),
        ("--input saved.json --url http://p:9090", "--url has no effect with --input"),
        ("--input saved.json --window 60", "--window has no effect with --input"),
        ("--log l.jsonl --rewrite", "--rewrite has no effect with measured traffic"),
        ("--tolerance 0.1", "Expected one of --log, --url and --input with --tolerance"),
        ("--window 60", "Expected one of --log, --url and --input with --window"),
        ("--rank 8", "Expected one of --log, --url and --input with --rank"),
        ("--url http://localhost:abc --every 5", "Expected an address like http://host:8000"),
        ("--url http://p:9090 --gateway custom --every 5", "Expected --requests-metric"),
    ],
)
def test_options_that_would_be_ignored_are_refused(plan_path: str, capsys: Capture, words: str, message: str) -> None:
    """What can't take effect, or never work, is refused at once instead of passed over."""
    assert run(["evaluate", plan_path, *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_without_servers_is_refused(plan: Plan, tmp_path: Path, capsys: Capture) -> None:
    """Nothing runs that could be watched: that is said."""
    path = tmp_path / "none.json"
    none = plan.evaluations.of([])
    replace(plan, bins=(), evaluations=none, status=Status.INFEASIBLE, unplaced=(0, 1, 2, 3)).save(path)
    assert run(["evaluate", str(path), "--log", "l.jsonl"]) == 2
    assert "no GPUs" in capsys.readouterr().err


def test_traffic_goes_on_when_the_server_is_away(
    plan_path: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking again and again survives a server that is away, and Ctrl-C ends it with exit code 130. Looking once, the
    command was right, but could not be done."""
    looks = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert run(["evaluate", plan_path, "--url", "http://127.0.0.1:9", "--every", "5"]) == 130
    assert looks == [5.0, 5.0]
    assert capsys.readouterr().err.count("can't be reached") == 2
    assert run(["evaluate", plan_path, "--url", "http://127.0.0.1:9"]) == 3


def test_traffic_goes_on_when_the_log_is_rotated(
    plan_path: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log that is away, empty, without a whole line, with only one or no longer written is reported; the next look
    counts."""
    log = tmp_path / "log.jsonl"
    half = '{"time": 1000001600.0, "model": "a", "prom'
    states = ["", half, line(START, "a") + "\n" + half, traffic(300) + half, traffic(300)]

    def sleep(_seconds: float) -> None:
        if not states:
            raise KeyboardInterrupt
        log.write_text(states.pop(0))
        if not states:
            os.utime(log, (0.0, time.time() - 600.0))

    monkeypatch.setattr("time.sleep", sleep)
    words = ["evaluate", plan_path, "--log", str(log), "--window", "100", "--every", "5", "--json"]
    assert run(words) == 130
    out, err = capsys.readouterr()
    first, _ = json.JSONDecoder().raw_decode(out)
    assert first["advice"] == "keep"
    for message in ("no such file", "is empty", "row 1: expected JSON", "longer than 0 s", "written 10 minutes ago"):
        assert err.count(message) == 1


def test_traffic_goes_on_when_a_rank_is_unknown(
    plan_path: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new adapter whose rank is not given is evaluated, and that the fleet is not written without it is said, as is
    that the plan can't be written because its folder is gone."""
    log, looks, folder = tmp_path / "log.jsonl", [1], tmp_path / "out"
    folder.mkdir()
    log.write_text(traffic(300) + line(START + 250, "new"))

    def sleep(_seconds: float) -> None:
        if not looks.pop():
            raise KeyboardInterrupt
        looks.append(0)
        folder.rename(tmp_path / "away")

    monkeypatch.setattr("time.sleep", sleep)
    seen = str(tmp_path / "seen.csv")
    words = ["evaluate", plan_path, "--log", str(log), "--window", "100", "--seen", seen]
    assert run([*words, "--every", "5", "-o", str(folder / "plan.json")]) == 130
    out, err = capsys.readouterr()
    assert (out.count("Keep the plan for now"), err.count("Expected the rank of every adapter")) == (2, 1)
    assert f"there is no directory '{folder}' to write into" in err
    assert run(words) == 2
    assert "Keep the plan for now" in capsys.readouterr().out
    log.write_text(traffic(300))
    monkeypatch.setattr("packer.cli.options.show", Mock(side_effect=BrokenPipeError))
    assert (run(words), Path(seen).exists()) == (0, True)  # also if nobody reads the output


def test_traffic_goes_on_when_nothing_is_asked(
    plan_path: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A latest window without requests is reported, not taken for a fleet without adapters."""
    saved = tmp_path / "saved.json"
    series = {"metric": {"requested_model": "a"}, "values": [[60, "60"], [120, "0"]]}
    answer = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    saved.write_text(
        json.dumps({"window_s": 60, **dict.fromkeys(("requests", "input_tokens", "output_tokens"), answer)})
    )

    def sleep(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    assert run(["evaluate", plan_path, "--input", str(saved), "--every", "5"]) == 130
    assert "no request was counted in the latest window" in capsys.readouterr().err
    assert run(["evaluate", plan_path, "--input", str(saved)]) == 2


def test_estimates_are_marked(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """A result that rests on an estimated profile says so in each form of output; quiet says nothing."""
    log = tmp_path / "log.jsonl"
    log.write_text(traffic(300))
    words = ["evaluate", plan_path, "--log", str(log), "--window", "100"]
    assert run(words) == 0
    out, err = capsys.readouterr()
    assert "estimated, not calibrated" in out
    assert "estimated, not calibrated" in err
    assert run([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is False
    assert run([*words, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "127.0.0.1:0"], "give --every"),
        (["--listen", "nowhere", "--every", "60"], "Expected HOST:PORT"),
        (["--listen", "256.0.0.1:1", "--every", "60"], "nothing can listen there"),
    ],
)
def test_metrics_need_an_address_and_repetition(
    plan_path: str, tmp_path: Path, capsys: Capture, words: list[str], message: str
) -> None:
    """--listen without --every, or on no address, is an input error before anything is measured."""
    log = tmp_path / "log.jsonl"
    log.write_text(traffic(10))
    assert run(["evaluate", plan_path, "--log", str(log), *words]) == 2
    assert message in capsys.readouterr().err
