"""Bad input: exit code 2, one clear message, no traceback, and nothing written."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from packer.cli import run

HEADER = b"adapter,rank,rate\n"
GOOD = HEADER + b"a,8,0.1\nb,16,0.2\n"


def csv(*rows: str) -> bytes:
    return HEADER + "".join(f"{row}\n" for row in rows).encode()


def parquet() -> bytes:
    data = io.BytesIO()
    pl.DataFrame({"adapter": ["a"], "rank": [8], "rate": [0.1]}).write_parquet(data)
    return data.getvalue()


DOCUMENT = json.dumps({"adapters": [{"name": "a", "rank": 8, "rate": 0.1}]}).encode()

FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("f.csv", b"", "f.csv: the file is empty"),
    "blank": ("f.csv", b"\n \n", "f.csv: the file is empty"),
    "only comments": ("f.csv", b"# nothing\n", "column 'adapter'.*found: none"),
    "no header": ("f.csv", b"a,8,0.1\nb,8,0.1\n", "is the header missing.*Expected the columns adapter, rank, rate"),
    "no rows": ("f.csv", HEADER, "at least one adapter, got 0"),
    "missing column": ("f.csv", b"adapter,rank\na,8\n", "column 'rate': this column is missing"),
    "unknown column": ("f.csv", b"adapter,rank,rate,colour\na,8,1,red\n", "column 'colour': unknown column"),
    "misspelt column": ("f.csv", b"adapter,rank,rte\na,8,1\n", "column 'rte'.*did you mean 'rate'"),
    "column twice": ("f.csv", b"adapter,rank,rate,rate\na,8,1,1\n", "row 1, column 'rate'.*twice"),
    "short row": ("f.csv", csv("a,8"), "row 2: expected 3 cells as in the header, got 2"),
    "rate text": ("f.csv", csv("a,8,0.1", "b,8,fast"), "row 3, column 'rate': expected a number, got 'fast'"),
    "rate negative": ("f.csv", csv("a,8,-1"), "row 2, column 'rate': .*>= 0 and .*got '-1'"),
    "rate nan": ("f.csv", csv("a,8,NaN"), "row 2, column 'rate': .*finite.*got 'NaN'"),
    "rate infinite": ("f.csv", csv("a,8,inf"), "row 2, column 'rate': .*finite.*got 'inf'"),
    "rank negative": ("f.csv", csv("a,-1,1"), "row 2, column 'rank': .*from 0 to 512, got '-1'"),
    "rank fraction": ("f.csv", csv("a,7.5,1"), "row 2, column 'rank': expected a whole number .*got '7.5'"),
    "rank huge": ("f.csv", csv("a,1000000000,1"), "row 2, column 'rank': .*got '1000000000'"),
    "names twice": ("f.csv", csv("a,8,1", "b,8,1", "a,8,1"), "row 4, column 'adapter': .*'a' as in row 2"),
    "not UTF-8": ("f.csv", HEADER + b"caf\xe9,8,1\n", "row 2: expected UTF-8 text, got the byte 0xe9"),
    "endless cell": ("f.csv", csv("a" * 10**6 + ",8,1"), "row 2: expected CSV: field larger than field limit"),
    "endless number": ("f.csv", csv("a,8," + "1" * 10**5), "row 2, column 'rate': .*characters"),
    "NUL bytes": ("f.csv", b"\x00" * 100, "f.csv"),
    "quote left open": ("f.csv", csv('"a,8,1'), "row 2: expected CSV"),
    "JSON cut": ("f.json", DOCUMENT[:-5], "row 1: expected JSON"),
    "JSON rank": ("f.json", DOCUMENT.replace(b"8", b"7.5"), r"key 'adapters\.0\.rank': .*integer, got 7.5"),
    "JSON rate": ("f.json", DOCUMENT.replace(b"0.1", b"NaN"), "finite.*got NaN"),
    "JSON key": ("f.json", DOCUMENT.replace(b"rate", b"rat"), r"key 'adapters\.0\.rat': unknown key"),
    "JSON no adapters": ("f.json", b'{"adapters": []}', "at least one adapter, got 0"),
    "JSON number": ("f.json", b"42", "expected a table, got 42"),
    "JSON deep": ("f.json", b"[" * 10**6, "expected JSON"),
    "YAML broken": ("f.yaml", b"adapters: [", "expected YAML"),
    "YAML alias": ("f.yaml", b"a: &x [1]\nb: *x\n", "row 2: YAML aliases"),
    "Parquet cut": ("f.parquet", parquet()[:-7], "the Parquet file is damaged or cut short"),
    "Parquet of text": ("f.parquet", GOOD, "the Parquet file is damaged or cut short"),
    "gzip cut": ("f.csv.gz", gzip.compress(GOOD)[:-9], "the gzip file is damaged or cut short"),
    "gzip bytes": ("f.csv.gz", b"\x1f\x8b" + b"\x00" * 50, "the gzip file is damaged or cut short"),
    "unknown ending": ("f.doc", GOOD, r"ends in \.csv"),
    "trace": ("f.csv", b"timestamp,input_tokens,output_tokens\n1,2,3\n", "packer workload from-log"),
}

Fails = Callable[..., None]


@pytest.fixture
def fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs a command that must fail with code 2, one message that matches, and no change in the folder."""
    import re

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")

    def check(words: list[str], message: str) -> None:
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        code = run(words)
        out, err = capsys.readouterr()
        assert code == 2, (out, err)
        assert re.search(message, err), err
        assert "Traceback" not in err
        assert out == ""
        assert len([line for line in err.splitlines() if line.startswith(("packer: ", "Error: "))]) == 1
        assert len(err) < 2000
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    return check


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("command", ["solve", "workload describe"])
def test_bad_workload_files(fails: Fails, tmp_path: Path, command: str, case: str) -> None:
    """Whatever is wrong with a workload file, the message says where and what."""
    name, content, message = FILES[case]
    (tmp_path / name).write_bytes(content)
    fails([*command.split(), name], f"(?s){message}")


