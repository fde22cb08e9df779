from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import kubernetes_validate
import pytest
import yaml

from packer.errors import ValidationError
from packer.export import quoting
from packer.export.formats import export_plan
from packer.export.servers import Options
from packer.plan import Plan

DNS = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
KINDS = ("ConfigMap", "Deployment", "Service")
OPTIONS = Options(namespace="ml", adapters_claim="adapters", token_secret="hf")


def validated(text: str) -> list[dict[str, Any]]:
    """Documents of a manifest, each checked strictly against Kubernetes' own schema."""
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    return documents


@pytest.mark.parametrize("options", [Options(adapters_claim="adapters"), OPTIONS])
def test_every_document_is_valid(hostile_plan: Plan, options: Options) -> None:
    """Deployment, Service and ConfigMap of every server satisfy Kubernetes' schemas."""
    documents = validated(export_plan(hostile_plan, "k8s", options)["packer.yaml"])
    assert [document["kind"] for document in documents] == ["ConfigMap", "Deployment", "Service"] * 3
    names = {(document["kind"], document["metadata"]["name"]) for document in documents}
    assert names == {(kind, f"gpu-{gpu}") for kind in KINDS for gpu in range(3)}


@pytest.mark.parametrize("name", ["k8s", "helm", "aibrix", "llm-d", "kserve", "dynamo", "gateway-api"])
def test_every_object_has_the_label_by_which_former_ones_are_found(toy_plan: Callable[..., Plan], name: str) -> None:
    """Objects that a new plan does not have stay in the cluster until they are deleted: one label finds all of them."""
    plan = toy_plan(("sql", "chat", "tone"), replicated=True)
    texts = (text for file, text in export_plan(plan, name, OPTIONS).items() if not file.startswith("values"))
    objects = [each for text in texts for each in yaml.safe_load_all(text)]
    assert objects
    assert {each["metadata"]["labels"]["app.kubernetes.io/managed-by"] for each in objects} == {"packer"}


def test_settings_hold_the_adapters(hostile_plan: Plan) -> None:
    """The file that vLLM reads holds exactly the server's adapters."""
    from json import loads

    documents = validated(export_plan(hostile_plan, "k8s", OPTIONS)["packer.yaml"])
    for gpu, config in enumerate(documents[::3]):
        settings = yaml.safe_load(config["data"]["vllm.yaml"])
        assert settings["max-loras"] == hostile_plan.bins[gpu].max_loras
        assert settings["enable-lora"] is True
        found = {loads(item)["name"] for item in settings["lora-modules"]}
        assert found == {hostile_plan.workload.names[i] for i in hostile_plan.bins[gpu].adapters}


def test_nothing_of_a_name_is_on_the_command_line(hostile_plan: Plan) -> None:
    """Kubernetes expands $(NAME) in arguments, so they hold no name."""
    documents = validated(export_plan(hostile_plan, "k8s", OPTIONS)["packer.yaml"])
    for deployment in documents[1::3]:
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert container["command"] == ["vllm", "serve", "--config", "/etc/packer/vllm.yaml"]
        assert "args" not in container


def test_probes_outlast_the_stalls_of_the_front_end(hostile_plan: Plan) -> None:
    """vLLM answers nothing while it renders /metrics, up to a second and more with hundreds of adapters: by Kubernetes'
    timeout of one second a busy server would be taken out of its Service, and ended."""
    documents = validated(export_plan(hostile_plan, "k8s", OPTIONS)["packer.yaml"])
    for deployment in documents[1::3]:
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        assert min(container[probe]["timeoutSeconds"] for probe in ("readinessProbe", "livenessProbe")) >= 5


def test_selectors_match_their_own_pods_only(hostile_plan: Plan) -> None:
    """A Service selects the pods of its server and of no other."""
    documents = validated(export_plan(hostile_plan, "k8s", OPTIONS)["packer.yaml"])
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in documents if each["kind"] == "Deployment"]
    for number, service in enumerate(each for each in documents if each["kind"] == "Service"):
        selector = service["spec"]["selector"].items()
        assert [selector <= pod.items() for pod in pods] == [k == number for k in range(3)]


def test_too_large_settings_are_refused(toy_plan: Callable[..., Plan]) -> None:
    """What doesn't fit a ConfigMap is an error here, not on the cluster."""
    names = [f"{k:04d}" + "\U0001f984" * 200 for k in range(300)]
    with pytest.raises(ValidationError, match="1 MiB"):
        export_plan(toy_plan(names, gpus=1), "k8s", OPTIONS)


@pytest.mark.parametrize("bad", ["Upper", "a b", "x" * 64, "", "-x", "a\n"])
def test_bad_kubernetes_names_are_refused(bad: str) -> None:
    """Names that a cluster would refuse are refused here, and prefixes that leave no room for a number; what is there
    already may have the longest name that a cluster takes."""
    with pytest.raises(ValidationError, match="letters, digits"):
        Options(namespace=bad)
    with pytest.raises(ValidationError, match="up to 40 small letters, digits"):
        Options(prefix="x" * 41, namespace="x" * 63, adapters_claim="x" * 63, token_secret="x" * 63)
    assert Options(namespace="x" * 63, adapters_claim="x" * 63, token_secret="x" * 63).prefix == "gpu"


