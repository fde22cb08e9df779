from __future__ import annotations

import dataclasses
import json
import re
import string
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from packer.adapter import Adapter
from packer.errors import FileFormatError, IncompatibleError, UnknownNameError, ValidationError
from packer.export import quoting
from packer.export.formats import FORMATS, export_plan
from packer.export.servers import Options
from packer.export.sources import parsed, read_sources
from packer.plan import Plan, Status
from packer.workload import Workload

names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=40)
tricky = st.text(st.sampled_from("$\\{}'\"` ;#:-,*&!%@<>|[]()~=.aA1\u2028\u202e"), min_size=1, max_size=12)


def interpolated(value: str) -> str:
    """What Compose makes of a text (compose-spec, interpolation): `$$` is a dollar, `$x` a variable."""
    template = string.Template(value)
    assert template.is_valid(), value
    return template.substitute({})


def test_compose_gives_each_server_its_gpu(hostile_plan: Plan) -> None:
    """After Compose's interpolation the command is the planned one, on a GPU and port of its own."""
    document = yaml.safe_load(export_plan(hostile_plan, "compose")["compose.yaml"])
    plain = json.loads(export_plan(hostile_plan, "vllm")["args.json"])
    assert list(document["services"]) == ["gpu-0", "gpu-1", "gpu-2"]
    for gpu, service in enumerate(document["services"].values()):
        command = [interpolated(word) for word in service["entrypoint"]]
        assert command[5:] == plain[gpu]["command"][5:]
        devices = service["deploy"]["resources"]["reservations"]["devices"]
        assert devices[0]["device_ids"] == [str(gpu)]
        assert service["ports"] == [f"{8000 + gpu}:8000"]


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"kserve", "ray"}))
def test_output_is_ascii_and_reproducible(
    hostile_plan: Plan, exported: Callable[[Plan, str], dict[str, str]], name: str
) -> None:
    """No raw control character or bidi mark reaches a file; the same plan gives the same bytes."""
    files = exported(hostile_plan, name)
    for text in files.values():
        assert text.isascii()
        assert all(sign.isprintable() or sign == "\n" for sign in text)
    assert files == exported(hostile_plan, name)


@pytest.mark.parametrize("name", FORMATS)
def test_requests_to_the_base_model_alone_give_no_empty_file(
    toy_plan: Callable[..., Plan], exported: Callable[[Plan, str], dict[str, str]], name: str
) -> None:
    """A file without more than comments says nothing, and kubectl refuses it: the servers' file comes first."""
    plan = toy_plan(["base"], gpus=1)
    model = plan.bins[0].profile.model
    fleet = Workload([Adapter(model.repository or model.name, 0, 1.0)])
    files = exported(dataclasses.replace(plan, workload=fleet), name)
    assert all(re.search(r"^[^#\s]", text, re.MULTILINE) for text in files.values())


@pytest.mark.parametrize("name", FORMATS)
def test_infeasible_plans_are_not_exported(toy_plan: Callable[..., Plan], name: str) -> None:
    """There is nothing to run when an adapter has no server."""
    plan = dataclasses.replace(toy_plan(["a", "b"]), status=Status.INFEASIBLE, unplaced=(1,), reasons=("Too hot.",))
    with pytest.raises(IncompatibleError, match="Too hot"):
        export_plan(plan, name)


def test_unknown_format_names_the_nearest(hostile_plan: Plan) -> None:
    """A wrong format name is answered with the right one."""
    with pytest.raises(UnknownNameError, match="'k8s'"):
        export_plan(hostile_plan, "k8")


def test_missing_source_is_named(toy_plan: Callable[..., Plan]) -> None:
    """A table of sources must know every adapter of the plan."""
    with pytest.raises(ValidationError, match="'b'"):
        export_plan(toy_plan(["a", "b"]), "vllm", Options(sources={"a": "/x"}))


@pytest.mark.parametrize("name", ["compose", "k8s", "helm"])
def test_a_folder_that_no_volume_is_mounted_at_is_refused(toy_plan: Callable[..., Plan], name: str) -> None:
    """Kubernetes and Docker take no colon in the path of a mount; without one it is a path like others."""
    where = Options(adapters_dir="/a:b", adapters_claim=None if name == "compose" else "claim", token_secret="hf")
    with pytest.raises(ValidationError, match="without a colon, as neither Kubernetes nor Docker"):
        export_plan(toy_plan(["a", "b"]), name, where)
    assert "/a:b/a" in export_plan(toy_plan(["a", "b"]), "vllm", Options(adapters_dir="/a:b"))["start.sh"]