@pytest.mark.parametrize(
    "command", ["solve", "workload describe", "simulate --max-loras 8", "evaluate", "workload from-log -o o.csv"]
)
def test_missing_files_and_directories(fails: Fails, tmp_path: Path, command: str) -> None:
    """A file that isn't there and a directory in its place each get their message."""
    (tmp_path / "folder.csv").mkdir()
    words = command.split()
    fails([*words, "no.csv"], "no.csv: there is no such file")
    fails([*words, "folder.csv"], "folder.csv: expected a file, got a directory")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--profile h100-64gb/llama-3.1-8b-instuct", "Unknown profile .*Did you mean 'h100-64gb/llama-3.1-8b-inst"),
        ("--profile no.toml", "no.toml: there is no such file"),
        ("--objective gpu", "Unknown objective 'gpu'.* Did you mean 'gpus'. Known: .*gpus"),
        ("--solver gredy", "Unknown solver 'gredy'. Did you mean 'greedy'. Known: .*greedy"),
        ("--predictor twn", "Unknown predictor 'twn'. Did you mean 'twin'. Known: .*twin"),
        ("--predictor no.packer", "no.packer"),
        ("--gpus 0", "--gpus.*0 is not in the range"),
        ("--gpus many", "--gpus.*'many' is not a valid integer\\.$"),
        ("--time-limit 5h", "--time-limit.*'5h' is not a valid number\\.$"),
        ("--seed -1", "--seed.*-1 is not in the range"),
        ("--time-limit 0", "--time-limit"),
        ("--time-limit nan", "time"),
        ("--colour red", "No such option.*--colour"),
        ("-o no/such/plan.json", "there is no directory 'no/such' to write into"),
        ("-o .", "expected a file to write, got a directory"),
        ("-o old.json", "old.json: the file exists; --force overwrites it"),
        ("-o " + "x" * 300, "can't be written"),
    ],
)
def test_bad_choices(fails: Fails, tmp_path: Path, words: str, message: str) -> None:
    """Unknown names get the known ones and the nearest; outputs are checked before the work."""
    (tmp_path / "f.csv").write_bytes(GOOD)
    (tmp_path / "old.json").write_text("precious")
    fails(["solve", "f.csv", *words.split()], message)


