"""`packer simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from packer.cli import run
from packer.cli.options import DEFAULT_PROFILE
from packer.io.profiles import load_profile
from packer.io.workloads import read_workload
from packer.twin.override import with_engine
from packer.twin.simulate import simulate

SERVER = ["--max-loras", "4", "--duration", "300"]


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """A file of six adapters."""
    path = tmp_path / "fleet.csv"
    rows = "".join(f"a{i},8,1,100,20\n" for i in range(6))
    path.write_text("adapter,rank,rate,input_tokens,output_tokens\n" + rows)
    return str(path)


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    result: dict[str, object] = json.loads(capsys.readouterr().out)
    return result


def test_metrics_are_those_of_the_library(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints what `packer.simulate` says for the same arguments."""
    result = _json(["simulate", fleet, *SERVER, "--seed", "3", "--max-outstanding", "50"], capsys)
    profile = load_profile("h100-64gb/llama-3.1-8b-instruct")
    sim = simulate(read_workload(fleet), profile, max_loras=4, duration_s=300.0, seed=3, max_outstanding=50)
    assert result.pop("verdict")["holds"]
    assert result == json.loads(json.dumps(sim.to_dict()))


def test_table_shows_metrics_and_verdict(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the usual figures, and ends with whether the server keeps the goal."""
    assert run(["simulate", fleet, *SERVER]) == 0
    text = capsys.readouterr().out
    for words in ("throughput, tok/s", "TTFT mean, ms", "TPOT p99, ms", "preemptions", "\nServes 99"):
        assert words in text
    assert run(["simulate", fleet, *SERVER, "--rate-factor", "40"]) == 0
    assert "\nStarves: serves " in capsys.readouterr().out


@pytest.mark.parametrize("command", ["simulate", "sweep"])
def test_a_server_that_vllm_may_end_is_named(command: str, fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Drafts with fewer slots than adapters are named on one server as in a plan; with a slot for each they are not."""
    drafts = "speculation=eagle:num_speculative_tokens=1,acceptance=0.5"
    for slots, ahead, said in (("1", "true", 1), ("16", "true", 0), ("1", "false", 0)):
        given = [f"--set={each}" for each in (drafts, "vllm-version=0.32.0", f"async-scheduling={ahead}")]
        assert run([command, fleet, "--max-loras", slots, "--duration", "9", *given]) == 0
        assert capsys.readouterr().out.count("Outage: vLLM 0.32.0 ends in an assertion") == said


@pytest.mark.parametrize("seeds", ["1", "2"])
def test_what_a_paced_client_holds_back_is_not_refused(
    fleet: str, capsys: pytest.CaptureFixture[str], seeds: str
) -> None:
    """Requests that wait at the client for a place have a row and a field of their own, besides those refused."""
    how = ["simulate", fleet, *SERVER, "--concurrency", "1", "--paced", "--seeds", seeds]
    found = _json(how, capsys)
    assert found["refused"] == 0
    assert found["held_back"] > 100  # type: ignore[operator]
    assert 0 <= found["sent"] - found["held_back"] - found["completed"] <= 1  # type: ignore[operator]
    assert run(how) == 0
    rows = {line.strip().rsplit("  ", 1)[0].split("  ")[0] for line in capsys.readouterr().out.splitlines()}
    assert {"requests sent or held back", "refused by the client", "held back by the client"} <= rows


def test_a_closed_loop_of_one_request_is_said_in_the_singular(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A count of one has a noun in the singular."""
    assert run(["simulate", fleet, *SERVER, "--concurrency", "1"]) == 0
    assert "Closed loop: always 1 request outstanding." in capsys.readouterr().out


@pytest.mark.parametrize("seeds", ["1", "2"])
def test_what_a_full_server_refuses_is_not_the_clients(
    fleet: str, capsys: pytest.CaptureFixture[str], seeds: str
) -> None:
    """Requests that a server refuses by its queue limit have a row and a field of their own; the limit is the cause."""
    how = ["simulate", fleet, *SERVER, "--vllm-version", "0.32.0", "--rate-factor", "10", "--seeds", seeds]
    how += ["--set", "max-num-queued-reqs=4"]
    found = _json(how, capsys)
    assert found["refused_by_client"] == 0
    assert found["refused_by_server"] == found["refused"] > 100  # type: ignore[operator]
    assert found["verdict"]["cause"]["name"] == "queue limit"  # type: ignore[index]
    assert run(how) == 0
    out = capsys.readouterr().out
    rows = [line.strip().split("  ")[0] for line in out.splitlines()]
    place = rows.index("refused by the client")
    assert rows[place + 1] == "refused by the server, queue limit"
    assert "What would help: max_num_queued_reqs 8." in out


def test_hit_rates_are_printed_where_prefixes_are_cached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server with prefix caching says which part of the prompts it found, in all and by adapter; others do not."""
    path, table = tmp_path / "sessions.csv", tmp_path / "adapters.csv"
    path.write_text("adapter,rank,rate,turns,think_s\na,8,1,4,5\nb,8,1,1,\n")
    today = ["simulate", str(path), *SERVER, "--vllm-version", "0.32.0", "--per-adapter", str(table)]
    assert run(today) == 0
    assert "prompt tokens found in the KV cache, share" in capsys.readouterr().out
    profile = with_engine(load_profile(DEFAULT_PROFILE), vllm_version="0.32.0")
    sim = simulate(read_workload(path), profile, max_loras=4, duration_s=300.0)
    hits = pl.read_csv(table)["prefix_hit_rate"].to_list()
    assert hits == pytest.approx(sim.adapter_prefix_hit_rate.tolist())
    assert hits[1] == 0.0 < hits[0] < 1.0
    assert _json([*today, "--force"], capsys)["prefix_hit_rate"] == sim.prefix_hit_rate
    assert "prefix_hit_rate" not in _json(["simulate", str(path), *SERVER], capsys)


def test_one_adapter_is_counted_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Titles count adapters and servers in words that fit one of them."""
    single, cluster = tmp_path / "single.csv", tmp_path / "one.toml"
    single.write_text("adapter,rank,rate\na,8,0.1\n")
    kind = f'schema = 1\n[[kinds]]\nname = "one"\nprofile = "{DEFAULT_PROFILE}"\nmax_loras = 8\n'
    cluster.write_text(f'{kind}[[nodes]]\nservers = ["one"]\n')
    for given, title in (
        (SERVER, "1 adapter on one "),
        (["--cluster", str(cluster)], "1 adapter on 1 server,"),
    ):
        assert run(["simulate", str(single), *given]) == 0
        assert title in capsys.readouterr().out


def test_files_are_written(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """State over time, adapters, picture and metrics go to their files, and a second time only with --force."""
    paths = {name: str(tmp_path / name) for name in ("t.csv", "a.parquet", "s.html", "r.json")}
    arguments = ["simulate", fleet, *SERVER, "--timeline", paths["t.csv"], "--per-adapter", paths["a.parquet"]]
    arguments += ["--plot", paths["s.html"], "-o", paths["r.json"], "--quiet"]
    assert run(arguments) == 0
    assert capsys.readouterr().out == ""
    assert pl.read_csv(paths["t.csv"])["running"].max() > 0  # type: ignore[operator]
    assert pl.read_parquet(paths["a.parquet"])["adapter"].to_list() == [f"a{i}" for i in range(6)]
    assert "KV cache" in Path(paths["s.html"]).read_text("utf-8")
    assert json.loads(Path(paths["r.json"]).read_text("utf-8"))["status"] == "ok"
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err
    assert run([*arguments, "--force"]) == 0


def test_seeds_give_means_and_intervals(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With several seeds each metric is a mean within its interval."""
    result = _json(["simulate", fleet, *SERVER, "--seeds", "5"], capsys)
    intervals = result["intervals_95"]
    assert isinstance(intervals, dict)
    row = intervals["mean_ttft_ms"]
    assert row["low"] < result["mean_ttft_ms"] == row["mean"] < row["high"]
    assert (row["runs"], result["seeds"], result["starved_share"]) == (5, 5, 0.0)
    assert run(["simulate", fleet, *SERVER, "--seeds", "5"]) == 0
    assert "mean of 5 seeds" in capsys.readouterr().out


def test_seeds_tell_how_far_the_cliff_is(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Several seeds give the probability of failure with an interval, and the load at which it reaches 5 %."""
    short = [*SERVER, "--seeds", "3"]
    result = _json(["simulate", fleet, *short], capsys)
    failure, cliff = result["failure"], result["cliff"]
    assert isinstance(failure, dict)
    assert isinstance(cliff, dict)
    assert (failure["probability"], failure["low"], failure["runs"]) == (0.0, 0.0, 3)
    assert 0.0 < failure["high"] < 1.0
    assert cliff["low"] <= cliff["load_factor"] <= cliff["high"]
    assert cliff["seeds"] == 3
    assert run(["simulate", fleet, *short]) == 0
    out = capsys.readouterr().out
    assert "Starves or queues without end with a probability of 0%" in out
    assert "times the load" in out
    heavy = _json(["simulate", fleet, *short, "--rate-factor", "40"], capsys)
    assert heavy["failure"]["probability"] == 1.0  # type: ignore[index]


def test_memory_error_is_a_result(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server that does not start exits with 0, says why, and draws nothing."""
    picture = tmp_path / "s.html"
    arguments = ["simulate", fleet, "--max-loras", "2000", "--plot", str(picture)]
    assert run(arguments) == 0
    out = capsys.readouterr()
    assert "memory error: the server does not start: 2000 slots of rank 8 leave no memory" in out.out
    assert "nothing to draw" in out.err
    assert not picture.exists()
    result = _json(["simulate", fleet, "--max-loras", "2000", "--seeds", "2"], capsys)
    assert (result["status"], result["starved"], result["completed"]) == ("memory_error", True, 0)


@pytest.mark.parametrize("kind", ["poisson", "lognormal", "unpredictable", "piecewise"])
def test_arrivals_are_replaced(kind: str, fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--arrivals takes the place of the workload's own process."""
    plain = _json(["simulate", fleet, *SERVER], capsys)
    cv, period = ["--arrivals-cv", "3"], ["--period", "60"]
    more = {"lognormal": cv, "unpredictable": [*cv, *period], "piecewise": ["--factors", "0.5,2", *period]}
    other = _json(["simulate", fleet, *SERVER, "--arrivals", kind, *more.get(kind, [])], capsys)
    assert (other["sent"] == plain["sent"]) == (kind == "poisson")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--arrivals", "piecewise"], "--factors"),
        (["--factors", "1,2"], "piecewise"),
        (["--arrivals-cv", "2"], "lognormal or unpredictable"),
        (["--arrivals", "lognormal", "--period", "60"], "unpredictable or piecewise"),
        (["--arrivals", "piecewise", "--factors", "1,x"], "'1,x'"),
        (["--timeline", "t.txt"], ".csv, .parquet"),
        (["--plot", "p.pdf"], ".html"),
        (["-o", "/nowhere/r.json"], "/nowhere"),
        (["--max-lora-rank", "12"], "Expected --max-lora-rank to be one of"),
        (["--seeds", "0"], "0"),
        (["--profile", "h100-64gb/llama-3.1-8b-instrukt"], "Did you mean"),
    ],
)
def test_wrong_options_are_refused(
    wrong: list[str], message: str, fleet: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong or unfit option is one message and exit code 2."""
    assert run(["simulate", fleet, *SERVER, *wrong]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    "wrong",
    [
        "--arrivals-cv 2",
        "--per-server t.csv",
        "--router affinity",
        "--profile nope",
        "--cluster nope.toml",
        "--cluster c.toml --explain",
        "--cluster c.toml --max-loras 4",
    ],
)
def test_wrong_options_are_refused_before_the_fleet_is_read(
    wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A long log takes a minute, after which no option is refused that could have been refused at once."""
    (tmp_path / "fleet.csv").write_text("no fleet\n", "utf-8")
    assert run(["simulate", str(tmp_path / "fleet.csv"), *wrong.split()]) == 2
    assert "fleet.csv" not in capsys.readouterr().err


def test_idle_adapters_have_the_rate_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rate that stands for 0 is in no output, nor is a multiple of it."""
    fleet, table = tmp_path / "fleet.csv", tmp_path / "table.csv"
    fleet.write_text("adapter,rank,rate\na,8,0\n")
    assert run(["workload", "describe", str(fleet)]) == 0
    assert "1 adapter, 0 req/s" in capsys.readouterr().out
    words = ["--max-loras", "1", "--duration", "60", "--rate-factor", "2", "--per-adapter", str(table)]
    assert run(["simulate", str(fleet), *words]) == 0
    assert table.read_text().split("\n")[1].startswith("a,8,0.0,0,0,")


@pytest.mark.parametrize("slo", [[], ["--slo", "p95_ttft_ms=300"]])
@pytest.mark.parametrize("words", [["simulate", "--max-loras", "1"], ["simulate", "--cluster"], ["sweep"]])
def test_a_class_without_limits_is_refused_as_by_solve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], slo: list[str]
) -> None:
    """No command judges an adapter of a class by the limits of the others, unless no limits are asked for."""
    fleet, cluster = tmp_path / "fleet.csv", tmp_path / "cluster.toml"
    fleet.write_text("adapter,rank,rate,slo_class\na,8,0.1,chat\n")
    kind = f'[[kinds]]\nname = "h"\nprofile = "{DEFAULT_PROFILE}"\nmax_loras = 1\n'
    cluster.write_text(f'schema = 1\n{kind}[[nodes]]\ncount = 1\nservers = ["h"]\n')
    given = [*words, *([str(cluster)] if words[-1] == "--cluster" else []), str(fleet), "--duration", "60"]
    assert run([*given, *slo]) == 2
    assert "slo_class 'chat' of adapter 'a'" in capsys.readouterr().err
    assert run([*given, "--slo", "none"]) == 0
