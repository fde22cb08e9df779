"""Engine settings of servers on the command line."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from packer.cli import run
from packer.export.formats import export_plan
from packer.io.plans import load_plan

Capture = pytest.CaptureFixture[str]


def test_engine_settings_replace_those_of_the_profile(tmp_path: Path, capsys: Capture) -> None:
    """A plan starts its servers with the settings given, the best of several, and a running plan keeps its own."""
    fleet, path = tmp_path / "fleet.csv", tmp_path / "plan.json"
    fleet.write_text("adapter,rank,rate\na,8,1.5\nb,8,1.5\n")
    words = ["solve", str(fleet), "--objective", "gpus", "-o", str(path), "--force", "--max-model-len", "8192"]
    assert run([*words, "--max-num-seqs", "64", "--warm-start", "true"]) == 0
    plan = load_plan(path)
    engine = plan.bins[0].profile.engine
    assert (engine.max_num_seqs, engine.max_model_len, engine.warm_start) == (64, 8192, True)
    assert "; started warm)" in plan.hardware
    started = export_plan(load_plan(path), "vllm")["start.sh"]
    assert "--max-model-len 8192" in started
    assert "--max-num-seqs 64" in started
    fleet.write_text("adapter,rank,rate\na,8,6\n")
    assert run([*words, "--max-num-seqs", "4,512"]) == 0
    assert {item.profile.engine.max_num_seqs for item in load_plan(path).bins} == {512}
    capsys.readouterr()
    assert run(["solve", str(fleet), "--from", str(path), "--max-num-seqs", "64", "-o", str(tmp_path / "x")]) == 2
    assert "--max-num-seqs has no effect with --from" in capsys.readouterr().err
    for words_ in (["--gpu", "l40s"], ["--price", "3"], ["--available", "2"]):
        assert run(["solve", str(fleet), "--from", str(path), *words_, "-o", str(tmp_path / "x")]) == 2
        assert f"{words_[0]} has no effect with --from" in capsys.readouterr().err
    assert run(["solve", str(fleet), "--max-num-seqs", "1000000"]) == 2
    assert run(["solve", str(fleet), "--available", "1", "--available", "2"]) == 2
    assert "expected each profile once" in capsys.readouterr().err


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    """Two adapters that need a batch of some requests."""
    path = tmp_path / "fleet.csv"
    path.write_text("adapter,rank,rate\na,8,2\nb,8,2\n")
    return str(path)


def test_one_server_is_simulated_with_the_settings_given(fleet: str, capsys: Capture) -> None:
    """A batch of one request serves less than the profile's, and a sweep says so of each point."""
    words = ["simulate", fleet, "--max-loras", "2", "--duration", "120", "--json"]
    served = []
    for more in ([], ["--max-num-seqs", "1"]):
        assert run([*words, *more]) == 0
        served.append(json.loads(capsys.readouterr().out)["total_token_throughput"])
    assert served[1] < 0.8 * served[0]
    swept = ["sweep", fleet, "--adapters", "2", "--max-loras", "2", "--duration", "120", "--json"]
    assert run([*swept, "--max-num-seqs", "1"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["total_token_throughput"] < 0.8 * served[0]


def test_memory_follows_the_settings(capsys: Capture) -> None:
    """More of the GPU's memory leaves a larger KV cache; a share that is none is refused."""
    tokens = []
    for share in ("0.8", "0.9", "0.95"):
        words = ["memory", "--max-loras", "8", "--max-lora-rank", "8", "--json"]
        assert run([*words, "--gpu-memory-utilization", share]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["rows"][0]["kv_cache_tokens"])
    assert tokens[0] < tokens[1] < tokens[2]
    assert run(["memory", "--gpu-memory-utilization", "1.5"]) == 2
    assert "--gpu-memory-utilization" in capsys.readouterr().err


def test_a_price_alone_is_that_of_each_gpu_of_the_only_kind(tmp_path: Path, capsys: Capture) -> None:
    """With --gpu and --model a price is one GPU's: a server on two GPUs costs twice as much. Only the data sheet's
    price has a source."""
    table, path = tmp_path / "fleet.csv", tmp_path / "plan.json"
    table.write_text("adapter,rank,rate\na,8,0.2\nb,8,0.2\n")
    words = ["solve", str(table), "--gpu", "h200", "--model", "Qwen/Qwen3-8B", "--max-model-len", "8192"]
    words += ["--tensor-parallel-size", "2", "--objective", "gpus", "--no-verify", "--force", "-o", str(path)]
    assert run(words) == 0
    assert re.search(r"^Price .* 20\d\d-\d\d$", capsys.readouterr().out, re.MULTILINE)
    for said in ("3", "h200=3"):
        assert run([*words, "--price", said]) == 0
        assert "\nPrice" not in capsys.readouterr().out
        assert {item.profile.gpu.price_per_hour for item in load_plan(path).bins} == {6.0}
    assert run([*words, "--price", "h100=3"]) == 2
    assert "one of h200" in capsys.readouterr().err
    both = [*words, "--gpu", "l40s"]
    assert run([*both, "--price", "l40s=9"]) == 0
    assert {item.profile.gpu.name for item in load_plan(path).bins} == {"NVIDIA H200 141GB"}
    assert run([*(each.replace("gpus", "cost") for each in both), "--price", "l40s=1"]) == 0
    assert {item.profile.gpu.price_per_hour for item in load_plan(path).bins} == {2.0}


@pytest.mark.parametrize("words", [["--pipeline-parallel-size", "2"], ["--set", "pipeline-parallel-size=2"]])
@pytest.mark.parametrize("command", [["solve", "fleet.csv"], ["profiles", "estimate", "-o", "x.toml"]])
def test_parallelism_without_a_law_is_refused_by_name(command: list[str], words: list[str], capsys: Capture) -> None:
    """An option of vLLM that no estimate has is refused with the reason, not as an unknown word."""
    assert run([*command, "--gpu", "h200", "--model", "Qwen/Qwen3-8B", *words]) == 2
    assert "stages of a pipeline are not estimated" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--gpu", "--model"])
def test_commands_of_one_profile_say_how_to_name_another(fleet: str, capsys: Capture, option: str) -> None:
    """They take a profile: of a GPU and a model one is estimated."""
    assert run(["simulate", fleet, option, "l4", "--max-loras", "4"]) == 2
    assert "packer profiles estimate --gpu GPU --model MODEL -o FILE.toml" in capsys.readouterr().err


def test_data_parallel_servers_are_planned(tmp_path: Path, capsys: Capture) -> None:
    """The best number of data-parallel ranks is planned, with all of a server's GPUs; a profile's is its own."""
    table, path = tmp_path / "fleet.csv", tmp_path / "plan.json"
    table.write_text("adapter,rank,rate\na,8,0.2\nb,8,0.2\n")
    words = ["solve", str(table), "--data-parallel-size", "1,2", "--no-verify", "--force", "-o", str(path)]
    words += ["--objective", "gpus"]
    server = ["--gpu", "l40s", "--model", "Qwen/Qwen3-30B-A3B", "--max-model-len", "4096"]
    assert run([*words, *server, "--tensor-parallel-size", "1"]) == 0
    assert "2 adapters, 2 GPUs" in capsys.readouterr().out
    assert [(item.gpus, item.profile.engine.data_parallel_size) for item in load_plan(path).bins] == [(2, 2)]
    assert run(words) == 2
    assert "--data-parallel-size goes with --gpu and --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("block-size=7", "one of 1, 8, 16, 32, 64, 128, 256, got 7"),
        ("speculation=ngram:num_speculative_tokens=3,acceptance=0.5", "one of draft_model, eagle, eagle3, mtp"),
        ("speculation=mtp:num_speculative_tokens=3,acceptance=1.5", "acceptance .* <= 1, got 1.5"),
        ("prefix-caching=yes", "prefix-caching: Expected on or off, got 'yes'"),
        ("speculation=mtp", "METHOD:num_speculative_tokens=N,acceptance=SHARE"),
    ],
)
def test_refused_settings_say_what_is_allowed(fleet: str, capsys: Capture, setting: str, said: str) -> None:
    """A value that vLLM does not take, or that breaks a rule, is refused with the rule."""
    assert run(["simulate", fleet, "--max-loras", "2", "--set", setting]) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split()))


def test_a_version_is_read_as_its_tag_is_written(fleet: str, tmp_path: Path) -> None:
    """v0.11.0 is 0.11.0: names of plans and of profiles hold no letter that other versions do not have."""
    path = tmp_path / "p.json"
    assert run(["solve", fleet, "--vllm-version", "v0.11.0", "-o", str(path), "-q"]) == 0
    assert load_plan(str(path)).bins[0].profile.engine.version == "0.11.0"


@pytest.mark.parametrize(("given", "said"), [("", True), (",draft_pass_ms=0.8", False)])
def test_drafters_without_a_time_are_noted(fleet: str, capsys: Capture, given: str, said: bool) -> None:
    """Speculative decoding looks better than it is if its passes take no time."""
    drafts = f"speculation=mtp:num_speculative_tokens=1,acceptance=0.6{given}"
    words = ["simulate", fleet, "--max-loras", "2", "--vllm-version", "0.32.0", "--duration", "5", "--set", drafts]
    assert run(words) == 0
    assert ("draft_pass_ms of speculation gives it" in capsys.readouterr().err) == said
