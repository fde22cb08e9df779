"""Shells complete packer's commands, options and values: click's own scripts work with commands imported late."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from packer.cli import run

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_the_shells_own(shell: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """Each script is accepted by its shell, where that is installed."""
    monkeypatch.setenv("_PACKER_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit):
        run([])
    script = capsys.readouterr().out
    assert "_PACKER_COMPLETE" in script
    binary = shutil.which(shell)
    if binary is not None:
        subprocess.run([binary, "-n"], input=script, text=True, check=True, timeout=20)


def test_completion_offers_commands_and_formats(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """What the shell requests is completed: commands, options and their values."""
    for words, wanted in (
        ("packer ex", "export"),
        ("packer export --for", "--format"),
        ("packer export --format k", "k8s"),
        ("packer solve --max-num-s", "--max-num-seqs"),
        ("packer solve fleet.csv --max-num-seqs 64 --quant", "--quantization"),
        ("packer simulate fleet.csv --arrivals piece", "piecewise"),
        ("packer init --model meta-llama/Llama-3.1-8", "meta-llama/Llama-3.1-8B-Instruct"),
        ("packer solve fleet.csv --model llama-3.1-8", "llama-3.1-8b-instruct"),
        ("packer workload from-metrics --gateway lite", "litellm"),
    ):
        monkeypatch.setenv("_PACKER_COMPLETE", "fish_complete")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", words.split()[-1])
        with pytest.raises(SystemExit):
            run([])
        assert wanted in capsys.readouterr().out
