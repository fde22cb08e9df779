"""NVIDIA Dynamo 1.3 and 1.4: a graph with a front end and a worker for each server, and DynamoModels.

nvidia.com/v1alpha1. The operator loads a DynamoModel on every pod whose `modelRef` is its `baseModelName`; so
each worker has a `modelRef` of its own, the server's name, and an adapter is one DynamoModel for each of its
servers. Dynamo's router splits a replicated adapter by load: the planned share is in the annotation
`packer/share`.
"""

from __future__ import annotations

from typing import Any

from packer.errors import IncompatibleError
from packer.export import kubernetes, quoting
from packer.export.pods import check_pods
from packer.export.servers import Module, Options, Server
from packer.export.sources import kind_of, refused, without_scheme

IMAGE = "nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1"
_MOST_SERVICES = 25
"""Of a graph, the front end included."""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`graph.yaml` and `dynamo-models.yaml`, for `kubectl apply -f`."""
    check_pods(servers, options)
    if len(servers) + 1 > _MOST_SERVICES:
        raise IncompatibleError(
            f"Expected at most {_MOST_SERVICES - 1} servers, the most that one DynamoGraphDeployment holds, got "
            f"{len(servers)}."
        )
    image = options.image or IMAGE
    front = {
        "componentType": "frontend",
        "replicas": 1,
        "extraPodSpec": {"mainContainer": {"image": image}},
    }
    services = {"Frontend": front} | {server.name: _worker(server, image, options) for server in servers}
    spec: dict[str, Any] = {"backendFramework": "vllm", "services": services}
    if options.adapters_claim:
        spec["pvcs"] = [{"create": False, "name": options.adapters_claim}]
    graph = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoGraphDeployment",
        "metadata": kubernetes.metadata(options.prefix, {"app.kubernetes.io/managed-by": "packer"}, options),
        "spec": spec,
    }
    models = [_model(item, server, options) for server in servers for item in server.modules]
    return {"graph.yaml": quoting.yaml_text([graph]), "dynamo-models.yaml": quoting.yaml_text(models)}


def _worker(server: Server, image: str, options: Options) -> dict[str, Any]:
    arguments = ["--model", server.model]
    for name, value in server.settings().items():
        arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    env: list[dict[str, Any]] = [
        {"name": "DYN_LORA_ENABLED", "value": "true"},
        {"name": "DYN_LORA_PATH", "value": "/tmp/dynamo_loras"},
        {"name": "DYN_SYSTEM_ENABLED", "value": "true"},
        {"name": "DYN_SYSTEM_PORT", "value": "9090"},
    ]
    if options.token_secret:
        env.append(kubernetes.token(options.token_secret))
    worker: dict[str, Any] = {
        "componentType": "worker",
        "subComponentType": "decode",
        "replicas": 1,
        "resources": {"limits": {"gpu": str(server.gpus)}},
        "modelRef": {"name": server.name},
        "extraPodSpec": {
            "mainContainer": {
                "image": image,
                "env": env,
                "command": ["python3", "-m", "dynamo.vllm"],
                "args": [word.replace("$", "$$") for word in arguments],  # Kubernetes expands $(NAME)
            }
        },
    }
    if options.adapters_claim:
        worker["volumeMounts"] = [{"name": options.adapters_claim, "mountPoint": options.adapters_dir}]
    return worker


def _model(item: Module, server: Server, options: Options) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "packer"}
    about = kubernetes.metadata(quoting.dns_name(f"{server.name}.{item.name}"), labels, options)
    if item.share < 1.0:
        about["annotations"] = {"packer/share": str(round(item.share, 6))}
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "DynamoModel",
        "metadata": about,
        "spec": {
            "modelName": item.name,
            "baseModelName": server.name,
            "modelType": "lora",
            "source": {"uri": _uri(item)},
        },
    }


def _uri(item: Module) -> str:
    kind, rest = kind_of(item.source), without_scheme(item.source)
    if kind == "huggingface":
        return f"hf://{rest}"
    if kind == "s3":
        return item.source
    if kind == "path" and rest.startswith("/"):
        return f"file://{rest}"
    raise refused(item.name, item.source, "an absolute path, a Hugging Face repository or s3://")
