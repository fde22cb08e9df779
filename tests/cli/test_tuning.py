"""Training beside inference from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from packer.cli import run

FLEET = """\
name: chat
fine_tuning: {sample_tokens: 256, policy: "chunked:chunk_tokens=64"}
adapters:
- {name: a, rank: 8, rate: 2.0}
- {name: b, rank: 8, rate: 1.0}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """A fleet of two adapters with a job."""
    path = tmp_path / "fleet.yaml"
    path.write_text(FLEET)
    return str(path)


def _json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_simulate_trains_the_job_of_the_file(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The job's own policy, that of --tuning in its place, and none."""
    server = ["simulate", fleet, "--max-loras", "2", "--duration", "120"]
    own = _json(server, capsys)
    other = _json([*server, "--tuning", "llmstation:slo_decode_ms=30"], capsys)
    none = _json([*server, "--tuning", "none"], capsys)
    assert own["tuning"]["policy"] == "chunked:chunk_tokens=64"
    assert other["tuning"]["policy"] == "llmstation:slo_decode_ms=30"
    assert other["tuning"]["samples_s"] > own["tuning"]["samples_s"] > 0.0
    assert "tuning" not in none
    assert run([*server, "--tuning", "temporal"]) == 0
    assert "Training (temporal)" in capsys.readouterr().out


CLUSTER = """
schema = 1
fine_tuning = {sample_tokens = 128, policy = "chunked"}
kinds = [{name = "h100", profile = "h100-64gb/llama-3.1-8b-instruct", max_loras = 2}]
nodes = [{servers = ["h100"]}]
"""


def test_the_policy_of_the_option_is_that_of_a_cluster(tmp_path: Path, capsys) -> None:
    """--tuning replaces the policy of the system, not the cluster's job; "none" trains nothing."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    (tmp_path / "fleet.csv").write_text("adapter,rank,rate\na,8,1.0\n")
    server = ["simulate", str(tmp_path / "fleet.csv"), "--cluster", str(tmp_path / "cluster.toml")]
    server += ["--system", "fineinfer", "--duration", "20"]
    own = _json([*server, "--tuning", "llmstation"], capsys)["tuning"]
    assert own["policy"] == "llmstation"
    assert own["tok_s"] == pytest.approx(128 * own["samples_s"])
    assert "tuning" not in _json([*server, "--tuning", "none"], capsys)


def test_seeds_average_the_training(fleet: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With several seeds the figures are means."""
    server = ["simulate", fleet, "--max-loras", "2", "--duration", "60"]
    alone = [_json([*server, "--seed", str(seed)], capsys)["tuning"]["tok_s"] for seed in (0, 1)]
    both = _json([*server, "--seeds", "2"], capsys)
    assert both["tuning"]["tok_s"] == pytest.approx(sum(alone) / 2)


def test_sweep_sets_policies_side_by_side(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One row for each policy and rate, with the parameter that trains most within the limits."""
    rows = tmp_path / "rows.csv"
    arguments = ["sweep", fleet, "--max-loras", "2", "--duration", "60", "--rate-factors", "1,2"]
    arguments += ["--tuning", "llmstation", "--tuning", "temporal", "--slo", "p99_tpot_ms=40", "-o", str(rows)]
    found = _json(arguments, capsys)
    assert found["slo"] == {"p95_ttft_ms": 2000.0, "p99_tpot_ms": 40.0}
    assert [row["policy"] for row in found["rows"]] == ["llmstation", "temporal"] * 2
    assert all(row["p99_tpot_ms"] <= 40.0 for row in found["rows"])
    assert pl.read_csv(rows)["samples_s"].to_list() == [row["samples_s"] for row in found["rows"]]
    assert run([*arguments, "--force"]) == 0
    assert "slo_decode_ms=" in capsys.readouterr().out


def test_solve_for_training(fleet: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan says what its GPUs train, and its file keeps the job."""
    plan = tmp_path / "plan.json"
    arguments = ["solve", fleet, "--objective", "tuning:p99_ttft_ms=1000", "--gpus", "2", "-o", str(plan)]
    assert run(arguments) == 0
    assert "Training" in capsys.readouterr().out
    written = json.loads(plan.read_text())
    assert written["workload"]["fine_tuning"]["policy"] == "chunked:chunk_tokens=64"
    assert sum(gpu["evaluation"]["tuning_tok_s"] for gpu in written["gpus"]) > 0.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "--max-loras", "2", "--tuning", "mystery"], "Known: chunked, llmstation"),
        (["simulate", "--max-loras", "2", "--tuning", "chunked:chunk_tokens=0"], "chunk_tokens"),
        (["sweep", "--tuning", "chunked", "--slo", "speed=3"], "speed"),
        (["sweep", "--tuning", "chunked", "--plot", "x.svg"], "--plot"),
    ],
)
def test_wrong_options_are_named(
    fleet: str, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and what was wrong, not a traceback."""
    command, *rest = arguments
    assert run([command, fleet, *rest]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_only_training_stops_names_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its settings would start without the job: there are no others to name."""
    (tmp_path / "f.csv").write_text("adapter,rank,rate\na,256,0.1\n")
    how = ["--max-loras", "4", "--vllm-version", "0.30", "--tuning", "spatial", "--duration", "9"]
    assert run(["simulate", str(tmp_path / "f.csv"), *how]) == 0
    said = capsys.readouterr().out
    assert "and training leave" in said
    assert "What would start" not in said
