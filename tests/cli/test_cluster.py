"""Clusters from the command line: simulate, compare, systems."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import polars as pl
import pytest

from packer.cli import run
from packer.goal import Slo
from packer.io.clusters import read_cluster
from packer.io.plans import load_plan
from packer.io.workloads import read_workload
from packer.twin.cluster.simulate import simulate_cluster

CLUSTER = """\
schema = 1
[[kinds]]
name = "h100"
profile = "h100-64gb/llama-3.1-8b-instruct"
max_loras = 4
[[nodes]]
count = 2
servers = ["h100"]
[slo]
ttft_ms = 500
"""


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """A file of six adapters."""
    path = tmp_path / "fleet.csv"
    rows = "".join(f"a{i},8,1,100,20\n" for i in range(6))
    path.write_text("adapter,rank,rate,input_tokens,output_tokens\n" + rows)
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A file of two servers."""
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return str(path)


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert run([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_metrics_are_those_of_the_library(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`packer simulate --cluster` prints what `packer.simulate_cluster` says for the same arguments."""
    arguments = ["simulate", fleet, "--cluster", cluster, "--router", "affinity:slack=2", "--duration", "60"]
    found = _json([*arguments, "--slo", "ttft_ms=100,tpot_ms=30", "--seed", "3"], capsys)
    again = simulate_cluster(
        read_workload(fleet), read_cluster(cluster), router="affinity:slack=2", duration_s=60.0, seed=3,
        slo={"ttft_ms": 100.0, "tpot_ms": 30.0},
    )  # fmt: skip
    found.pop("verdict")
    assert found == json.loads(json.dumps(again.to_dict()))
    assert found["servers"] == 2


def test_engine_settings_hold_for_all_servers(tmp_path: Path, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--set` changes every server of a cluster: with prefix caching the second prompt finds the first one's."""
    path = tmp_path / "alike.csv"
    path.write_text(
        "adapter,rank,rate,input_tokens,output_tokens,shared_prefix_tokens\na,8,2,200,20,160\nb,8,2,200,20,160\n"
    )
    words = [str(path), "--cluster", cluster, "--duration", "60", "--set"]
    cached, computed = (_json(["simulate", *words, f"prefix-caching={how}"], capsys) for how in ("on", "off"))
    assert float(str(cached["mean_ttft_ms"])) < float(str(computed["mean_ttft_ms"]))
    compared = ["compare", "--systems", "vllm", "--seeds", "1", *words, "prefix-caching=on"]
    (row,) = cast("list[dict[str, Any]]", _json(compared, capsys)["systems"])
    assert row["figures"]["mean_ttft_ms"]["mean"] == cached["mean_ttft_ms"]


def test_a_closed_loop_over_a_cluster(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--concurrency` holds for the whole cluster, and is one of the figures."""
    words = ["simulate", fleet, "--cluster", cluster, "--router", "most-idle", "--duration", "30", "--concurrency", "5"]
    found = _json(words, capsys)
    again = simulate_cluster(
        read_workload(fleet), read_cluster(cluster), router="most-idle", duration_s=30.0, concurrency=5
    )
    assert found["max_concurrency"] == 5
    assert found["completed"] == again.completed
    assert again.sent - again.completed == 5


def test_table_and_files(fleet: str, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table has the figures of a cluster; requests and servers go to their files."""
    requests, servers = str(tmp_path / "r.csv"), str(tmp_path / "s.parquet")
    arguments = ["simulate", fleet, "--cluster", cluster, "--duration", "60", "--seeds", "3"]
    assert run([*arguments, "--requests", requests, "--per-server", servers]) == 0
    text = capsys.readouterr().out
    for words in (
        "on 2 servers, system vllm, router most-idle",
        "within their latency limits",
        "breaks TTFT of a request <= 500 ms",
    ):
        assert words in text
    assert set(pl.read_csv(requests)["server"]) == {0, 1}
    assert pl.read_parquet(servers)["completed"].sum() <= len(pl.read_csv(requests))


def test_a_cluster_that_cuts_requests_says_so(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Like a single server, a cluster names the share of the requests that are longer than its servers take."""
    path = Path(fleet)
    path.write_text(path.read_text().replace("a0,8,1,100,20", "a0,8,1,100000,20"))
    assert run(["simulate", fleet, "--cluster", cluster, "--duration", "60"]) == 0
    assert "% of the requests have more than " in " ".join(capsys.readouterr().out.split())


def test_systems_side_by_side(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`packer compare --cluster` has one row per system in the order given, with intervals."""
    arguments = ["compare", fleet, "--cluster", cluster, "--systems", "vllm", "--duration", "30", "--seeds", "3"]
    found = _json(arguments, capsys)
    (row,) = found["systems"]  # type: ignore[misc]
    assert row["system"] == "vllm"
    assert row["figures"]["mean_ttft_ms"]["low"] < row["figures"]["mean_ttft_ms"]["mean"]
    assert run(arguments) == 0
    assert "most-idle" in capsys.readouterr().out


@pytest.mark.parametrize("names", [",", "vllm,vllm"])
def test_what_is_compared_is_something_else(
    names: str, fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing, or a name with itself, is not compared."""
    assert run(["compare", fleet, "--cluster", cluster, "--systems", names]) == 2
    assert f"Expected different names with commas between them, got {names!r}." in capsys.readouterr().err


def test_number_of_servers_for_an_slo(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--size` gives a number of servers at which the SLO holds; one fewer does not hold it."""
    busy = fleet.replace("fleet", "busy")
    Path(busy).write_text(Path(fleet).read_text("utf-8").replace(",8,1,", ",8,12,"))
    fleet_at = ["compare", busy, "--cluster", cluster, "--duration", "30", "--seeds", "2", "--systems", "vllm"]
    found = _json([*fleet_at, "--size", "--slo", "ttft_ms=200", "--share", "0.9"], capsys)
    (row,) = found["systems"]  # type: ignore[misc]
    assert row["figures"]["slo_attainment"]["mean"] >= 0.9
    assert row["servers"] > 1
    smaller = read_cluster(cluster).resized(row["servers"] - 1)
    kept = [
        simulate_cluster(
            read_workload(busy), smaller, duration_s=30.0, seed=seed, slo={"ttft_ms": 200.0}
        ).slo_attainment
        for seed in (0, 1)
    ]
    assert sum(kept) / 2 < 0.9


def test_systems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """`packer systems` names each system with its router and source."""
    found = _json(["systems"], capsys)
    assert {"vllm", "packer"} <= {each["name"] for each in found}  # type: ignore[index, misc]
    assert run(["systems", "nothing"]) == 2
    assert run(["systems", "--help"]) == 0
    assert "[NAME]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--system", "slora"], "Unknown system 'slora'"),
        (["--router", "fastest"], "Unknown router 'fastest'"),
        (["--router", "plan"], "the cluster has no placement"),
        (["--slo", "ttft_ms"], "Expected a latency goal"),
        (["--slo", "p95_tft_ms=5"], "Did you mean p95_ttft_ms?"),
        (["--max-loras", "4"], "--max-loras"),
        (["--predictor", "tree"], "leave out --predictor"),
        (["--explain"], "leave out --predictor and --explain"),
    ],
)
def test_bad_options_are_named(
    arguments: list[str], message: str, fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong option is exit code 2 and a sentence with what exists."""
    assert run(["simulate", fleet, "--cluster", cluster, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_options_of_a_cluster_need_one(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --cluster its options are refused, and --max-loras is needed."""
    assert run(["simulate", fleet, "--max-loras", "4", "--router", "random"]) == 2
    assert "--router" in capsys.readouterr().err
    assert run(["simulate", fleet]) == 2
    assert "--max-loras" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--margin", "--margin has no effect with --cluster"),
        ("--max-replicas", "--max-replicas has no effect with --cluster"),
        ("--time-limit", "--time-limit has no effect with --cluster"),
        ("--share", "--share needs --size"),
    ],
)
def test_options_without_effect_on_systems_are_refused(
    fleet: str, cluster: str, option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options of plans do nothing for systems on a given cluster, nor a share without the search for a size."""
    assert run(["compare", fleet, "--cluster", cluster, option, "1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--system s-lora --set max-num-seqs=4", "--max-num-seqs has no effect on the system s-lora."),
        ("--system s-lora --set block-size=32", "--block-size has no effect on the system s-lora."),
        ("--system dlora --set prefix-caching=on", "--prefix-caching has no effect on the system dlora."),
        (
            "--system rock --set async-scheduling=on --vllm-version 0.32.0",
            "--async-scheduling has no effect on the system rock.",
        ),
        ("--system rock --set max-model-len=512", "--max-model-len has no effect on the system rock."),
        ("--system round-robin --stats-age 1", "--stats-age has no effect on the system round-robin."),
        ("--router ray --stats-age 1", "--stats-age has no effect on the system vllm with router ray."),
    ],
)
def test_what_a_system_does_not_read_is_refused(
    words: str, message: str, fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that an engine has not, and the age of counts that a router does not read, are refused by name."""
    assert run(["simulate", fleet, "--cluster", cluster, "--duration", "5", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_what_some_systems_do_not_read_is_said(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Where an option has an effect on one of the compared systems, the others are named in a note."""
    words = ["compare", fleet, "--cluster", cluster, "--duration", "5", "--seeds", "1"]
    assert run([*words, "--systems", "vllm,round-robin", "--stats-age", "1"]) == 0
    assert "--stats-age has no effect on the system round-robin" in capsys.readouterr().err


def test_a_plan_behind_a_router(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`packer evaluate PLAN --router` simulates the plan's servers; a plan is also a cluster with a goal, whatever its
    name ends in."""
    plan = str(tmp_path / "a.plan")
    assert run(["solve", fleet, "--slo", "p95_ttft_ms=999", "--no-verify", "-o", plan, "-q"]) == 0
    routed = _json(["evaluate", plan, "--router", "plan", "--duration", "60", "--seed", "0"], capsys)
    given = _json(["simulate", fleet, "--cluster", plan, "--system", "packer", "--duration", "60"], capsys)
    assert "keeps p95 TTFT 999 ms" in str(given["verdict"])
    for name in ("completed", "mean_ttft_ms", "servers", "router"):
        assert routed[name] == given[name]
    assert run(["evaluate", plan, "--router", "affinity", "--duration", "60"]) == 0
    assert "router affinity" in capsys.readouterr().out
    assert run(["evaluate", plan, "--router", "fastest"]) == 2


def test_whom_the_placement_of_a_plan_binds_is_said(
    fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated system is bound to the plan's placement; of compared ones those that serve plans, or all with the
    router plan; a system with a placement of its own is refused one."""
    plan = str(tmp_path / "plan.json")
    assert run(["solve", fleet, "--no-verify", "-o", plan, "-q"]) == 0
    capsys.readouterr()
    served = [fleet, "--cluster", plan, "--duration", "30"]
    assert run(["simulate", *served, "--system", "vllm"]) == 0
    assert f"system vllm is bound to the placement in {plan}" in capsys.readouterr().err
    assert run(["simulate", *served, "--system", "dlora"]) == 2
    assert "places the adapters itself" in capsys.readouterr().err
    both = ["compare", *served, "--systems", "packer,vllm", "--seeds", "1"]
    for router, bound in (
        ([], "packer"),
        (["--router", "plan"], "packer, vllm"),
        (["--router", "hrw"], "packer"),
    ):
        assert run([*both, *router]) == 0
        assert f"{plan} binds {bound};" in capsys.readouterr().err


def test_a_plan_that_breaks_its_limits_behind_a_router_is_reported(
    fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 3, and a sentence, for limits of the adapters and for those of servers; one that keeps them: 0."""
    plan = str(tmp_path / "plan.json")
    assert run(["solve", fleet, "--no-verify", "-o", plan, "-q"]) == 0
    behind = ["evaluate", plan, "--router", "affinity", "--duration", "60"]
    assert _json(behind, capsys)["holds"] is True
    made = load_plan(plan)
    replace(made, workload=replace(made.workload, slo=Slo.of(0.1))).save(plan)
    assert run(behind) == 3
    assert "breaks its latency limits behind this router: p95 TTFT <= 0.1 ms" in capsys.readouterr().out
    limited = str(tmp_path / "limited.json")
    assert run(["solve", fleet, "--no-verify", "-o", limited, "-q", "--objective", "slo:mean_itl_ms=100"]) == 0
    behind[1] = limited
    assert run(behind) == 0
    made = load_plan(limited)
    replace(made, limits={"mean_itl_ms": 0.1}).save(limited)
    assert run(behind) == 3
    assert "mean_itl_ms <= 0.1" in capsys.readouterr().out


def test_pictures_and_ceiling(fleet: str, cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster's picture has panels of all servers and of each; the ceiling of the client refuses requests."""
    picture = tmp_path / "cluster.svg"
    arguments = ["simulate", fleet, "--cluster", cluster, "--duration", "60", "--system", "s-lora"]
    assert run([*arguments, "--plot", str(picture)]) == 0
    text = picture.read_text("utf-8")
    for words in ("Requests of all servers", "Busy time of a server", "Memory of a server in use"):
        assert words in text
    capsys.readouterr()
    found = _json([*arguments, "--max-outstanding", "2"], capsys)
    assert found["refused"] > 0  # type: ignore[operator]
    assert found["aborted"] == 0


def test_servers_that_vllm_may_end_are_named(fleet: str, cluster: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Servers behind a router, of which any may get every adapter, are named as a single one is."""
    drafts = "--set=speculation=eagle:num_speculative_tokens=1,acceptance=0.5"
    given = ["simulate", fleet, "--cluster", cluster, "--duration", "60", drafts]
    for version, said in (("0.32.0", 1), ("0.33.0", 0)):
        assert run([*given, f"--set=vllm-version={version}"]) == 0
        assert capsys.readouterr().out.count("Outage: vLLM 0.32.0 ends in an assertion") == said
