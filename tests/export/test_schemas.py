"""What is exported for a stack, against the stack's own schema.

The tables in tests/data/schemas hold facts of the projects' public sources: fields, types, limits. Each names its
project, version, commit and files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from packer.errors import IncompatibleError, InputError, ValidationError
from packer.export import quoting
from packer.export.formats import FORMATS, export_plan
from packer.export.servers import Options
from packer.fit.estimate import estimate_profile
from packer.plan import Plan
from packer.twin.engine_rules import rules_of

TABLES = Path(__file__).parent.parent / "data" / "schemas"
NAMES = ("sql", "support-de", "tone.v2", "Legal_DE", "a/b")
PLACES = {
    "path": {name: f"/adapters/{k}" for k, name in enumerate(NAMES)},
    "huggingface": {name: f"acme/lora-{k}" for k, name in enumerate(NAMES)},
    "s3": {name: f"s3://loras/all/{name.replace('/', '-')}" for name in NAMES},
}
ALL = {"adapters_claim": "adapters", "token_secret": "hf", "namespace": "ml"}


def table(name: str) -> dict[tuple[str | None, str], Any]:
    """(apiVersion, kind) → schema."""
    data = json.loads((TABLES / f"{name}.json").read_text("utf-8"))
    assert set(data["source"]) >= {"project", "version", "commit", "date", "path"}
    return {(each.get("apiVersion"), each["kind"]): each["spec"] for each in data["resources"]}


def conforms(document: Any, name: str, kind: str, api: str | None = None) -> None:
    """Check a document, or the spec of a resource, against a table."""
    jsonschema.Draft202012Validator(table(name)[api, kind]).validate(document)


def resources(text: str, name: str) -> list[dict[str, Any]]:
    """The resources of a manifest, each one known to the table and as it demands."""
    found = list(yaml.safe_load_all(text))
    for each in found:
        assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
        conforms(each["spec"], name, each["kind"], each["apiVersion"])
        kubernetes_validate.validate(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": each["metadata"]}, "1.31", strict=True
        )
    return found


def pod(spec: dict[str, Any]) -> None:
    """Check a pod's spec against Kubernetes' schema."""
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    kubernetes_validate.validate(document, "1.31", strict=True)


@pytest.fixture(params=["path", "huggingface", "s3"])
def sources(request: pytest.FixtureRequest) -> dict[str, str]:
    """Adapters in each kind of place."""
    return PLACES[request.param]


@pytest.fixture(scope="module")
def plan(toy_plan: Callable[..., Plan]) -> Plan:
    """Five adapters on two servers, the first one on both."""
    return toy_plan(NAMES, gpus=2, replicated=True)


def test_aibrix(plan: Plan, sources: dict[str, str]) -> None:
    """Every ModelAdapter is one that AIBrix's definition takes, replicated adapters included."""
    files = export_plan(plan, "aibrix", Options(sources=sources, **ALL))
    assert len(resources(files["model-adapters.yaml"], "aibrix")) == len(NAMES)


def test_production_stack(plan: Plan, sources: dict[str, str]) -> None:
    """LoraAdapters are as their definition demands, and the chart's values are keys that the chart has."""
    if sources["sql"].startswith("s3"):
        pytest.skip("the operator does not read buckets")
    files = export_plan(plan, "helm", Options(sources=sources, **ALL))
    assert len(resources(files["lora-adapters.yaml"], "production-stack")) == len(NAMES) + 1
    values = yaml.safe_load(files["values.yaml"])
    conforms(values, "production-stack", "values.yaml")
    # Without this key, the chart turns off what vLLM does by default.
    caching = rules_of(plan.bins[0].profile.engine).prefix_caching
    specs = values["servingEngineSpec"]["modelSpec"]
    assert {each["vllmConfig"]["enablePrefixCaching"] for each in specs} == {caching}


