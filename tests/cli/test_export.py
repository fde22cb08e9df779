"""`packer export` from the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from packer.cli import run
from packer.plan import Plan, Status


@pytest.fixture
def plan_path(toy_plan: Callable[..., Plan], tmp_path: Path) -> str:
    """A plan file of four adapters on two servers."""
    path = tmp_path / "plan.json"
    toy_plan(["a", "b", "c; rm -rf /", "d"]).save(path)
    return str(path)


def test_main_file_goes_to_standard_output(plan_path: str, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_path_with_the_suffix_takes_one_file(plan_path: str, tmp_path: Path) -> None:
    """A path that ends as a format's file does is that file."""
    path = tmp_path / "mine.yaml"
    assert run(["export", plan_path, "--format", "k8s", "-o", str(path), "--namespace", "ml"]) == 0
    kinds = [document["kind"] for document in yaml.safe_load_all(path.read_text())]
    assert kinds == ["ConfigMap", "Deployment", "Service"] * 2


def test_json_holds_the_files(plan_path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json a script gets every file."""
    assert run(["export", plan_path, "--format", "helm", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["files"]) == {"values.yaml", "lora-adapters.yaml"}


def test_sources_reach_the_command(
    plan_path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of sources replaces the default folder, and must be complete."""
    sources = tmp_path / "sources.json"
    table = {name: f"acme/{k}" for k, name in enumerate(["a", "b", "c; rm -rf /", "d"])}
    sources.write_text(json.dumps(table))
    assert run(["export", plan_path, "--sources", str(sources)]) == 0
    assert "acme/2" in capsys.readouterr().out
    sources.write_text(json.dumps({"a": "acme/0"}))
    assert run(["export", plan_path, "--sources", str(sources)]) == 2
    assert "'b'" in capsys.readouterr().err


def test_infeasible_plan_is_exit_code_3(
    toy_plan: Callable[..., Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is written for a plan that can't run."""
    path = tmp_path / "plan.json"
    plan = dataclasses.replace(toy_plan(["a", "b", "c"], gpus=1), status=Status.INFEASIBLE, unplaced=(2,))
    bins = (dataclasses.replace(plan.bins[0], adapters=(0, 1)),)
    dataclasses.replace(plan, bins=bins).save(path)
    assert run(["export", str(path)]) == 3
    assert capsys.readouterr().out == ""
