from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from packer.engine_spec import EngineSpec
from packer.errors import IncompatibleError, ValidationError
from packer.export.formats import export_plan
from packer.export.servers import Options
from packer.plan import Plan
from packer.speculation import SpeculationSpec


def parse_lora_modules(values: list[str]) -> dict[str, str]:
    """What vLLM makes of --lora-modules (vllm/entrypoints/openai/cli_args.py, LoRAParserAction, v0.10)."""
    found = {}
    for item in values:
        if "=" in item and "," not in item:
            name, path = item.split("=")
        else:
            pairs = json.loads(item)
            name, path = pairs["name"], pairs["path"]
        found[name] = path
    return found


def flag(command: list[str], name: str) -> str:
    """Value of a flag in a command line."""
    return command[command.index(name) + 1]


def expected(plan: Plan, gpu: int) -> set[str]:
    """Names of the adapters of a server."""
    return {plan.workload.names[i] for i in plan.bins[gpu].adapters}


def test_json_arguments_hold_the_plan(hostile_plan: Plan) -> None:
    """The JSON arguments start each server with its own slots, rank and adapters."""
    entries = json.loads(export_plan(hostile_plan, "vllm")["args.json"])
    assert len(entries) == 3
    for gpu, entry in enumerate(entries):
        command = entry["command"]
        assert command[:3] == ["vllm", "serve", "acme/toy-7b"]
        assert "--enable-lora" in command
        assert int(flag(command, "--max-loras")) == hostile_plan.bins[gpu].max_loras
        assert int(flag(command, "--max-lora-rank")) == hostile_plan.bins[gpu].max_lora_rank
        # as simulated, host memory holds every adapter, also those of a server that is lost
        assert int(flag(command, "--max-cpu-loras")) == hostile_plan.workload.n_loras > len(expected(hostile_plan, gpu))
        modules = parse_lora_modules(command[command.index("--lora-modules") + 1 :])
        assert set(modules) == expected(hostile_plan, gpu)
        assert len(set(modules.values())) == len(modules)


def test_weights_of_another_repository_are_named(toy_plan: Callable[..., Plan]) -> None:
    """A plan for AWQ weights does not start the bf16 repository that it was estimated from."""
    plan = toy_plan(("a", "b"))
    profile = replace(plan.bins[0].profile, provenance={"weights": "awq, not those of acme/toy-7b"})
    plan = replace(plan, bins=tuple(replace(each, profile=profile) for each in plan.bins))
    with pytest.raises(IncompatibleError, match="weights in awq, not those of acme/toy-7b: --model"):
        export_plan(plan, "vllm")
    assert "acme/toy-7b-awq" in export_plan(plan, "vllm", Options(model="acme/toy-7b-awq"))["args.json"]
    for routes in ("routing", "litellm", "gateway-api", "grafana"):  # these start nothing and take no --model
        assert export_plan(plan, routes)


def test_block_sizes_are_vllms(toy_plan: Callable[..., Plan]) -> None:
    """A block size that vLLM's command line does not take is not exported; another engine may have it."""
    plan = toy_plan(("a", "b"), gpus=1)
    (item,) = plan.bins
    engine = replace(item.profile.engine, block_size=7)
    odd = replace(plan, bins=(replace(item, profile=replace(item.profile, engine=engine)),))
    with pytest.raises(ValidationError, match="one of 1, 8, 16, 32, 64, 128, 256, got 7"):
        export_plan(odd, "vllm")
    EngineSpec("job", "0", 64, 64, 32, block_size=7).check_block_size()