def test_kserve(toy_plan: Callable[..., Plan], sources: dict[str, str]) -> None:
    """Each LLMInferenceService is one that KServe's definition takes, with a template that a pod can be."""
    names = [quoting.dns_name(name) for name in NAMES]
    plan, options = (
        toy_plan(names, gpus=2, replicated=True),
        Options(sources=dict(zip(names, sources.values(), strict=True)), **ALL),
    )
    services = resources(export_plan(plan, "kserve", options)["services.yaml"], "kserve")
    for service, item in zip(services, plan.bins, strict=True):
        lora = service["spec"]["model"]["lora"]
        assert lora["maxRank"] == item.max_lora_rank
        assert lora["maxAdapters"] == item.max_loras
        assert lora["maxCpuAdapters"] == 2 * len(item.adapters)
        assert {each["name"] for each in lora["adapters"]} == {plan.workload.names[i] for i in item.adapters}
        containers = [{"image": "x", **each} for each in service["spec"]["template"]["containers"]]
        (first,) = service["spec"]["template"]["initContainers"]  # KServe merges its own one of this name with it
        assert (first["name"], first["env"][0]["name"]) == ("storage-initializer", "HF_TOKEN")
        pod({"containers": containers})
        flags = containers[0]["env"][0]["value"]
        assert "--max-num-seqs 512" in flags
        assert "lora" not in flags


@pytest.mark.parametrize(("adapters", "off"), [(7, False), (8, True)])
def test_kserve_routes_by_header_what_fits(toy_plan: Callable[..., Plan], adapters: int, off: bool) -> None:
    """KServe's rule has 8 matches for the base model and for each adapter, of at most 64: with more the service would
    get no route, so that its routing by header is off."""
    plan = toy_plan([f"a{k}" for k in range(adapters)], gpus=1)
    (service,) = resources(export_plan(plan, "kserve", Options(**ALL))["services.yaml"], "kserve")
    assert (8 * (adapters + 1) > 64) == off
    assert service["spec"].get("annotations", {}) == (
        {"serving.kserve.io/model-based-routing-enabled": "false"} if off else {}
    )


@pytest.mark.parametrize("name", ["Legal_DE", "tone.v2", "a/b"])
def test_kserve_refuses_names_that_no_volume_has(toy_plan: Callable[..., Plan], name: str) -> None:
    """KServe calls the volume of an adapter on a claim by the adapter's name; a repository needs none."""
    plan = toy_plan([name], gpus=1)
    with pytest.raises(IncompatibleError, match=f"small letters.*'{name}': rename it"):
        export_plan(plan, "kserve", Options(**ALL))
    assert export_plan(plan, "kserve", Options(sources={name: "acme/lora"}, **ALL))


def test_dynamo(plan: Plan, sources: dict[str, str]) -> None:
    """The graph and its DynamoModels are as NVIDIA's types demand, and each model finds its worker."""
    files = export_plan(plan, "dynamo", Options(sources=sources, **ALL))
    (graph,) = resources(files["graph.yaml"], "dynamo")
    workers = {each["modelRef"]["name"]: each for each in graph["spec"]["services"].values() if "modelRef" in each}
    for worker in workers.values():
        pod({"containers": [{"name": "main", **worker["extraPodSpec"]["mainContainer"]}]})
        assert "--enable-lora" in worker["extraPodSpec"]["mainContainer"]["args"]
    models = resources(files["dynamo-models.yaml"], "dynamo")
    placed = {(each["spec"]["baseModelName"], each["spec"]["modelName"]) for each in models}
    names = plan.workload.names
    assert placed == {(f"gpu-{k}", names[i]) for k, item in enumerate(plan.bins) for i in item.adapters}
    assert set(workers) == {base for base, _ in placed}
    assert len({each["metadata"]["name"] for each in models}) == len(models)


def test_ray_serve(toy_plan: Callable[..., Plan]) -> None:
    """The file is one that `serve deploy` takes, with LLMConfigs of fields that Ray has."""
    names = ("sql", "tone", "legal")
    plan = toy_plan(names, gpus=2, replicated=True)
    files = export_plan(plan, "ray", Options(sources={name: f"gs://loras/all/{name}/" for name in names}))
    document = yaml.safe_load(files["serve.yaml"])
    conforms(document, "ray-serve", "serve.yaml")
    configs = document["applications"][0]["args"]["llm_configs"]
    for config, item in zip(configs, plan.bins, strict=True):
        assert config["lora_config"]["dynamic_lora_loading_path"] == "gs://loras/all"
        # Ray requires these two to be equal.
        assert config["lora_config"]["max_num_adapters_per_replica"] == item.max_loras
        assert config["engine_kwargs"]["max_loras"] == item.max_loras
    models = json.loads(files["models.json"])["adapters"]
    assert [each["model"] for each in models["sql"]] == ["gpu-0:sql", "gpu-1:sql"]
    assert sum(each["share"] for each in models["sql"]) == pytest.approx(1.0)


