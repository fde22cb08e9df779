"""`packer workload` and `packer profiles`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packer.cli import run
from packer.io.profiles import load_profile, write_profile
from packer.io.workloads import read_workload
from packer.profile import Profile
from packer.sessions import Sessions

Capture = pytest.CaptureFixture[str]


def test_generate_and_describe(tmp_path: Path, capsys: Capture) -> None:
    """A generated fleet is as its options say, and its description counts it right."""
    path = str(tmp_path / "f.csv")
    assert run(["workload", "generate", "--adapters", "12", "--rates", "0.1,0.2", "--ranks", "8,16", "-o", path]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "12 adapters, 1.8 req/s" in err
    assert run(["workload", "generate", "--adapters", "3", "--json", "-o", f"{path}.gz"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["adapters"], facts["output"]) == (3, f"{path}.gz")
    assert run(["workload", "describe", path, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["adapters"] == 12
    assert facts["rate"] == pytest.approx(1.8)
    assert facts["offered_tok_s"] == pytest.approx(1.8 * (223 + 195))
    assert [row["adapters"] for row in facts["ranks"]] == [6, 6]
    assert facts["input_tokens"] == pytest.approx({"mean": 223.0, "cv": 1.1})
    assert run(["workload", "describe", path]) == 0
    assert "12 adapters" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    """A generated file depends on its options alone."""
    paths = [tmp_path / f"{k}.csv" for k in range(3)]
    for path, seed in zip(paths, ("7", "7", "8"), strict=True):
        assert run(["workload", "generate", "--adapters", "30", "--seed", seed, "-q", "-o", str(path)]) == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes() != paths[2].read_bytes()


def test_power_law_and_lengths(tmp_path: Path) -> None:
    """A total rate is shared by a power law, and mean lengths are those given."""
    path = tmp_path / "f.yaml"
    words = "workload generate --adapters 5 --total-rate 10 --exponent 2 --input-tokens 50 --output-tokens 60 -qo"
    assert run([*words.split(), str(path)]) == 0
    fleet = read_workload(path)
    assert fleet.rate == pytest.approx(10.0)
    assert fleet.rates[0] / fleet.rates[1] == pytest.approx(4.0)
    assert (fleet.mean_input_tokens[0], fleet.mean_output_tokens[0]) == (50.0, 60.0)


def test_generated_sessions(tmp_path: Path, capsys: Capture) -> None:
    """Sessions are written as columns, and described; what is about them needs a number of turns."""
    path = tmp_path / "f.csv"
    words = f"workload generate --adapters 3 --turns 4 --think-s 10 --turn-tokens 60 --shared-prefix 100 -qo {path}"
    assert run(words.split()) == 0
    assert read_workload(path).sessions_by_adapter == (Sessions(4.0, 10.0, 60.0),) * 3
    assert run(["workload", "describe", str(path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Sessions: a request is in one of 4 turns on average" in said
    assert "Shared prefixes: 100 tokens" in said
    assert run(["workload", "generate", "--adapters", "3", "--think-s", "9", "-o", str(tmp_path / "g.csv")]) == 2
    assert "--turns" in capsys.readouterr().err


def test_from_trace(tmp_path: Path, capsys: Capture) -> None:
    """A trace becomes a fleet whose load is the trace's times the factor, with its command in the header."""
    trace = tmp_path / "trace.csv"
    lines = [f"{k},{10 + k % 3},{5 + k % 2}" for k in range(101)]
    trace.write_text("\n".join(["timestamp,input_tokens,output_tokens", *lines, "101,5,0"]))
    path = tmp_path / "f.csv"
    words = f"workload from-trace {trace} --adapters 4 --ranks 8 --seed 3 --rate-factor 2 -o {path}"
    assert run(words.split()) == 0
    assert "left out 1 of 102 requests, which have no tokens" in capsys.readouterr().err
    fleet = read_workload(path)
    tokens = sum(10 + k % 3 + 5 + k % 2 for k in range(101))
    assert fleet.offered_tok_s == pytest.approx(2 * tokens / 100, rel=1e-4)
    header = path.read_text().splitlines()[0]
    assert header.startswith("# packer workload from-log trace.csv --adapters 4 --ranks 8 ")
    assert header.endswith("--rate-factor 2.0 --seed 3 -o f.csv")
    assert run([*words.split(), "--force", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["adapters"], facts["requests"], facts["dropped"]) == (4, 101, 1)
    assert path.read_text().splitlines()[0] == header


def test_a_name_that_was_promised_still_works(tmp_path: Path, capsys: Capture) -> None:
    """`from-trace` is `from-log`, and is not listed."""
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,adapter,rank,input_tokens,output_tokens\n0,a,8,5,6\n4,b,16,7,8\n")
    assert run(["workload", "from-trace", str(trace), "-o", str(tmp_path / "f.csv")]) == 0
    assert read_workload(tmp_path / "f.csv").names == ("a", "b")
    assert run(["workload", "--help"]) == 0
    assert "from-trace" not in capsys.readouterr().out


def test_adapters_that_are_made_up_get_ranks(tmp_path: Path, capsys: Capture) -> None:
    """A trace that names no adapters needs no ranks, and what is assumed is said."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{k},100,20\n" for k in range(300))
    trace.write_text(f"timestamp,input_tokens,output_tokens\n{rows}")
    assert run(["workload", "from-trace", str(trace), "-o", str(tmp_path / "f.csv")]) == 0
    assert set(read_workload(tmp_path / "f.csv").ranks) == {8, 16, 32}
    assert "a rank of 8, 16 or 32 at random (--ranks)" in capsys.readouterr().err
    assert run(["workload", "from-trace", str(trace), "--rank", "64", "-o", str(tmp_path / "g.csv")]) == 0
    assert set(read_workload(tmp_path / "g.csv").ranks) == {64}


def test_from_trace_replay(tmp_path: Path, capsys: Capture) -> None:
    """With --replay every request is kept as it was, which no hour's rates stand for; adapters and ranks are the
    trace's."""
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,adapter,rank,input_tokens,output_tokens\n0,a,8,5,6\n4,b,16,7,8\n8000,b,16,1,1\n")
    path = tmp_path / "f.json"
    assert run(["workload", "from-log", str(trace), "--replay", "-o", str(path)]) == 0
    assert "rates: the mean" in capsys.readouterr().err
    fleet = read_workload(path)
    assert (fleet.names, fleet.ranks.tolist()) == (("a", "b"), [8, 16])
    assert fleet.arrivals.trace is not None
    assert fleet.arrivals.trace.time_s.tolist() == [0.0, 4.0, 8000.0]


def test_profiles_list_and_show(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shipped profiles are listed and shown, as a table and as JSON."""
    monkeypatch.setenv("COLUMNS", "140")
    name = "h100-64gb/llama-3.1-8b-instruct"
    assert run(["profiles", "list"]) == 0
    assert name in capsys.readouterr().out
    assert run(["profiles", "list", "--json"]) == 0
    assert name in [row["name"] for row in json.loads(capsys.readouterr().out)]
    assert run(["profiles", "show", name]) == 0
    assert "305,104" in capsys.readouterr().out
    assert run(["profiles", "show", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == load_profile(name).fingerprint


def test_an_estimate_is_marked_everywhere(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """The estimate's file, its own output and every later one say that it is not calibrated."""
    config = root / "tests" / "data" / "models" / "llama-3.1-8b.json"
    path = tmp_path / "l40s.toml"
    words = ["profiles", "estimate", "--model", str(config), "--gpu", "l40s", "-o", str(path)]
    assert run(words) == 0
    err = capsys.readouterr().err
    assert "(estimated, not calibrated)" in err
    assert path.read_text().startswith("# Estimated from datasheets, not calibrated")
    assert run(["profiles", "show", str(path)]) == 0
    assert "(estimated, not calibrated)" in capsys.readouterr().out
    assert run([*words, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["calibrated"] is False


def test_an_estimate_is_of_one_gpu(tmp_path: Path, capsys: Capture) -> None:
    """Of several GPUs none is taken in silence where one profile is made."""
    two = ["--model", "Qwen/Qwen3-8B", "--gpu", "h200", "--gpu", "l40s", "-o", str(tmp_path / "e.toml")]
    assert run(["profiles", "estimate", *two]) == 2
    assert "--gpu takes one value and is given 2 times" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_estimate_that_would_not_start_says_so(root: Path, tmp_path: Path, capsys: Capture) -> None:
    """A GPU too small for the model's context is named at once, with the way out."""
    config = root / "tests" / "data" / "models" / "llama-3.1-8b.json"
    words = ["profiles", "estimate", "--model", str(config), "--gpu", "l4", "-o", str(tmp_path / "l4.toml")]
    assert run(words) == 0
    assert "would not start with max_model_len 131072: set --max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["solve --no-verify", "memory --max-loras 8 --max-lora-rank 8", "simulate --max-loras 8"]
)
def test_whoever_uses_an_estimate_says_so(command: str, toy_profile: Profile, tmp_path: Path, capsys: Capture) -> None:
    """A result that rests on an estimated profile says so, also where tables are not printed."""
    write_profile(toy_profile, tmp_path / "toy.toml")
    (tmp_path / "f.csv").write_text("adapter,rank,rate\na,8,0.1\n")
    name, *options = command.split()
    files = [] if name == "memory" else [str(tmp_path / "f.csv")]
    assert run([name, *files, *options, "--profile", str(tmp_path / "toy.toml"), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "toy (estimated, not calibrated)" in err
    json.loads(out)


@pytest.mark.parametrize(
    ("words", "ranks"), [("--rank 16", [16, 16]), ("--ranks ranks.csv --rank 64", [8, 64]), ("--ranks 32", [32, 32])]
)
def test_ranks_are_given_and_never_assumed(
    words: str, ranks: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """A trace, a log without ranks: an error that says how to give them, with one meaning in all commands."""
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text("timestamp,adapter,input_tokens,output_tokens\n0,a,5,6\n4,b,7,8\n")
    rows = [{"time": 4 * k, "model": name, "prompt_tokens": 5, "completion_tokens": 6} for k, name in enumerate("ab")]
    Path("log.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    Path("ranks.csv").write_text("adapter,rank,rate\na,8,0.3\n")  # of a workload, only the ranks count
    for source in ("from-log t.csv", "from-log log.jsonl"):
        command = f"workload {source} -o f.csv --force"
        assert run(command.split()) == 2
        assert "2 of 2 have none, the first is 'a'. --ranks FILE.csv" in capsys.readouterr().err
        assert run([*command.split(), *words.split()]) == 0
        assert read_workload("f.csv").ranks.tolist() == ranks