def test_adapters_stay_inside_their_folder(hostile_plan: Plan) -> None:
    """Without a table, no name leads out of the adapters' folder, and no two names meet."""
    entries = json.loads(export_plan(hostile_plan, "vllm", Options(adapters_dir="/data"))["args.json"])
    paths = {}
    for entry in entries:
        for item in entry["command"][entry["command"].index("--lora-modules") + 1 :]:
            module = json.loads(item)
            paths[module["name"]] = module["path"]
    for path in paths.values():
        assert re.fullmatch(r"/data/[^/]+", path)
        assert Path(path).name not in (".", "..")
    assert len(set(paths.values())) == len(paths)


@given(st.lists(names | tricky, min_size=1, max_size=6, unique=True))
@settings(max_examples=25, deadline=None)
def test_any_names_survive_yaml_and_json(toy_plan: Callable[..., Plan], chosen: list[str]) -> None:
    """Whatever adapters are called, parsing the exports gives exactly these names back."""
    plan = toy_plan(chosen, gpus=1)
    documents = list(yaml.safe_load_all(export_plan(plan, "k8s", Options(adapters_claim="adapters"))["packer.yaml"]))
    settings_text = yaml.safe_load(documents[0]["data"]["vllm.yaml"])
    assert {json.loads(item)["name"] for item in settings_text["lora-modules"]} == set(chosen)
    adapters = list(
        yaml.safe_load_all(export_plan(plan, "aibrix", Options(adapters_claim="adapters"))["model-adapters.yaml"])
    )
    assert {each["metadata"]["annotations"]["packer/adapter"] for each in adapters} == set(chosen)
    routing = export_plan(plan, "routing")["routing.json"]
    assert set(json.loads(routing)["adapters"]) == set(chosen)


@given(names | tricky)
def test_yaml_value_round_trips(value: str) -> None:
    """A text in YAML comes back as that text, as key and as value."""
    text = quoting.yaml_value(value)
    assert yaml.safe_load(f"{{{text}: {text}}}") == {value: value}


@given(st.lists(names | tricky, min_size=2, max_size=2, unique=True))
def test_made_names_are_valid_and_distinct(pair: list[str]) -> None:
    """DNS names, label values and file names made of two different names are valid and differ."""
    for made in ([quoting.dns_name(name) for name in pair], [quoting.label_value(name) for name in pair]):
        assert made[0] != made[1]
        assert all(re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", name) for name in made)
    files = [quoting.file_name(name) for name in pair]
    assert files[0] != files[1]
    assert not any("/" in name or "\0" in name or name in ("", ".", "..") for name in files)


SOURCES = {
    "csv": 'adapter,source\na,/adapters/a\n"b, c",acme/b\n',
    "json": '{"a": "/adapters/a", "b, c": "acme/b"}',
    "yaml": "a: /adapters/a\n'b, c': acme/b\n",
}


@pytest.mark.parametrize("suffix", SOURCES)
def test_sources_from_each_format(tmp_path: Path, suffix: str) -> None:
    """A table of sources may be CSV, JSON or YAML."""
    path = tmp_path / f"sources.{suffix}"
    path.write_text(SOURCES[suffix])
    assert read_sources(path) == {"a": "/adapters/a", "b, c": "acme/b"}


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("x.csv", "adapter,path\na,b\n", "column 'path': unknown column"),
        ("x.csv", "adapter,source\na,b,c\n", "row 2"),
        ("x.csv", "adapter,source\na,b\na,c\n", "unique names"),
        ("x.csv", "adapter,source\na,\n", "repository"),
        ("x.csv", 'adapter,source\n"a,b\n', "CSV"),
        ("x.json", '{"a": 1}', "repository"),
        ("x.json", '{"a": "x", "a": "y"}', "twice"),
        ("x.json", "[1]", "mapping"),
        ("x.json", "{", "expected JSON"),
        ("x.yaml", "a: x\na: y\n", "twice"),
        ("x.yaml", "a: [x\n", "expected YAML"),
        ("x.yaml", "? [a]\n: x\n", "expected YAML"),
        ("x.yaml", "!!python/object:os.system x", "expected YAML"),
        ("x.txt", "a", r"\.csv"),
    ],
)
def test_bad_sources_are_refused(tmp_path: Path, file: str, text: str, message: str) -> None:
    """What isn't a table of sources is refused with the rule it breaks."""
    path = tmp_path / file
    path.write_text(text)
    with pytest.raises(FileFormatError, match=message):
        read_sources(path)


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("/adapters/a", "path"),
        ("./a/b", "path"),
        ("a", "path"),
        ("a/b/c", "path"),
        ("acme/lora", "huggingface"),
        ("hf://acme/lora", "huggingface"),
        ("s3://bucket/a", "s3"),
        ("gs://bucket/a", "gcs"),
        ("https://x/y", "unknown"),
        ("file:///x", "path"),
    ],
)
def test_kind_of_source(source: str, kind: str) -> None:
    """A source is recognised by its form."""
    assert parsed(source)[0] == kind