def test_ray_serve_takes_the_configurations(toy_plan: Callable[..., Plan]) -> None:
    """Ray's own classes read the file, where Ray Serve LLM is installed."""
    llm = pytest.importorskip("ray.serve.llm", exc_type=ImportError)
    plan = toy_plan(["sql", "tone"], gpus=1)
    options = Options(sources={name: f"s3://loras/{name}" for name in ("sql", "tone")})
    document = yaml.safe_load(export_plan(plan, "ray", options)["serve.yaml"])
    for config in document["applications"][0]["args"]["llm_configs"]:
        llm.LLMConfig(**config)


def test_llm_d(plan: Plan, sources: dict[str, str]) -> None:
    """The endpoint picker's configuration is llm-d's, and each adapter reaches its own servers only."""
    if sources["sql"].startswith("s3"):
        pytest.skip("vLLM does not read buckets")
    files = export_plan(plan, "llm-d", Options(sources=sources, **ALL))
    values = yaml.safe_load(files["values.yaml"])
    conforms(values, "llm-d", "values.yaml")
    router = values["router"]
    config = yaml.safe_load(router["epp"]["pluginsCustomConfig"][router["epp"]["pluginsConfigFile"]])
    conforms(config, "llm-d", "EndpointPickerConfig")
    plugins = {each.get("name", each["type"]): each for each in config["plugins"]}
    for each in plugins.values():
        if "parameters" in each:
            conforms(each["parameters"], "llm-d", f"parameters/{each['type']}")
    pods = []
    for document in yaml.safe_load_all(files["servers.yaml"]):
        kubernetes_validate.validate(document, "1.31", strict=True)
        if document["kind"] == "Deployment":
            pods.append(document["spec"]["template"]["metadata"]["labels"])
    assert all(router["modelServers"]["matchLabels"].items() <= labels.items() for labels in pods)
    profiles = {each["name"]: each["plugins"] for each in config["schedulingProfiles"]}
    assert plugins["header-profile-handler"]["parameters"]["defaultProfile"] in profiles
    for index, name in enumerate(NAMES):
        (rule,) = plugins[profiles[name][0]["pluginRef"]]["parameters"]["matchExpressions"]
        reached = [k for k, labels in enumerate(pods) if labels[rule["key"]] in rule["values"]]
        assert reached == [k for k, item in enumerate(plan.bins) if index in item.adapters]
        shares = [item.shares[item.adapters.index(index)] for item in plan.bins if index in item.adapters]
        assert _drawn(profiles[name][1:], plugins, [pods[k] for k in reached]) == pytest.approx(shares, abs=1e-5)


def _drawn(used: list[dict[str, Any]], plugins: dict[str, Any], pods: list[dict[str, str]]) -> list[float]:
    """How often a profile draws each pod, as the plugins are documented: in proportion to its score."""
    if not used:
        return [1.0]
    *scorers, last = used
    assert plugins[last["pluginRef"]]["type"] == "weighted-random-picker"
    scores = [0.0] * len(pods)
    for each in scorers:
        plugin = plugins[each["pluginRef"]]
        assert plugin["type"] == "header-label-affinity-scorer"
        assert plugin["parameters"]["headerName"] == ":method"
        for k, labels in enumerate(pods):
            scores[k] += each["weight"] * (labels.get(plugin["parameters"]["labelKey"]) == "POST")
    return [score / sum(scores) for score in scores]


def test_sglang(plan: Plan, exported: Callable[[Plan, str], dict[str, str]]) -> None:
    """Every flag is one of SGLang's, with a value of its type, and each adapter is an entry of --lora-paths."""
    flags = table("sglang")[None, "flags"]
    entries = json.loads(exported(plan, "sglang")["args.json"])
    assert len(entries) == len(plan.bins)
    for entry, item in zip(entries, plan.bins, strict=True):
        command = entry["command"]
        assert command[:3] == ["python3", "-m", "sglang.launch_server"]
        at = command.index("--lora-paths")
        words, adapters = iter(command[3:at]), [json.loads(each) for each in command[at + 1 :]]
        given: dict[str, str] = {}
        for word in words:
            kind = flags[word.removeprefix("--")]
            given[word] = "" if kind == "flag" else next(words)
            if isinstance(kind, list):
                assert given[word] in kind
            elif kind in ("int", "float"):
                assert {"int": int, "float": float}[kind](given[word]) > 0
        assert given["--max-loras-per-batch"] == str(item.max_loras)
        assert given["--max-lora-rank"] == str(item.max_lora_rank)
        assert int(given["--max-loaded-loras"]) >= item.max_loras
        for each in adapters:
            conforms(each, "sglang", "lora-paths")
        assert {each["lora_name"] for each in adapters} == {plan.workload.names[i] for i in item.adapters}