@pytest.mark.parametrize(
    ("version", "caching", "ahead", "flags"),
    [
        ("0.8.5", None, None, ["--no-enable-prefix-caching"]),
        ("0.32.0", None, None, []),
        ("0.32.0", True, False, ["--enable-prefix-caching", "--no-async-scheduling"]),
    ],
)
def test_what_was_simulated_is_started(
    toy_plan: Callable[..., Plan], version: str, caching: bool | None, ahead: bool | None, flags: list[str]
) -> None:
    """Prefix caching and scheduling are written out where they are not the version's default."""
    plan = toy_plan(("a", "b"))
    profile = plan.bins[0].profile
    engine = replace(profile.engine, version=version, prefix_caching=caching, async_scheduling=ahead)
    bins = tuple(replace(each, profile=replace(profile, engine=engine)) for each in plan.bins)
    plan = replace(plan, bins=bins)
    (command, _) = (entry["command"] for entry in json.loads(export_plan(plan, "vllm")["args.json"]))
    assert [word for word in command if "prefix-caching" in word or "async" in word] == flags
    sources = Options(sources={name: f"s3://loras/{name}" for name in ("a", "b")})
    own: dict[str, Any] = {
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "lora_target_modules": ("o_proj", "qkv_proj"),
        "data_parallel_size": 2,
    }
    bins = tuple(
        replace(each, profile=replace(each.profile, engine=replace(each.profile.engine, **own))) for each in plan.bins
    )
    (told, _) = (entry["command"] for entry in json.loads(export_plan(replace(plan, bins=bins), "vllm")["args.json"]))
    with pytest.raises(IncompatibleError, match="--format ray does not start servers of several"):
        export_plan(replace(plan, bins=bins), "ray", sources)
    at = told.index("--lora-target-modules")
    assert told[at + 1 : at + 3] == ["o_proj", "qkv_proj"]
    assert flag(told, "--data-parallel-size") == "2"
    assert "--enable-expert-parallel" in told
    assert told[told.index("--quantization") + 1] == told[told.index("--kv-cache-dtype") + 1] == "fp8"
    ray = yaml.safe_load(export_plan(plan, "ray", sources)["serve.yaml"])
    arguments = ray["applications"][0]["args"]["llm_configs"][0]["engine_kwargs"]
    assert arguments.get("enable_prefix_caching") is (False if version == "0.8.5" else caching)
    assert not [name for name in arguments if name.startswith("no_")]


