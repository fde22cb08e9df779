"""`packer init` from the command line."""

from __future__ import annotations

import json
import random
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from packer.cli import run
from packer.io.plans import load_plan
from packer.io.profiles import load_profile
from packer.io.workloads import read_workload
from packer.plan import Plan, Status
from packer.planning.recommend import recommend

Capture = pytest.CaptureFixture[str]
SERVER = ("--model", "meta-llama/Llama-3.1-8B-Instruct", "--gpu", "h100-64gb")
NAMES = ("support", "sql", "tone")


@pytest.fixture
def log(tmp_path: Path) -> str:
    """An hour of requests to three adapters."""
    draw = random.Random(1)
    path = tmp_path / "access.jsonl"
    lines = [
        {
            "timestamp": 1767225600 + k * 1.5,
            "model": draw.choices(NAMES, [4, 2, 1])[0],
            "usage": {"prompt_tokens": draw.randint(20, 600), "completion_tokens": draw.randint(10, 300)},
        }
        for k in range(2400)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_log_becomes_a_project(log: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder holds profile, fleet, defaults, plan and report, and later commands need no more than that."""
    folder = tmp_path / "project"
    words = ["init", log, "--rank", "16", *SERVER, "--slo", "p95_ttft_ms=1500", "-o", str(folder)]
    assert run(words) == 0
    assert "wrote" in capsys.readouterr().err
    names = {"profile.toml", "fleet.csv", "packer.toml", "plan.json", "report.html"}
    assert {path.name for path in folder.iterdir()} == names
    assert load_profile(str(folder / "profile.toml")) == load_profile("h100-64gb/llama-3.1-8b-instruct")
    assert set(read_workload(str(folder / "fleet.csv")).names) == set(NAMES)
    assert load_plan(str(folder / "plan.json")).n_gpus == 1
    assert tomllib.loads((folder / "packer.toml").read_text())["slo"] == ["p95_ttft_ms=1500"]
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PACKER_CONFIG", raising=False)
    assert run(["solve", "fleet.csv", "-o", "again.json"]) == 0
    assert load_plan("again.json").bins[0].profile == load_plan("plan.json").bins[0].profile
    assert run(["solve", "fleet.csv", "--from", "plan.json", "-o", "next.json"]) == 0
    capsys.readouterr()
    assert run(["export", "plan.json"]) == 0
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in capsys.readouterr().out
    assert run(["sweep", "fleet.csv", "--max-loras", "2"]) == 0  # judges by the project's goal, as solve does
    assert "p95 TTFT <= 1.5 s" in capsys.readouterr().out
    assert run(["init", log, "--rank", "16", *SERVER]) == 2
    assert "--force" in capsys.readouterr().err


def test_a_prefix_of_the_gateway_is_named_and_kept(
    log: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where names are known but for what a gateway puts before them, the option that removes it is named; later
    commands in the project read the log as `init` did."""
    text, folder = Path(log).read_text(), tmp_path / "project"
    Path(log).write_text(text.replace('"model": "', '"model": "gw/'))
    ranks = tmp_path / "ranks.csv"
    ranks.write_text("adapter,rank\n" + "".join(f"{name},16\n" for name in NAMES))
    words = ["init", log, "--ranks", str(ranks), *SERVER, "-o", str(folder)]
    told = "Without 'gw/' before it, 3 names would be known: --strip-prefix gw/"
    assert run(words) == 2
    assert told in capsys.readouterr().err
    assert run([*words, "--strip-prefix", "gw/"]) == 0
    assert run(["evaluate", str(folder / "plan.json"), "--log", log]) == 3
    assert told in capsys.readouterr().err
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PACKER_CONFIG", raising=False)
    assert run(["evaluate", "plan.json", "--log", log]) == 0


def test_a_log_is_planned_for_its_busiest_hour(tmp_path: Path, capsys: Capture) -> None:
    """The first line names the hour that was planned for; adapters that are silent then keep a place."""
    path = tmp_path / "access.jsonl"
    usage = {"prompt_tokens": 200, "completion_tokens": 100}
    rows = [(1767225600 + k * gap, name) for name, gap in (("day", 60), ("noon", 3)) for k in range(10800 // gap)]
    rows = [(t, name) for t, name in rows if name == "day" or 3600 <= t - 1767225600 < 7200]
    rows = [row for row in rows if row[1] == "noon" or not 3600 <= row[0] - 1767225600 < 7200]
    lines = [json.dumps({"timestamp": t, "model": name, "usage": usage}) for t, name in sorted(rows)]
    path.write_text("\n".join(lines))
    assert run(["init", str(path), "--rank", "16", *SERVER, "-o", str(tmp_path / "project")]) == 0
    first = capsys.readouterr().out.lstrip().splitlines()[0]
    assert first.startswith("Log of 2.98 h; planned for 01:00 (UTC), 2.7 × the mean; at steady mean rates: 1 GPU.")
    fleet = read_workload(str(tmp_path / "project" / "fleet.csv"))
    assert set(fleet.names) == {"day", "noon"}
    assert fleet.rates[fleet.names.index("noon")] == pytest.approx(1 / 3, rel=0.01)


def test_a_fleet_and_a_config_become_an_estimate(tmp_path: Path, root: Path) -> None:
    """A model that packer does not know comes with its config.json, and a workload file has its ranks."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\na,8,0.2\nb,16,0.1\n")
    model = str(root / "tests" / "data" / "models" / "qwen-2.5-7b.json")
    settings = ["--max-model-len", "8192", "--max-num-seqs", "128"]
    assert run(["init", str(fleet), "--model", model, "--gpu", "l40s", *settings, "-o", str(tmp_path / "p")]) == 0
    profile = load_profile(str(tmp_path / "p" / "profile.toml"))
    assert not profile.calibrated
    assert (profile.engine.max_model_len, profile.engine.max_num_seqs) == (8192, 128)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rank", "8", "--model", "acme/unknown", "--gpu", "l4"], "Unknown model 'acme/unknown'"),
        (["--rank", "8", "--model", "Qwen/Qwen3-8B", "--gpu", "h100"], "got 'h100', which may be any of .*h100-80gb"),
        (
            ["--rank", "8", "--model", "Qwen/Qwen3-8B", "--gpu", "l4", "--tensor-parallel-size", "1"],
            "would start: --max-model-len",
        ),
        (
            ["--rank", "8", "--model", "meta-llama/Llama-3.1-70B-Instruct", "--gpu", "l4"],
            "8 × NVIDIA L4 has room for .* would start: --max-model-len",
        ),
        ([*SERVER], "--ranks FILE.csv"),
        (["--rank", "8", *SERVER, "--slo", "speed=1"], "speed"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    log: str, tmp_path: Path, capsys: Capture, words: list[str], message: str
) -> None:
    """An unknown model or GPU, a model that does not fit and missing ranks are input errors, in one line."""
    import re

    assert run(["init", log, *words, "-o", str(tmp_path / "p")]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err)
    assert err.count("\n") == 1
    assert not (tmp_path / "p").exists()


def test_a_plan_in_place_of_a_log_is_named(log: str, tmp_path: Path, capsys: Capture) -> None:
    """A plan is called one, whatever options of a log stand beside it."""
    (tmp_path / "plan.json").write_text('{\n"n_gpus": 1,\n"solver": "greedy"\n}')
    words = ["--rank", "8", *SERVER, "-o", str(tmp_path / "p")]
    assert run(["init", str(tmp_path / "plan.json"), *words]) == 2
    assert "This is a plan" in capsys.readouterr().err


@pytest.mark.parametrize("line", ['{"status": 200, "path": "/health"}', "not JSON"])
def test_a_log_without_adapters_is_refused(tmp_path: Path, capsys: Capture, line: str) -> None:
    """A log of something else is an input error that names the file."""
    path = tmp_path / "other.log"
    path.write_text(f"{line}\n")
    assert run(["init", str(path), "--rank", "8", *SERVER, "-o", str(tmp_path / "p")]) == 2
    assert "other.log" in capsys.readouterr().err


def test_an_interrupted_search_without_a_plan_says_so(
    log: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before there is a plan is an interruption, not a fleet that no plan can serve."""

    def without_a_plan(*given: Any, **named: Any) -> Plan:
        return replace(recommend(*given, **named), status=Status.INFEASIBLE, interrupted=True)

    monkeypatch.setattr("packer.recommend", without_a_plan)
    assert run(["init", log, "--rank", "16", *SERVER, "-o", str(tmp_path / "project")]) == 130
    assert not (tmp_path / "project" / "plan.json").exists()


@pytest.mark.parametrize("base", ["meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B-Instruct"])
def test_requests_to_the_base_model_are_planned_for(tmp_path: Path, capsys: Capture, base: str) -> None:
    """The servers carry requests to the base model, too: they need no rank, get no slot, and are said to be there."""
    path = tmp_path / "log.jsonl"
    names = (base, "sql")
    line = {"prompt_tokens": 9, "completion_tokens": 3}
    rows = [line | {"time": 5 + 60 * k, "model": names[k % 2]} for k in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for skip, ranks in (((), {names[0]: 0, "sql": 8}), (("--skip", names[0]), {"sql": 8})):
        folder = tmp_path / f"project-{len(skip)}"
        assert run(["init", str(path), "--rank", "8", *skip, *SERVER, "-o", str(folder)]) == 0
        fleet = read_workload(folder / "fleet.csv")
        assert dict(zip(fleet.names, fleet.ranks.tolist(), strict=True)) == ranks
        assert ("have no adapter" in capsys.readouterr().err) is not bool(skip)


def test_a_table_in_other_words_is_a_log_where_the_options_say_so(tmp_path: Path, capsys: Capture) -> None:
    """A log whose columns nothing knows is read by --key, and without it said to lack what a log has."""
    path = tmp_path / "gateway.csv"
    rows = (f"{1767225600 + 30 * k},sql,{50 + k},20" for k in range(20))
    path.write_text("when,who,read,written\n" + "\n".join(rows))
    words = ["init", str(path), "--rank", "8", *SERVER, "-o", str(tmp_path / "project")]
    assert run(words) == 2
    assert "--key time=NAME" in capsys.readouterr().err
    keys = ("time=when", "model=who", "input=read", "output=written")
    assert run([*words, *(word for key in keys for word in ("--key", key))]) == 0
    assert read_workload(tmp_path / "project" / "fleet.csv").names == ("sql",)


def test_ranks_of_a_workload_file_are_its_own(tmp_path: Path, capsys: Capture) -> None:
    """--rank beside a file that has ranks would be ignored: it is refused."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\na,8,0.2\n")
    assert run(["init", str(fleet), "--rank", "8", *SERVER, "-o", str(tmp_path / "p")]) == 2
    assert "--rank" in capsys.readouterr().err


def test_a_server_starts_with_the_fleet_s_largest_rank(tmp_path: Path) -> None:
    """Without a number of GPUs the server has as few as it starts on with a slot of the fleet's own rank."""
    fleet = tmp_path / "fleet.csv"
    fleet.write_text("adapter,rank,rate\na,32,0.05\n")
    folder = tmp_path / "project"
    assert run(["init", str(fleet), "--model", "Qwen/Qwen3-32B", "--gpu", "l4", "-o", str(folder), "-q"]) == 0
    assert load_profile(str(folder / "profile.toml")).engine.tensor_parallel_size == 8