def test_aibrix_resources(hostile_plan: Plan) -> None:
    """One ModelAdapter per adapter, with a unique DNS name, on exactly its planned servers."""
    sources = {name: f"acme/lora-{k}" for k, name in enumerate(hostile_plan.workload.names)}
    files = export_plan(hostile_plan, "aibrix", Options(sources=sources))
    servers = validated(files["servers.yaml"])
    assert not any("lora-modules" in each["data"]["vllm.yaml"] for each in servers if each["kind"] == "ConfigMap")
    adapters = list(yaml.safe_load_all(files["model-adapters.yaml"]))
    assert {each["metadata"]["annotations"]["packer/adapter"] for each in adapters} == set(sources)
    assert len({each["metadata"]["name"] for each in adapters}) == len(sources)
    for each in adapters:
        name = each["metadata"]["annotations"]["packer/adapter"]
        assert (each["apiVersion"], each["kind"]) == ("model.aibrix.ai/v1alpha1", "ModelAdapter")
        assert DNS.fullmatch(each["metadata"]["name"])
        assert each["spec"]["artifactURL"] == f"huggingface://{sources[name]}"
        assert set(each["spec"]["podSelector"]) == {"matchLabels"}  # AIBrix does not read matchExpressions
        assert set(each["spec"]) == {"baseModel", "podSelector", "artifactURL"}


def test_aibrix_finds_the_base_model_by_a_label(toy_plan: Callable[..., Plan]) -> None:
    """AIBrix's gateway knows a base model by the label of its Deployments and pods, routes to the Service of that name,
    and passes that name on, which vLLM has to serve; no adapter takes it."""
    own = quoting.dns_name("acme/toy-7b")
    plan = toy_plan(["chat", "acme/toy-7b", own])
    chat, base, alike = plan.workload.adapters
    plan = replace(plan, workload=replace(plan.workload, adapters=(chat, replace(base, rank=0), alike)))
    files = export_plan(plan, "aibrix", OPTIONS)
    objects = validated(files["servers.yaml"])
    (service,) = (each for each in objects if each["metadata"]["name"] == own)
    assert service["spec"]["selector"] == {"model.aibrix.ai/name": own}
    for each in (each for each in objects if each["kind"] == "Deployment"):
        assert each["metadata"]["labels"]["model.aibrix.ai/name"] == own
        assert each["spec"]["template"]["metadata"]["labels"]["model.aibrix.ai/name"] == own
    settings = [yaml.safe_load(each["data"]["vllm.yaml"]) for each in objects if each["kind"] == "ConfigMap"]
    assert [each["served-model-name"] for each in settings] == [["acme/toy-7b", own]] * len(plan.bins)
    adapters = [each["metadata"]["name"] for each in yaml.safe_load_all(files["model-adapters.yaml"])]
    assert len(adapters) == 2
    assert own not in adapters


def test_aibrix_names_that_collide_are_refused(toy_plan: Callable[..., Plan]) -> None:
    """An adapter called as another one's resource would silently replace it."""
    taken = quoting.dns_name("My Adapter")
    with pytest.raises(ValidationError, match=f"'My Adapter' and '{taken}'"):
        export_plan(toy_plan(["My Adapter", taken], gpus=1), "aibrix", OPTIONS)
    assert export_plan(toy_plan(["My Adapter", "my-adapter"], gpus=1), "aibrix", OPTIONS)


def test_aibrix_adapters_have_names_of_services(toy_plan: Callable[..., Plan]) -> None:
    """AIBrix makes a Service for each adapter: its name starts with a letter, and no server has it."""
    names = ["7b-chat", "42", "gpu-0", "0/x", "own"]
    files = export_plan(toy_plan(names, gpus=1), "aibrix", OPTIONS)
    adapters = [each["metadata"] for each in yaml.safe_load_all(files["model-adapters.yaml"])]
    found = {each["annotations"]["packer/adapter"]: each["name"] for each in adapters}
    assert set(found) == set(names)
    assert found["own"] == "own"
    for name in found.values():
        assert re.fullmatch("[a-z]([a-z0-9-]{0,61}[a-z0-9])?", name)
        assert name != "gpu-0"


def test_aibrix_pods_carry_the_selected_labels(hostile_plan: Plan) -> None:
    """A ModelAdapter is loaded on every pod that it selects: these are its planned servers."""
    files = export_plan(hostile_plan, "aibrix", OPTIONS)
    pods = [
        each["spec"]["template"]["metadata"]["labels"]
        for each in yaml.safe_load_all(files["servers.yaml"])
        if each["kind"] == "Deployment"
    ]
    for each in yaml.safe_load_all(files["model-adapters.yaml"]):
        selected = each["spec"]["podSelector"]["matchLabels"].items()
        index = hostile_plan.workload.names.index(each["metadata"]["annotations"]["packer/adapter"])
        assert [selected <= pod.items() for pod in pods] == [index in item.adapters for item in hostile_plan.bins]
    assert all(pod["adapter.model.aibrix.ai/enabled"] == "true" for pod in pods)


