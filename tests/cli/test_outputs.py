"""No command writes a file that it also reads, or two results into one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from packer.cli import run

FLEET = "adapter,rank,rate\na,8,0.1\nb,8,0.1\n"
LOG = '{"time": 5, "model": "a", "prompt_tokens": 1, "completion_tokens": 1}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with inputs, also under a link and in another spelling."""
    monkeypatch.chdir(tmp_path)
    Path("f.csv").write_text(FLEET)
    Path("log.jsonl").write_text(LOG + LOG.replace("5", "605"))
    Path("ranks.csv").write_text("adapter,rank\na,8\n")
    Path("s.yaml").write_text("a: /adapters/x\nb: /adapters/y\n")
    os.symlink("f.csv", "link.csv")
    os.link("ranks.csv", "hard.csv")
    assert run(["solve", "f.csv", "--predictor", "tree", "-o", "plan.json", "-q"]) == 0
    os.link("plan.json", "page.html")
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "solve f.csv --predictor tree -o f.csv --force",
        "solve f.csv --predictor tree -o ./f.csv --force",
        "solve f.csv --predictor tree -o link.csv --force",
        "simulate f.csv --max-loras 2 --output o.csv --per-adapter o.csv",
        "simulate f.csv --max-loras 2 --timeline o.csv --per-adapter ./o.csv",
        "workload from-log log.jsonl --ranks ranks.csv -o ranks.csv --force",
        "workload from-log log.jsonl --ranks ranks.csv -o hard.csv --force",
        "workload from-log log.jsonl -o w.csv --loads w.csv",
        "report plan.json -o page.html --force",
        "export plan.json --format k8s -o s.yaml --sources s.yaml --adapters-claim adapters --token-secret hf --force",
    ],
)
def test_one_file_has_one_use(folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the spelling: exit code 2 before any work, and every file as it was."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert run(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "expected another file for each input and output" in err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("words", ["solve f.csv -o -", "export plan.json --format vllm -o -", "solve -"])
def test_a_dash_is_no_file(folder: Path, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A dash, which means a stream elsewhere, neither becomes a file of that name nor waits for input."""
    assert run(words.split()) == 2
    assert "standard " in capsys.readouterr().err.lower()
    assert not Path("-").exists()