def test_sglang_is_started_in_the_widths_that_were_simulated(plan: Plan) -> None:
    """An FP8 cache and weights that the engine quantises itself are flags, by SGLang's names."""
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", engine_name="sglang", quantization="fp8", kv_cache_dtype="fp8")
    bins = tuple(replace(each, profile=profile) for each in plan.bins)
    files = export_plan(replace(plan, bins=bins), "sglang")
    command = json.loads(files["args.json"])[0]["command"]
    assert command[command.index("--kv-cache-dtype") + 1] in table("sglang")[None, "flags"]["kv-cache-dtype"]
    assert command[command.index("--quantization") + 1] == "fp8"


def test_sglang_serves_what_is_asked(plan: Plan) -> None:
    """SGLang finds an adapter by BASE:ADAPTER alone; requests without one take a slot; no cache is left on."""
    first, second, *others = plan.workload.adapters
    adapters = (first, replace(second, rank=0), *others)
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", engine_name="sglang")
    engine = replace(profile.engine, prefix_caching=False, max_cpu_loras=1)
    profile = replace(profile, engine=engine)
    bins = tuple(replace(b, profile=profile, settings=replace(b.settings, max_loras=1)) for b in plan.bins)
    plan = replace(plan, workload=replace(plan.workload, adapters=adapters), bins=bins)
    for entry, item in zip(json.loads(export_plan(plan, "sglang")["args.json"]), bins, strict=True):
        given, base = entry["command"], 1 in item.adapters
        assert given[given.index("--max-loras-per-batch") + 1] == str(1 + base)
        assert given[given.index("--max-loaded-loras") + 1] == str(len(item.adapters) - base)
        assert "--disable-radix-cache" in given
    few = replace(plan, workload=replace(plan.workload, adapters=adapters[:2]))
    few = replace(few, bins=(replace(bins[0], adapters=(0, 1), shares=()),), evaluations=plan.evaluations[:1])
    (entry,) = json.loads(export_plan(few, "sglang")["args.json"])
    given = entry["command"]  # SGLang does not start with fewer loaded adapters than slots
    assert [given[given.index(f"--max-{key}") + 1] for key in ("loras-per-batch", "loaded-loras")] == ["2", "2"]
    for model in ("Qwen/Qwen3-8B", "/models/qwen:8b"):  # at the first colon SGLang looks for an adapter
        text = export_plan(plan, "litellm", Options(model=model))["litellm.yaml"]
        routes = yaml.safe_load(text)["model_list"]
        asked = {each["model_name"]: each["litellm_params"]["model"] for each in routes}
        parts = {name: text.removeprefix("hosted_vllm/").split(":", 1)[1:] for name, text in asked.items()}
        assert parts == {name: [name] if name != NAMES[1] else [] for name in NAMES}
        assert {text.split(":")[0] for text in asked.values()} == {f"hosted_vllm/{model.split(':')[0]}"}


@pytest.mark.parametrize("name", ["sglang", "litellm"])
def test_sglang_refuses_names_that_it_would_not_find(plan: Plan, name: str) -> None:
    """SGLang removes spaces at the ends of an adapter's name in a request; the base model is asked by its own name."""
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", engine_name="sglang")
    bins = tuple(replace(each, profile=profile) for each in plan.bins)
    first, *others = plan.workload.adapters
    for odd, rank, refused in (("sql ", 8, True), ("sql ", 0, False), ("s q l", 8, False)):
        fleet = replace(plan.workload, adapters=(replace(first, name=odd, rank=rank), *others))
        with pytest.raises(ValidationError, match=r"without spaces.*'sql '") if refused else nullcontext():
            export_plan(replace(plan, workload=fleet, bins=bins), name)