def test_base_requests_are_served_beside_adapters(toy_plan: Callable[..., Plan]) -> None:
    """Rank 0 is no LoRA module but a further name of the base model; a server without adapters has LoRA off."""
    plan = toy_plan(("chat", "code", "base", "plain"))
    adapters = tuple(replace(a, rank=a.rank * (a.name[0] == "c")) for a in plan.workload.adapters)
    bins = (replace(plan.bins[0], adapters=(0, 1, 2), shares=()), replace(plan.bins[1], adapters=(3,), shares=()))
    plan = replace(plan, workload=replace(plan.workload, adapters=adapters), bins=bins)
    mixed, off = (entry["command"] for entry in json.loads(export_plan(plan, "vllm")["args.json"]))
    assert set(parse_lora_modules(mixed[mixed.index("--lora-modules") + 1 :])) == {"chat", "code"}
    served = mixed.index("--served-model-name")
    assert mixed[served + 1 : served + 3] == ["acme/toy-7b", "base"]
    assert [word for word in off if "lora" in word] == []
    table = json.loads(export_plan(plan, "routing")["routing.json"])["adapters"]
    assert [(name, table[name][0]["server"]) for name in ("base", "chat", "plain")] == [
        ("base", "gpu-0"), ("chat", "gpu-0"), ("plain", "gpu-1"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["vllm", "k8s", "kserve"])
def test_an_adapter_has_another_name_than_the_base_model(toy_plan: Callable[..., Plan], name: str) -> None:
    """A request by the name of both would be answered by the base model (vLLM 0.8.5), so such a plan is refused."""
    plan = toy_plan(("chat", "acme/toy-7b"), gpus=1)
    with pytest.raises(IncompatibleError, match=r"other than the base model's.*'acme/toy-7b'"):
        export_plan(plan, name, Options(adapters_claim="adapters"))


@pytest.mark.parametrize("name", ["aibrix", "kserve", "dynamo"])
def test_stacks_route_base_requests_by_the_models_name(toy_plan: Callable[..., Plan], name: str) -> None:
    """Requests without an adapter need no adapter's resource; a further name of the base model has no route there."""
    plan = toy_plan(("chat", "acme/toy-7b"), gpus=1)
    options = Options(adapters_claim="adapters")
    for further in ("acme/toy-7b", "plain"):
        adapters = (plan.workload.adapters[0], replace(plan.workload.adapters[1], name=further, rank=0))
        changed = replace(plan, workload=replace(plan.workload, adapters=adapters))
        if further == "plain":
            with pytest.raises(IncompatibleError, match=r"'acme/toy-7b', by which .* got 'plain'"):
                export_plan(changed, name, options)
        else:
            files = "".join(export_plan(changed, name, options).values())
            assert "toy-7b" in files
            assert len(re.findall(r"kind: (?:ModelAdapter|DynamoModel)|- name: chat", files)) == 1


def test_kserves_shell_keeps_values_in_one_word(toy_plan: Callable[..., Plan]) -> None:
    """KServe's start script evaluates the further arguments in a shell, which must find JSON in one word."""
    plan = toy_plan(("chat",), gpus=1)
    config = SpeculationSpec("eagle3", 3, 0.6, model="acme/toy-eagle")
    engine = replace(plan.bins[0].profile.engine, version="0.32.0", speculation=config)
    bins = (replace(plan.bins[0], profile=replace(plan.bins[0].profile, engine=engine)),)
    (service,) = yaml.safe_load_all(
        export_plan(replace(plan, bins=bins), "kserve", Options(adapters_claim="adapters"))["services.yaml"]
    )
    (env,) = service["spec"]["template"]["containers"][0]["env"]
    words = subprocess.run(
        ["sh", "-c", "eval \"printf '%s\\n' ${WORDS}\""], env={"WORDS": env["value"]},
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert json.loads(flag(words, "--speculative-config")) == config.config


def test_script_is_words_to_shlex(hostile_plan: Plan) -> None:
    """Reading the script as shell words gives exactly the words of the JSON arguments."""
    files = export_plan(hostile_plan, "vllm")
    commands = [entry["command"] for entry in json.loads(files["args.json"])]
    words = shlex.split(files["start.sh"], comments=True)
    starts = [k for k, word in enumerate(words) if word == "exec"]
    for start, command in zip(starts, commands, strict=True):
        assert words[start + 1 : start + 1 + len(command)] == command


def test_script_runs_in_a_real_shell(hostile_plan: Plan, tmp_path: Path) -> None:
    """sh hands vLLM the planned words and runs nothing that a name contains."""
    recorder = tmp_path / "vllm"
    recorder.write_text('#!/bin/sh\nprintf "%s\\0" "$CUDA_VISIBLE_DEVICES" "$@"\n')
    recorder.chmod(recorder.stat().st_mode | stat.S_IXUSR)
    script = tmp_path / "start.sh"
    files = export_plan(hostile_plan, "vllm", Options(port=9000))
    script.write_text(files["start.sh"])
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for gpu, entry in enumerate(json.loads(files["args.json"])):
        run = subprocess.run(
            ["sh", script, str(gpu)], env=environment, capture_output=True, cwd=tmp_path, timeout=20, check=True
        )
        device, *words = run.stdout.decode().split("\0")[:-1]
        assert device == str(gpu)
        assert ["vllm", *words] == entry["command"]
        assert run.stderr == b""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start.sh", "vllm"]


def test_script_refuses_an_unknown_server(hostile_plan: Plan, tmp_path: Path) -> None:
    """A wrong server number is an error with the valid ones."""
    script = tmp_path / "start.sh"
    script.write_text(export_plan(hostile_plan, "vllm")["start.sh"])
    run = subprocess.run(["sh", script, "7"], capture_output=True, text=True, timeout=20, check=False)
    assert run.returncode == 2
    assert "servers 0 1 2, or all" in run.stderr


def test_script_starts_all(hostile_plan: Plan, tmp_path: Path) -> None:
    """`all` starts every server, each on its own GPU and port."""
    recorder = tmp_path / "vllm"
    recorder.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES $4" > {tmp_path}/started.$CUDA_VISIBLE_DEVICES\n')
    recorder.chmod(0o755)
    script = tmp_path / "start.sh"
    script.write_text(export_plan(hostile_plan, "vllm")["start.sh"].replace("sleep 1", "sleep 0.3"))
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "7"}
    subprocess.run(["sh", script, "all"], env=environment, timeout=20, check=True, start_new_session=True)
    started = {path.read_text().strip() for path in tmp_path.glob("started.*")}
    assert started == {"0 8000", "1 8001", "2 8002"}


def test_one_model_does_not_start_servers_of_several(toy_plan: Callable[..., Plan]) -> None:
    """Each server of a plan of several base models starts its own; --model for all of them is refused."""
    plan = toy_plan(["a", "b"])
    other = replace(plan.bins[1].profile, model=replace(plan.bins[1].profile.model, name="acme/other"))
    mixed = replace(plan, bins=(plan.bins[0], replace(plan.bins[1], profile=other)))
    entries = json.loads(export_plan(mixed, "vllm")["args.json"])
    assert [entry["command"][2] for entry in entries] == ["acme/toy-7b", "acme/other"]
    with pytest.raises(IncompatibleError, match="several base models"):
        export_plan(mixed, "vllm", Options(model="acme/toy-7b"))
