"""Where adapters lie, in the terms of each format."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from packer.errors import IncompatibleError
from packer.export.formats import export_plan
from packer.export.servers import Options
from packer.plan import Plan

VLLM = ("vllm", "compose", "k8s")


@pytest.fixture
def exported(toy_plan: Callable[..., Plan]) -> Callable[[str, str], Any]:
    """What a format writes for an adapter `a` with some source: its path, URL or table."""
    plan = toy_plan(["a"], gpus=1)

    def source_in(format_name: str, source: str) -> Any:
        options = Options(sources={"a": source}, adapters_claim="adapters")
        files = export_plan(plan, format_name, options)
        if format_name == "vllm":
            return json.loads(json.loads(files["args.json"])[0]["command"][-1])["path"]
        if format_name == "compose":
            (service,) = yaml.safe_load(files["compose.yaml"])["services"].values()
            return json.loads(service["entrypoint"][-1])["path"]
        if format_name == "k8s":
            config = next(yaml.safe_load_all(files["packer.yaml"]))
            return json.loads(yaml.safe_load(config["data"]["vllm.yaml"])["lora-modules"][0])["path"]
        if format_name == "aibrix":
            return yaml.safe_load(files["model-adapters.yaml"])["spec"]["artifactURL"]
        return yaml.safe_load(files["lora-adapters.yaml"])["spec"]["adapterSource"]

    return source_in


@pytest.mark.parametrize("format_name", VLLM)
@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("/adapters/a", "/adapters/a"),
        ("/adapters/./some/where/a", "/adapters/./some/where/a"),
        ("file:///adapters/a", "/adapters/a"),
        ("acme/lora", "acme/lora"),
        ("hf://acme/lora", "acme/lora"),
        ("HuggingFace://acme/lora-2.1", "acme/lora-2.1"),
    ],
)
def test_vllm_gets_paths_and_repositories(
    exported: Callable[[str, str], Any], format_name: str, source: str, path: str
) -> None:
    """vLLM supports no schemes: it is given the bare path or the bare id of a repository."""
    assert exported(format_name, source) == path


@pytest.mark.parametrize("format_name", VLLM)
@pytest.mark.parametrize(
    ("source", "help_"),
    [
        ("s3://bucket/a", "--format aibrix, kserve, dynamo or ray"),
        ("gs://bucket/a", "--format aibrix or --format ray"),
        ("tos://bucket/a", "--format aibrix"),
        ("https://host/a.tar", "repository"),
        ("oci://host/a", "path"),
        ("s3://", "path"),
        ("file://host/a", "path"),
        ("hf://acme/lora/file", "repository"),
        ("hf://acme/lora@main", "repository"),
    ],
)
def test_vllm_formats_refuse_what_vllm_cannot_read(
    exported: Callable[[str, str], Any], format_name: str, source: str, help_: str
) -> None:
    """A source that would fail when the server starts fails here, with the adapter, the source and a way out."""
    with pytest.raises(IncompatibleError, match=f"adapter 'a'.*vLLM.*'{source}'.*{help_}"):
        exported(format_name, source)


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ("/adapters/a", "/adapters/a"),
        ("file:///adapters/a", "/adapters/a"),
        ("acme/lora", "huggingface://acme/lora"),
        ("hf://acme/lora", "huggingface://acme/lora"),
        ("huggingface://acme/lora", "huggingface://acme/lora"),
        ("s3://bucket/a", "s3://bucket/a/"),
        ("gs://bucket/a/b/", "gcs://bucket/a/b/"),
        ("gcs://bucket/a", "gcs://bucket/a/"),
        ("tos://bucket/a", "tos://bucket/a/"),
    ],
)
def test_aibrix_gets_its_own_schemes(exported: Callable[[str, str], Any], source: str, url: str) -> None:
    """An artifactURL has a scheme that AIBrix supports and names a folder of a bucket, or is an absolute path."""
    assert exported("aibrix", source) == url


@pytest.mark.parametrize(
    ("source", "adapter_source"),
    [
        ("/adapters/a", {"type": "local", "adapterPath": "/adapters/a"}),
        ("file:///adapters/a", {"type": "local", "adapterPath": "/adapters/a"}),
        *(
            (source, {"type": "huggingface", "repository": "acme/lora", "adapterPath": "acme/lora"})
            for source in ("hf://acme/lora", "acme/lora")
        ),
    ],
)
def test_lora_adapters_get_their_types(
    exported: Callable[[str, str], Any], source: str, adapter_source: dict[str, str]
) -> None:
    """A LoraAdapter says the kind of its source, and what vLLM loads: the operator downloads with a token alone."""
    assert exported("helm", source) == {"adapterName": "a", **adapter_source}


@pytest.mark.parametrize(
    ("format_name", "source", "help_"),
    [
        ("aibrix", "https://host/a", "repository"),
        ("aibrix", "adapters/of/a", "path"),
        ("aibrix", "oci://host/a", "path"),
        ("helm", "gs://bucket/a", "--format aibrix"),
        ("helm", "oci://host/a", "path"),
        ("helm", "s3://host/a", "--format aibrix, kserve"),
        ("helm", "https://host/a", "path"),
    ],
)
def test_operators_are_not_given_what_they_cannot_read(
    exported: Callable[[str, str], Any], format_name: str, source: str, help_: str
) -> None:
    """AIBrix and the production stack have schemes of their own; others are refused with a way out."""
    with pytest.raises(IncompatibleError, match=f"adapter 'a'.*'{source}'.*{help_}"):
        exported(format_name, source)


def test_routers_do_not_mind_sources(toy_plan: Callable[..., Plan]) -> None:
    """A routing table names no source, so that none is refused there."""
    options = Options(sources={"a": "oci://host/a"})
    assert json.loads(export_plan(toy_plan(["a"], gpus=1), "routing", options)["routing.json"])["adapters"]
