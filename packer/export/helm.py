"""vLLM production stack: chart values with a `modelSpec` per server, and a LoraAdapter per adapter there.

The operator puts an adapter on the pods of its `baseModel`, which is the name of a `modelSpec`; so each
server gets a `modelSpec` of its own. Resources: production-stack.vllm.ai/v1alpha1 and chart 0.1.12. The
chart's router looks an adapter's servers up by itself and has no shares: the annotation `packer/share` has
the planned share, and where shares must hold, route with one of the routing formats.
"""

from __future__ import annotations

from typing import Any

from packer.export import quoting
from packer.export.kubernetes import adapters_mount, adapters_volume
from packer.export.pods import check_pods
from packer.export.servers import Module, Options, Server
from packer.export.sources import kind_of, refused, without_scheme

_RUNTIME_UPDATES = {"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}
_TYPES = {"path": "local", "huggingface": "huggingface", "s3": "s3", "http": "http"}
"""What a LoraAdapter calls the kinds of sources."""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`values.yaml` for `helm install`, and `lora-adapters.yaml` for `kubectl apply`."""
    check_pods(servers, options)
    specs = [_model_spec(server, options) for server in servers]
    values = {
        "servingEngineSpec": {"modelSpec": specs},
        "loraController": {"enableLoraController": True},
    }
    adapters = [_lora_adapter(item, server, options) for server in servers for item in server.modules]
    return {"values.yaml": quoting.yaml_text([values]), "lora-adapters.yaml": quoting.yaml_text(adapters)}


def _model_spec(server: Server, options: Options) -> dict[str, Any]:
    engine = server.bin.profile.engine
    repository, _, tag = server.image.rpartition(":")
    if not repository or "/" in tag:  # no tag: what follows the last colon is a registry's port
        repository, tag = server.image, "latest"
    said = ("max-model-len", "dtype", "tensor-parallel-size", "enable-lora")  # by other keys
    spec: dict[str, Any] = {
        "name": server.name,
        "repository": repository,
        "tag": tag,
        "modelURL": server.model,
        "replicaCount": 1,
        "requestCPU": 8,
        "requestMemory": "32Gi",
        "requestGPU": server.gpus,
        "enableLoRA": True,
        "vllmConfig": {
            "maxModelLen": engine.max_model_len,
            "dtype": engine.dtype,
            "tensorParallelSize": engine.tensor_parallel_size,
            "extraArgs": [
                f"--{name}={value}" for name, value in server.settings().items() if name not in said
            ],
        },
        "env": [dict(_RUNTIME_UPDATES)],
    }
    if options.adapters_claim:
        spec["extraVolumes"] = [adapters_volume(options)]
        spec["extraVolumeMounts"] = [adapters_mount(options)]
    if options.token_secret:
        spec["hf_token"] = {"secretName": options.token_secret, "secretKey": "token"}
    return spec


def _lora_adapter(item: Module, server: Server, options: Options) -> dict[str, Any]:
    name = quoting.dns_name(f"{server.name}.{item.name}")
    metadata: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/managed-by": "packer"}}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if item.share < 1.0:
        metadata["annotations"] = {"packer/share": str(round(item.share, 6))}
    return {
        "apiVersion": "production-stack.vllm.ai/v1alpha1",
        "kind": "LoraAdapter",
        "metadata": metadata,
        "spec": {
            "baseModel": server.name,
            "adapterSource": _adapter_source(item),
            "loraAdapterDeploymentConfig": {"algorithm": "default", "replicas": 1},
        },
    }


def _adapter_source(item: Module) -> dict[str, str]:
    """Where the operator finds an adapter."""
    kind, rest = kind_of(item.source), without_scheme(item.source)
    if kind not in _TYPES:
        expected = "a path, a Hugging Face repository, s3:// or https:// (a LoraAdapter takes nothing else)"
        raise refused(item.name, item.source, expected)
    source = {"type": _TYPES[kind], "adapterName": item.name}
    if kind == "huggingface":
        return {**source, "repository": rest}
    return {**source, "adapterPath": rest if kind == "path" else item.source}