def test_the_dashboard(plan: Plan) -> None:
    """The dashboard has the fields of Grafana's schema, no two panels overlap, and ids differ."""
    dashboard = json.loads(export_plan(plan, "grafana")["dashboard.json"])
    conforms(dashboard, "grafana", "dashboard.json")
    cells = [
        (x, y)
        for panel in dashboard["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboard_of_sglang_asks_for_its_metrics(plan: Plan) -> None:
    """SGLang's servers have other names for what they measure; panels of vLLM's names would be empty."""
    profile = estimate_profile("Qwen/Qwen3-8B", "h200", engine_name="sglang")
    bins = tuple(replace(each, profile=profile) for each in plan.bins)
    text = export_plan(replace(plan, bins=bins), "grafana")["dashboard.json"]
    assert "vllm:" not in text
    for name in ("num_running_reqs", "num_queue_reqs", "token_usage", "time_to_first_token_seconds_sum"):
        assert f"sglang:{name}" in text


def test_the_tables_notice_a_wrong_field(plan: Plan) -> None:
    """A table that let everything pass would test nothing: unknown fields, wrong types and limits are errors."""
    options = Options(sources=PLACES["huggingface"], **ALL)
    adapter = next(yaml.safe_load_all(export_plan(plan, "aibrix", options)["model-adapters.yaml"]))["spec"]
    service = next(yaml.safe_load_all(export_plan(plan, "kserve", options)["services.yaml"]))["spec"]
    for spec, name, kind, api in (
        (adapter | {"replicas": 2}, "aibrix", "ModelAdapter", "model.aibrix.ai/v1alpha1"),
        (adapter | {"bucket": "x"}, "aibrix", "ModelAdapter", "model.aibrix.ai/v1alpha1"),
        (service | {"replicas": "1"}, "kserve", "LLMInferenceService", "serving.kserve.io/v1alpha2"),
        (service | {"loras": []}, "kserve", "LLMInferenceService", "serving.kserve.io/v1alpha2"),
    ):
        with pytest.raises(jsonschema.ValidationError):
            conforms(spec, name, kind, api)


def test_formats_say_which_versions_they_fit(root: Path) -> None:
    """A format of a stack that changes names the versions that it was checked against, in the documents too."""
    page = (root / "docs" / "how-to" / "export.md").read_text("utf-8")
    for name in ("vllm", "sglang", "k8s", "helm", "aibrix", "llm-d", "kserve", "ray", "dynamo", "grafana"):
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert f" {FORMATS[name].fits} |" in row
    page = (root / "docs" / "comparison.md").read_text("utf-8")
    rows = re.findall(r"^\| [A-Za-z -]+ ([0-9.]+(?: to [0-9.]+)?) \|.*\| `([\w-]+)`.*\|$", page, re.MULTILINE)
    assert {"vllm", "llm-d", "aibrix", "kserve", "dynamo", "sglang"} <= {name for _, name in rows}
    for said, name in rows:
        fits = FORMATS[name].fits
        assert fits is not None
        assert said.endswith(str(fits.last)), "the versions of the comparison are those of the exports"


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("aibrix", "0.4.1", "Expected AIBrix 0.5 to 0.8, .* got AIBrix 0.4.1"),
        ("aibrix", "1.0", "got AIBrix 1.0"),
        ("kserve", "v0.19.0", "Expected KServe 0.20, "),
        ("k8s", "1.30", "Kubernetes 1.31 and later"),
        ("aibrix", "latest", "Expected a version of AIBrix as 0.5, got 'latest'"),
        ("nginx", "1.27", "leave out --stack-version"),
    ],
)
def test_unknown_versions_of_a_stack_are_refused(plan: Plan, name: str, version: str, message: str) -> None:
    """A version that the format was not checked against is an input error with those that it was."""
    options = Options(sources=PLACES["huggingface"], **ALL)
    with pytest.raises(InputError, match=message):
        export_plan(plan, name, options, stack_version=version)


@pytest.mark.parametrize(("name", "version"), [("aibrix", "v0.7.3"), ("aibrix", "0.5"), ("k8s", "1.33.1")])
def test_known_versions_of_a_stack_are_taken(plan: Plan, name: str, version: str) -> None:
    """A patch release counts as its minor one."""
    options = Options(sources=PLACES["huggingface"], **ALL)
    assert export_plan(plan, name, options, stack_version=version) == export_plan(plan, name, options)