def test_other_adapters_restart_no_pod_of_aibrix(toy_plan: Callable[..., Plan]) -> None:
    """Kubernetes starts pods again whose labels change, so these depend on no adapter's name or place in a list."""
    before, after = (export_plan(toy_plan(names), "aibrix", OPTIONS) for names in ("bc", "zc"))
    assert before["servers.yaml"] == after["servers.yaml"]
    assert before != after


@pytest.mark.parametrize(
    ("version", "tag"),
    [
        ("0.11", "v0.11.0"),
        ("v0.11.0", "v0.11.0"),
        ("0.8.5.post1", "v0.8.5.post1"),
        ("0.11.0rc1", "latest"),
        ("nightly", "latest"),
    ],
)
def test_images_have_the_tags_of_releases(hostile_plan: Plan, version: str, tag: str) -> None:
    """A version in two numbers, as --vllm-version takes it, is that of the first release."""
    profile = hostile_plan.bins[0].profile
    other = replace(profile, engine=replace(profile.engine, version=version))
    plan = replace(hostile_plan, bins=tuple(replace(item, profile=other) for item in hostile_plan.bins))
    specs = yaml.safe_load(export_plan(plan, "helm", OPTIONS)["values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert {spec["tag"] for spec in specs} == {tag}


def test_helm_values_and_adapters(hostile_plan: Plan) -> None:
    """One modelSpec per server, and each adapter as a LoraAdapter of its server."""
    files = export_plan(hostile_plan, "helm", OPTIONS)
    specs = yaml.safe_load(files["values.yaml"])["servingEngineSpec"]["modelSpec"]
    assert [spec["name"] for spec in specs] == ["gpu-0", "gpu-1", "gpu-2"]
    for spec, item in zip(specs, hostile_plan.bins, strict=True):
        assert (spec["repository"], spec["tag"]) == ("vllm/vllm-openai", "v0.10.0")
        assert f"--max-loras={item.max_loras}" in spec["vllmConfig"]["extraArgs"]
        # Helm writes the key's numbers from a million on as 1.048576e+06, which vLLM does not take.
        length = item.profile.engine.max_model_len
        assert f"--max-model-len={length}" in spec["vllmConfig"]["extraArgs"]
        assert "maxModelLen" not in spec["vllmConfig"]
    adapters = list(yaml.safe_load_all(files["lora-adapters.yaml"]))
    placed = {(each["spec"]["baseModel"], each["spec"]["adapterSource"]["adapterName"]) for each in adapters}
    names = hostile_plan.workload.names
    assert placed == {(f"gpu-{k}", names[i]) for k, item in enumerate(hostile_plan.bins) for i in item.adapters}
    assert len({each["metadata"]["name"] for each in adapters}) == len(adapters)
    assert all(DNS.fullmatch(each["metadata"]["name"]) for each in adapters)


def test_helm_notes_the_shares_of_replicated_adapters(hostile_plan: Plan) -> None:
    """A LoraAdapter of a replicated adapter says its planned share; these sum to 1, and others have none."""
    shares: dict[str, list[float]] = {}
    for each in yaml.safe_load_all(export_plan(hostile_plan, "helm", OPTIONS)["lora-adapters.yaml"]):
        share = float(each["metadata"].get("annotations", {}).get("packer/share", 1.0))
        shares.setdefault(each["spec"]["adapterSource"]["adapterName"], []).append(share)
    assert any(len(parts) > 1 for parts in shares.values())
    assert all(sum(parts) == pytest.approx(1.0) for parts in shares.values())


def test_helm_mounts_the_claim(hostile_plan: Plan) -> None:
    """The production stack's pods see the adapters' volume where the plan says that adapters lie."""
    options = Options(adapters_claim="loras", adapters_dir="/mnt/loras")
    specs = yaml.safe_load(export_plan(hostile_plan, "helm", options)["values.yaml"])
    for spec in specs["servingEngineSpec"]["modelSpec"]:
        (volume,), (mount,) = spec["extraVolumes"], spec["extraVolumeMounts"]
        assert volume["persistentVolumeClaim"] == {"claimName": "loras", "readOnly": True}
        assert mount == {"name": volume["name"], "mountPath": "/mnt/loras", "readOnly": True}
    sources = dict.fromkeys(hostile_plan.workload.names, "acme/lora")
    without = yaml.safe_load(export_plan(hostile_plan, "helm", Options(sources=sources))["values.yaml"])
    assert all("extraVolumes" not in spec for spec in without["servingEngineSpec"]["modelSpec"])


@pytest.mark.parametrize("bad", ["0gpu", "1"])
def test_prefixes_start_with_a_letter(bad: str) -> None:
    """Names of Services are DNS labels of RFC 1035: a digit in front is refused by the cluster, so here too."""
    with pytest.raises(ValidationError, match=f"start with a small letter, got '{bad}'"):
        Options(prefix=bad)
