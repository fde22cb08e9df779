"""`packer profiles fit` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.cli import run
from packer.io.profiles import load_profile
from packer.terms import LINEAR

BACKBONE = "model,phase,set_batch_size,actual_prompt_len,set_output_length,itl_mean_ms,status\n" + "".join(
    f"llama-3.1-8b-instruct,decode,{b},5,100,{9 + 0.05 * b},ok\n" for b in (1, 10, 50, 100, 200)
)


@pytest.fixture
def profiling(tmp_path: Path) -> str:
    """A folder with one micro-benchmark."""
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "latency_backbone.csv").write_text(BACKBONE)
    return str(folder)


def test_micro_benchmarks_make_a_profile(profiling: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The profile holds the fitted law, the base's memory, and who measured."""
    path = tmp_path / "mine.toml"
    arguments = ["profiles", "fit", "--profiling", profiling, "--name", "mine", "--note", "us", "-o", str(path)]
    assert run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    profile = load_profile(str(path))
    assert told["fingerprint"] == profile.fingerprint
    assert profile.name == "mine"
    assert profile.latency.coefficients["base_ms"] == pytest.approx(9.0, rel=0.01)
    assert profile.memory == load_profile("h100-64gb/llama-3.1-8b-instruct").memory
    assert profile.provenance["measured_by"] == "us"
    assert run(arguments) == 2
    assert "--force" in capsys.readouterr().err


@pytest.mark.parametrize("found", [-0.5, None])
def test_a_profile_says_which_correlation_its_runs_had(
    found: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The correlation of lengths that the runs show is written down; that of the base profile's runs is not."""
    monkeypatch.setattr("packer.fit.pipeline.fit_correlation", lambda *_: found)
    monkeypatch.setattr("packer.fit.pipeline.fit_runs", lambda start, *_, **__: start)
    runs, path = tmp_path / "runs.csv", str(tmp_path / "mine.toml")
    columns = "model,max_loras,n_adapters,max_lora_rank,rate_counts,size_counts,total_tok_s,"
    columns += "tpot_mean_ms,request_throughput\n"
    runs.write_text(columns + 8 * "llama-3.1-8b-instruct,8,8,8,0.1:8,8:8,400,20,0.8\n")
    assert run(["profiles", "fit", "--runs", str(runs), "-o", path]) == 0
    said = load_profile(path).provenance.get("length_correlation", "")
    assert said == ("" if found is None else "-0.5, from running requests and KV usage of the runs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--bench FILE"),
        (["--runs", "absent.csv"], "no such file"),
        (["--profiling", "."], "kv_capacity.csv"),
        (["--profiling", ".", "--base", "h100"], "Unknown profile"),
    ],
)
def test_bad_input_is_one_message(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Nothing to fit, or a missing table, is exit code 2 and leaves no file."""
    monkeypatch.chdir(tmp_path)
    assert run(["profiles", "fit", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_results_of_a_load_generator_improve_an_estimate(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server whose steps take half as long again gives a profile that is as much slower, and still an estimate."""
    config = root / "tests" / "data" / "models" / "llama-3.1-8b.json"
    base, better, result = (str(tmp_path / name) for name in ("base.toml", "better.toml", "result.json"))
    assert run(["profiles", "estimate", "--model", str(config), "--gpu", "l40s", "-o", base]) == 0
    law = load_profile(base).latency.coefficients
    step_ms = law["base_ms"] + law["per_decode_ms"] + 5.0 / 400 * law["per_prefill_token_ms"]
    step_ms += (5.0 + 200.0) * law["per_kv_token_ms"]
    step_ms += (law["prefill_step_ms"] + 5.0**2 / 2 * law["per_attended_token_ms"]) / 400
    alone = {
        "request_throughput": 1e3 / (399 * 1.5 * step_ms),
        "completed": 10,
        "max_concurrency": 1,
        "mean_tpot_ms": 1.5 * step_ms,
    }
    Path(result).write_text(json.dumps(alone | {"total_input_tokens": 50, "total_output_tokens": 4000}))
    capsys.readouterr()
    assert run(["profiles", "fit", "--base", base, "--bench", result, "-o", better, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    found = load_profile(better)
    assert told["fingerprint"] == found.fingerprint
    assert not found.calibrated
    adapters = {term.name for term in LINEAR if term.part == "lora"}
    for term, value in law.items():
        factor = 1.0 if term in adapters else 1.5
        assert found.latency.coefficients[term] == pytest.approx(factor * value, rel=1e-4)
    assert run(["profiles", "fit", "--base", base, "--bench", result, "--runs", "r.csv", "-o", better]) == 2
    for more in (["--cold-start"], ["--no-cross-validation"], ["--model", "m"], ["--generated-share", "0.5"]):
        assert run(["profiles", "fit", "--base", base, "--bench", result, *more, "-o", better, "--force"]) == 2
        assert f"{more[0]} has no effect with --bench" in capsys.readouterr().err