def test_the_default_output_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan.json that is no plan of packer's is not overwritten unasked: the search does not begin."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.csv").write_bytes(GOOD)
    (tmp_path / "plan.json").write_text("precious")
    assert run(["solve", "f.csv", "--objective", "gpus", "--predictor", "tree"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "plan.json: the file exists; --force overwrites it" in err
    assert (tmp_path / "plan.json").read_text() == "precious"


def test_an_objective_that_needs_gpus(fails: Fails, tmp_path: Path) -> None:
    """Spreading over all GPUs needs their number: the combination fails before running, with the reason."""
    from packer.registry import names

    if "latency" not in names("objective"):
        pytest.skip("the objective is not registered")
    (tmp_path / "f.csv").write_bytes(GOOD)
    fails(["solve", "f.csv", "--objective", "latency"], "--gpus")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 3", "key 'schema': expected 1, got 3"),
        ("max_num_seqs = 512", "max_num_seqs = -5", r"engine\.max_num_seqs.*got -5"),
        ("max_num_seqs = 512", "max_seqs = 512", r"key 'engine\.max_seqs': unknown key"),
        ("[gpu]", "[gpu", "expected TOML"),
    ],
)
def test_bad_profiles(fails: Fails, tmp_path: Path, toy_profile: object, old: str, new: str, message: str) -> None:
    """A profile file with a bad value names the key."""
    from packer.io.profiles import format_profile

    text = format_profile(toy_profile)  # type: ignore[arg-type]
    assert old in text
    (tmp_path / "p.toml").write_text(text.replace(old, new))
    (tmp_path / "f.csv").write_bytes(GOOD)
    fails(["solve", "f.csv", "--profile", "p.toml"], f"p.toml.*{message}")
    fails(["profiles", "show", "p.toml"], f"p.toml.*{message}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("workload generate --adapters 0 -o o.csv", "--adapters.*0 is not in the range"),
        ("workload generate --adapters 3 --ranks 8,x -o o.csv", "--ranks.*whole numbers.*'8,x'"),
        ("workload generate --adapters 3 --ranks 8,1000 -o o.csv", "rank .*1000"),
        ("workload generate --adapters 3 --rates 0.1,-1 -o o.csv", "rate .*got -1"),
        ("workload generate --adapters 3 --rates 1 --total-rate 1 -o o.csv", "exclude each other"),
        ("workload generate --adapters 3 --exponent 2 -o o.csv", "--exponent is that of shares of --total-rate"),
        ("workload generate --adapters 3 --total-rate nan -o o.csv", "total rate.*got nan"),
        ("workload generate --adapters 3 --input-tokens -5 -o o.csv", "mean length.*got -5"),
        ("workload generate --adapters 3 -o o.doc", "end in .csv"),
        ("workload generate --adapters 3", "Missing option '-o'"),
        ("workload generat", "Did you mean 'generate'"),
        ("workload from-log trace.csv --adapters 2 --rank 8 --replay -o o.csv", "can't hold trace arrivals"),
        ("workload from-log trace.csv --adapters 2 --rank 8 --rate-factor 0 -o o.csv", "--rate-factor.*got 0"),
        ("workload from-log trace.csv --adapters 0 -o o.csv", "--adapters"),
        ("workload from-log named.csv --rank 8 --exponent 1.2 -o o.csv", "names its adapters: --exponent needs"),
        ("workload from-log named.csv --rank 8 --key cached=c -o o.csv", "named.csv, column 'c': no request"),
        ("workload from-log named.csv --rank 8.5 -o o.csv", "--rank.*: expected ranks, .* got '8.5'"),
        ("workload from-log named.csv --rank no.csv -o o.csv", "no.csv: there is no such file"),
        ("workload from-log f.csv -o o.csv", "expected a log of requests. This is a workload: packer solve"),
        ("profiles show nothing", "Unknown profile 'nothing'"),
        ("profiles estimate --model f.csv --gpu h100-80gb -o p.toml", "f.csv.*expected JSON"),
        ("profiles estimate --model config.json --gpu h100 -o p.toml", "Expected one GPU, got 'h100'.*h100-80gb"),
        ("profiles estimate --model meta/none --gpu l4 -o p.toml", "Unknown model 'meta/none'"),
        ("profiles estimate --model config.json --gpu l4 -o p.txt", "end in .toml"),
        ("profiles estimate --model config.json --gpu l4 -o old.toml", "old.toml: the file exists"),
        ("solv f.csv", "No such command 'solv'. Did you mean 'solve'"),
        ("simulate f.csv --max-loras 0", "max_loras of a server with adapters"),
        ("simulate f.csv --max-loras 8 --max-lora-rank 24", "24"),
        ("memory f.csv", "packer memory takes options alone. This is a workload: packer solve, simulate"),
        ("solve f.csv none.csv", "argument .none.csv.: packer solve takes WORKLOAD.$"),
        ("solve f.csv --gpu h200 --model a --model b", "--model takes one value and is given 2 times"),
        ("simulate f.csv --max-loras 8 --profile a --profile b", "--profile takes one value and is given 2 times"),
        ("solve f.csv --max-loras 8", "--max-loras: the plan chooses it .*packer simulate WORKLOAD --max-loras"),
        ("solve f.csv --ranks ranks.csv", "--ranks: the workload has the ranks; packer workload from-log"),
        ("simulate f.csv --max-loras 8 --max-lora-rank 8", "16"),
        ("simulate f.csv --max-loras 8 --duration 0", "--duration"),
        ("compare f.csv --sweep adapters=4,0", "a number of adapters .*, got 0"),
        (f"compare f.csv --sweep adapters=4,{10**20}", "a number of adapters .*, got 1"),
        ("compare f.csv --folder x", "--folder needs --launch"),
        ("init f.csv --base a --model config.json --gpu l4", "--base has no effect with a workload file"),
        ("simulate f.csv --max-loras 8 --concurrency 2 --arrivals lognormal", "--arrivals has no effect"),
        ("simulate f.csv --max-loras 8 --concurrency 2 --rate-factor 2", "--rate-factor has no effect"),
        (f"simulate f.csv --max-loras 8 --max-outstanding {10**20}", "--max-outstanding .*, got 1"),
    ],
)
def test_other_commands(fails: Fails, tmp_path: Path, root: Path, words: str, message: str) -> None:
    """Every command answers bad options and files in the same way."""
    (tmp_path / "f.csv").write_bytes(GOOD)
    (tmp_path / "old.toml").write_text("precious")
    (tmp_path / "trace.csv").write_text("timestamp,input_tokens,output_tokens\n0,5,6\n1,7,8\n")
    (tmp_path / "named.csv").write_text("time,model,input_tokens,output_tokens\n0,a,5,6\n1,a,7,8\n")
    config = root / "tests" / "data" / "models" / "llama-3.1-8b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    fails(words.split(), message)
