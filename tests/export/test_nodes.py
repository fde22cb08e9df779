"""Servers of a plan with several kinds of GPU run on nodes of their kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from packer.errors import IncompatibleError, UnknownNameError, ValidationError
from packer.export.formats import export_plan
from packer.export.nodes import KINDS, parse_labels, short_name
from packer.export.servers import Options
from packer.plan import Plan
from packer.twin.datasheets import GPUS

NAMES = ("sql", "tone")
SOURCES = {name: f"s3://loras/all/{name}" for name in NAMES}
REPOSITORIES = {name: f"acme/{name}" for name in NAMES}


def of_kinds(plan: Plan, *kinds: str) -> Plan:
    """The plan with these kinds of GPU."""
    bins = [
        replace(each, profile=replace(each.profile, gpu=replace(each.profile.gpu, name=kind)))
        for each, kind in zip(plan.bins, kinds, strict=True)
    ]
    return replace(plan, bins=tuple(bins))


def pods(plan: Plan, name: str, options: Options) -> list[dict[str, Any]]:
    """The specs of the pods of a format's servers."""
    files = export_plan(plan, name, options)
    documents = [each for text in files.values() for each in yaml.safe_load_all(text) if isinstance(each, dict)]
    if name == "helm":
        specs = documents[0]["servingEngineSpec"]["modelSpec"]
        keep = "nodeSelectorTerms"
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        return [{"affinity": {"nodeAffinity": {required: {keep: spec[keep]}}}} for spec in specs]
    if name == "dynamo":
        services = next(each for each in documents if each.get("kind") == "DynamoGraphDeployment")
        workers = services["spec"]["services"].items()
        return [worker["extraPodSpec"] for key, worker in workers if key != "Frontend"]
    kind = "LLMInferenceService" if name == "kserve" else "Deployment"
    found = [each["spec"]["template"] for each in documents if each.get("kind") == kind]
    return [each.get("spec", each) for each in found]


@pytest.mark.parametrize("name", ["k8s", "llm-d", "aibrix", "kserve", "helm", "dynamo"])
def test_two_kinds_select_their_nodes(toy_plan: Callable[..., Plan], name: str) -> None:
    """Each server takes nodes with the product labels of its GPU; what the user gives replaces them."""
    plan = of_kinds(toy_plan(NAMES, gpus=2), "NVIDIA L4", "NVIDIA A100 80GB")
    options = Options(sources=REPOSITORIES, adapters_claim="adapters", token_secret="hf")
    own = replace(options, node_labels={"l4": ("pool", "small")})
    expected = [("nvidia.com/gpu.product", ["NVIDIA-L4"]), ("pool", ["small"])]
    for given, (key, values) in zip((options, own), expected, strict=True):
        found = []
        for spec in pods(plan, name, given):
            affinity = spec["affinity"]
            document = {"containers": [{"name": "main", "image": "x"}], "affinity": affinity}
            kubernetes_validate.validate(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": document}, "1.31", strict=True
            )
            terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
            (term,) = terms["nodeSelectorTerms"]
            (expression,) = term["matchExpressions"]
            assert expression["operator"] == "In"
            found.append((expression["key"], expression["values"]))
        assert found[0] == (key, values)
        assert found[1] == ("nvidia.com/gpu.product", ["NVIDIA-A100-SXM4-80GB", "NVIDIA-A100-80GB-PCIe"])


def test_ray_names_the_accelerator(toy_plan: Callable[..., Plan]) -> None:
    """Ray Serve takes the kind as an accelerator type, and a kind that Ray does not know is refused."""
    options = Options(sources=SOURCES)
    plan = toy_plan(NAMES, gpus=2)
    text = export_plan(of_kinds(plan, "NVIDIA L4", "NVIDIA H100 SXM 80GB"), "ray", options)["serve.yaml"]
    configs = yaml.safe_load(text)["applications"][0]["args"]["llm_configs"]
    assert [each["accelerator_type"] for each in configs] == ["L4", "H100"]
    for gpu in ("NVIDIA GeForce RTX 4090", "NVIDIA A10", "NVIDIA A30"):
        with pytest.raises(IncompatibleError, match=f"none for '{gpu}'"):
            export_plan(of_kinds(plan, "NVIDIA L4", gpu), "ray", options)
    with pytest.raises(IncompatibleError, match="which Intel Gaudi 3 is not to Ray: use --format k8s"):
        export_plan(of_kinds(plan, "Intel Gaudi 3", "Intel Gaudi 3"), "ray", options)


def test_one_kind_takes_any_node(toy_plan: Callable[..., Plan]) -> None:
    """A plan of one kind selects no nodes, unless a label is given; an unknown kind among several needs one, and a
    label for a GPU that is not in the plan is refused."""
    plan = toy_plan(NAMES, gpus=2)
    options = Options(sources=REPOSITORIES, token_secret="hf")
    assert "affinity" not in export_plan(plan, "k8s", options)["packer.yaml"]
    labelled = replace(options, node_labels=parse_labels(["cloud.google.com/gke-accelerator=nvidia-l4"]))
    assert export_plan(plan, "k8s", labelled)["packer.yaml"].count("gke-accelerator") == 2
    with pytest.raises(IncompatibleError, match="--node-label mine:KEY=VALUE"):
        export_plan(of_kinds(plan, "NVIDIA L4", "mine"), "k8s", options)
    for name in ("vllm", "routing", "grafana"):  # these have no nodes, and refuse --node-label
        assert export_plan(of_kinds(plan, "NVIDIA L4", "mine"), name)
    with pytest.raises(UnknownNameError, match="mean 'toy-gpu'"):
        export_plan(plan, "k8s", replace(options, node_labels=parse_labels(["toy:pool=large"])))


@pytest.mark.parametrize("bad", ["pool", "=x", "pool=", "po ol=x", "pool=a/b", "l4:=x", f"pool={'x' * 64}"])
def test_bad_labels_are_refused(bad: str) -> None:
    """What Kubernetes would not take as a label is refused before anything is written."""
    with pytest.raises(ValidationError, match="--node-label"):
        parse_labels([bad])
    with pytest.raises(ValidationError, match="one --node-label"):
        parse_labels(["a=b", "c=d"])


def test_every_gpu_of_a_data_sheet_has_a_label() -> None:
    """The label of each NVIDIA and AMD GPU that profiles are estimated for is known, under the profile's name."""
    titles = {sheet.title for sheet in GPUS.values() if sheet.title.startswith(("NVIDIA", "AMD"))}
    assert titles - set(KINDS) == set()
    assert {short_name(title) for title in ("NVIDIA GeForce RTX 4090", "rtx-4090")} == {"rtx4090"}
    assert short_name("NVIDIA H100 SXM 80GB") == "h100-80gb"
