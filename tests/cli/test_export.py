"""`packer export` from the command line."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from packer import Adapter, Workload, load_plan
from packer.cli import run
from packer.export.formats import FORMATS
from packer.plan import Plan, Status

Capture = pytest.CaptureFixture[str]
CLAIM = ("--adapters-claim", "adapters")


@pytest.fixture
def plan_path(toy_plan: Callable[..., Plan], tmp_path: Path) -> str:
    """A plan file of four adapters on two servers."""
    path = tmp_path / "plan.json"
    toy_plan(["a", "b", "c; rm -rf /", "d"]).save(path)
    return str(path)


def test_main_file_goes_to_standard_output(plan_path: str, capsys: Capture) -> None:
    """Without --output a shell can take the start script from a pipe."""
    assert run(["export", plan_path, "--format", "vllm"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("#!/bin/sh\n")
    assert "args.json" in err


def test_folder_takes_every_file(plan_path: str, tmp_path: Path) -> None:
    """A folder is made and holds each file of the format; a second run needs --force."""
    folder = tmp_path / "out" / "routing"
    assert run(["export", plan_path, "--format", "routing", "-o", str(folder)]) == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["envoy.yaml", "litellm.yaml", "nginx.conf", "routing.json"]
    assert run(["export", plan_path, "--format", "routing", "-o", str(folder)]) == 2
    assert run(["export", plan_path, "--format", "routing", "-o", str(folder), "--force"]) == 0


def test_adapters_of_a_former_plan_are_not_left_in_the_folder(
    plan_path: str, toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan without adapters has no file that loads them: --force removes that of the plan before, which would be
    applied with the folder, or a link there, not what it leads to, and the name of that file takes no other one."""
    plan, other = toy_plan(["base"], gpus=1), tmp_path / "base.json"
    model = plan.bins[0].profile.model
    fleet = Workload([Adapter(model.repository or model.name, 0, 1.0)])
    dataclasses.replace(plan, workload=fleet).save(other)
    (tmp_path / "own.yaml").write_text("own")
    words = ["--format", "helm", *CLAIM, "--force", "-o"]
    for path in (plan_path, str(other)):
        assert run(["export", path, *words, str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.yaml")} == {"values.yaml", "own.yaml"}
    assert f"removed {tmp_path / 'lora-adapters.yaml'}" in capsys.readouterr().err
    (tmp_path / "lora-adapters.yaml").symlink_to(tmp_path / "own.yaml")
    monkeypatch.chdir(tmp_path)
    assert run(["export", str(other), *words[:-1]]) == 0
    assert (tmp_path / "lora-adapters.yaml").is_symlink()
    assert run(["export", str(other), *words, str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.yaml")} == {"values.yaml", "own.yaml"}
    assert run(["export", str(other), *words, str(tmp_path / "lora-adapters.yaml")]) == 2


def test_path_with_the_suffix_takes_one_file(plan_path: str, tmp_path: Path) -> None:
    """A path that ends as a format's file does is that file."""
    path = tmp_path / "mine.yaml"
    assert run(["export", plan_path, "--format", "k8s", "-o", str(path), *CLAIM]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(path.read_text())]
    assert kinds == ["ConfigMap", "Deployment", "Service"] * 2


def test_json_holds_the_files(plan_path: str, capsys: Capture) -> None:
    """With --json a script gets every file."""
    assert run(["export", plan_path, "--format", "helm", "--json", *CLAIM]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["files"]) == {"values.yaml", "lora-adapters.yaml"}


def test_sources_reach_the_command(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """A table of sources replaces the default folder, and must be complete."""
    sources = tmp_path / "sources.json"
    table = {name: f"acme/{k}" for k, name in enumerate(["a", "b", "c; rm -rf /", "d"])}
    sources.write_text(json.dumps(table))
    assert run(["export", plan_path, "--sources", str(sources)]) == 0
    assert "acme/2" in capsys.readouterr().out
    sources.write_text(json.dumps({"a": "acme/0"}))
    assert run(["export", plan_path, "--sources", str(sources)]) == 2
    assert "'b'" in capsys.readouterr().err


def test_infeasible_plan_is_exit_code_3(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """Nothing is written for a plan that can't run."""
    path = tmp_path / "plan.json"
    plan = dataclasses.replace(toy_plan(["a", "b", "c"], gpus=1), status=Status.INFEASIBLE, unplaced=(2,))
    bins = (dataclasses.replace(plan.bins[0], adapters=(0, 1), shares=()),)
    dataclasses.replace(plan, bins=bins).save(path)
    assert run(["export", str(path)]) == 3
    assert capsys.readouterr().out == ""


def test_yml_is_yaml(plan_path: str, tmp_path: Path) -> None:
    """Compose's customary name with `.yml` is a file, not a folder."""
    path = tmp_path / "docker-compose.yml"
    assert run(["export", plan_path, "--format", "compose", "-o", str(path)]) == 0
    assert len(yaml.safe_load(path.read_text())["services"]) == 2


@pytest.mark.parametrize(
    ("format_name", "name", "ending"),
    [
        ("compose", "compose.txt", ".yaml"),
        ("vllm", "start.bash", ".json, .sh"),
        ("nginx", "routing.json", ".conf"),
        ("k8s", "plan.JSON", ".yaml"),
    ],
)
def test_files_of_another_kind_are_refused(
    plan_path: str, tmp_path: Path, capsys: Capture, format_name: str, name: str, ending: str
) -> None:
    """An output that ends like a file of another kind is an error with the right endings, not a folder."""
    before = sorted(tmp_path.rglob("*"))
    claim = CLAIM if FORMATS[format_name].pods else ()
    assert run(["export", plan_path, "--format", format_name, *claim, "-o", str(tmp_path / name)]) == 2
    assert f"ends in {ending}, got the ending {Path(name).suffix.lower()!r}" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["release.prod/", "conf.d", "v1.2", "out.yaml/"])
def test_folders_may_have_dots(plan_path: str, tmp_path: Path, name: str) -> None:
    """A slash at the end makes any name a folder, and endings that no file has need none."""
    assert run(["export", plan_path, "--format", "vllm", "-o", f"{tmp_path}/{name}"]) == 0
    assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["args.json", "start.sh"]


@pytest.mark.parametrize(
    ("format_name", "name", "kind", "left_out"),
    [
        ("helm", "mine.yaml", "servingEngineSpec", "lora-adapters.yaml"),
        ("helm", "lora-adapters.yaml", "LoraAdapter", "values.yaml"),
        ("aibrix", "servers.yaml", "Deployment", "model-adapters.yaml"),
        ("vllm", "mine.json", "CUDA_VISIBLE_DEVICES", "start.sh"),
    ],
)
def test_files_left_out_are_named(
    plan_path: str, tmp_path: Path, capsys: Capture, format_name: str, name: str, kind: str, left_out: str
) -> None:
    """One file of a format with several holds what its name or ending says, and the others are named."""
    claim = CLAIM if FORMATS[format_name].pods else ()
    assert run(["export", plan_path, "--format", format_name, *claim, "-o", str(tmp_path / name)]) == 0
    assert kind in (tmp_path / name).read_text()
    assert f"-o FOLDER also writes {left_out}" in capsys.readouterr().err


def test_nothing_is_made_unless_all_can_be_written(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """A file in the way of one output stops the export before a folder or another file is made."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "args.json").mkdir()
    (tmp_path / "file").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for output in (folder, tmp_path / "file", tmp_path / "file" / "a" / "b", tmp_path / ("x" * 300)):
        assert run(["export", plan_path, "--format", "vllm", "--json", "-o", str(output)]) == 2
        out, err = capsys.readouterr()
        assert json.loads(out)["error"]["exit_code"] == 2
        assert str(output) in err
        assert sorted(tmp_path.rglob("*")) == before


def test_estimates_are_announced(toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture) -> None:
    """As when it was planned, an uncalibrated profile is a note on standard error, and a calibrated one is none."""
    path = tmp_path / "plan.json"
    plan = toy_plan(["a", "b"])
    plan.save(path)
    assert run(["export", str(path)]) == 0
    assert "toy (estimated, not calibrated)" in capsys.readouterr().err
    assert run(["export", str(path), "--quiet"]) == 0
    assert capsys.readouterr().err == ""
    bins = [dataclasses.replace(item, profile=dataclasses.replace(item.profile, calibrated=True)) for item in plan.bins]
    dataclasses.replace(plan, bins=tuple(bins)).save(path)
    assert run(["export", str(path)]) == 0
    assert "estimated" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--port", "65535"], "at most 65535, got 65535 + 1"),
        (["--format", "k8s"], "'/adapters/a', and no volume is mounted there: give --adapters-claim"),
        (["--format", "k8s", "--model", "google/gemma-7b"], "--adapters-claim.*give --token-secret"),
        (["--format", "helm", *CLAIM, "--adapters-dir", "/a", "--sources", "hf.yaml"], "lie below /a/"),
        (["--format", "aibrix", *CLAIM, "--model", "meta-llama/Llama-3.1-8B"], "give --token-secret"),
        (["--format", "aibrix", *CLAIM, "--stack-version", "0.4"], "AIBrix 0.5 to 0.8.*got AIBrix 0.4"),
        (["--format", "sglang"], "plan for sglang.*describes 'vllm'.*Formats for it: vllm, compose, k8s"),
        (["--format", "ray"], "s3:// or gs:// with the adapter's name at its end"),
        (["--format", "kserve", *CLAIM], "KServe's start script keeps.*got 'c; rm -rf /'"),
        (["--prefix", "0gpu"], "start with a small letter, got '0gpu'"),
        (["--token-secret", "hf"], "--token-secret has no effect with --format vllm"),
        (["--format", "ray", "--node-label", "a=b"], "--node-label has no effect with --format ray"),
        (["--format", "helm", *CLAIM, "--port", "9"], "--port has no effect with --format helm"),
        (["--format", "nginx", "--model", "m"], "--model has no effect with --format nginx"),
        (["--format", "k8s", *CLAIM, "--address", "a:{port}"], "--address has no effect with --format k8s"),
        (["--sources", "s3.yaml"], "the source of adapter 'b'.*got 's3://loras/b'.*--format aibrix"),
    ],
)
def test_what_could_not_run_is_refused(
    plan_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, words: list[str], message: str
) -> None:
    """Options that would only fail on the servers are an input error here, in one line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf.yaml").write_text("a: acme/a\nb: /elsewhere/b\n'c; rm -rf /': /a/c\nd: acme/d\n")
    (tmp_path / "s3.yaml").write_text("a: /a\nb: s3://loras/b\n'c; rm -rf /': /c\nd: /d\n")
    assert run(["export", plan_path, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message.replace("+", "[+]"), err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "image", "said"),
    [("dynamo", False, True), ("kserve", True, False), ("kserve", False, True), ("helm", False, False)],
)
def test_stacks_with_a_vllm_of_their_own_are_named(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture, name: str, *, image: bool, said: bool
) -> None:
    """The plan's figures are for its version of vLLM, which these stacks do not start unless told the image."""
    plan, path = toy_plan(["a", "b"]), str(tmp_path / "plan.json")
    plan.save(path)
    words = ["--adapters-claim", "adapters", *["--image", "vllm/vllm-openai:v0.8.5"] * image]
    assert run(["export", path, "--format", name, *words]) == 0
    version = plan.bins[0].profile.engine.version
    assert (f"{name} starts the vLLM of its own image; the plan is for {version}" in capsys.readouterr().err) is said


@pytest.mark.parametrize(("name", "told"), [("dynamo", True), ("helm", True), ("llm-d", False), ("envoy", False)])
def test_shares_that_a_stack_does_not_keep_are_named(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture, name: str, told: bool
) -> None:
    """Where the stack's router splits by load, a note says so and how to simulate that."""
    toy_plan(["a", "b", "c"], replicated=True).save(tmp_path / "plan.json")
    words = ["--adapters-claim", "adapters", "--token-secret", "hf"] if name != "envoy" else []
    assert run(["export", str(tmp_path / "plan.json"), "--format", name, *words]) == 0
    err = capsys.readouterr().err
    assert ("the 1 adapter on several servers by load" in err) is told
    assert ("--router most-idle" in err) is told


@pytest.mark.parametrize(("name", "said"), [("vllm", True), ("compose", True), ("routing", False)])
def test_gpus_of_several_kinds_are_numbered_together(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture, name: str, *, said: bool
) -> None:
    """A script for one host can't tell which of its GPUs is of which kind: the command says so."""
    plan, path = toy_plan(("a", "b"), gpus=2), tmp_path / "plan.json"
    first, second = plan.bins
    other = dataclasses.replace(
        second.profile, name="other", gpu=dataclasses.replace(second.profile.gpu, name="NVIDIA L4")
    )
    dataclasses.replace(plan, bins=(first, dataclasses.replace(second, profile=other)), versions={}).save(path)
    assert run(["export", str(path), "--format", name, "--json"]) == 0
    assert ("start each server on a host of its kind" in capsys.readouterr().err) == said


@pytest.mark.parametrize(("gpus", "told"), [(2, True), (1, False)])
def test_requests_to_the_base_model_go_to_all_servers_of_a_stack(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture, gpus: int, told: bool
) -> None:
    """A stack finds them by the name that all servers of the base model have, whichever the plan has them on."""
    plan = toy_plan(["a", "base"], gpus=gpus)
    model = plan.bins[0].profile.model
    base = dataclasses.replace(plan.workload.adapters[1], name=model.repository or model.name, rank=0)
    fleet = dataclasses.replace(plan.workload, adapters=(plan.workload.adapters[0], base))
    dataclasses.replace(plan, workload=fleet).save(tmp_path / "plan.json")
    words = ["--adapters-claim", "adapters", "--token-secret", "hf"]
    assert run(["export", str(tmp_path / "plan.json"), "--format", "dynamo", *words]) == 0
    assert ("base model to all of its servers; planned: server 1" in capsys.readouterr().err) is told


def test_servers_that_do_not_start_are_not_exported(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: Capture
) -> None:
    """A script that deploys what is exported stops where a server of an edited plan has too many slots to start."""
    path = tmp_path / "plan.json"
    toy_plan(("a", "b"), gpus=2).save(path)
    for server, said in ((0, "server 0 does not start"), (1, "servers 0, 1 do not start")):
        edited = json.loads(path.read_text())
        edited["gpus"][server]["max_loras"] = 20_000
        path.write_text(json.dumps(edited))
        assert run(["evaluate", str(path), "--rewrite"]) == 3
        assert re.search(r"ervers? 0.* not? start: .*\. What would start: max_loras \d", capsys.readouterr().out)
        assert run(["export", str(path)]) == 3
        out, err = capsys.readouterr()
        assert not out
        assert f"{said}: no memory for so many slots of that rank" in err


def test_a_plan_that_breaks_its_goal_is_exported_with_a_word(plan_path: str, tmp_path: Path, capsys: Capture) -> None:
    """It runs, and whoever starts it knows what it lacks; one with adapters without a server is refused."""
    broken = dataclasses.replace(load_plan(plan_path), status=Status.INFEASIBLE, reasons=("server 0 breaks the goal.",))
    broken.save(tmp_path / "broken.json")
    assert run(["export", str(tmp_path / "broken.json")]) == 0
    assert "the plan is infeasible: server 0 breaks the goal" in capsys.readouterr().err
