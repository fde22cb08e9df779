"""Kubernetes: a ConfigMap with vLLM's settings, a Deployment and a Service for each server.

The settings are in a file that vLLM reads (`vllm serve --config`), not on the command line, because
Kubernetes expands `$(NAME)` in the arguments of a container.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from packer.errors import ValidationError
from packer.export import quoting
from packer.export.pods import check_pods
from packer.export.servers import Options, Server

_CONFIG = "/etc/packer/vllm.yaml"
_MAX_CONFIG_BYTES = 1_000_000
"""A ConfigMap holds at most 1 MiB."""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`packer.yaml`, for `kubectl apply -f`."""
    check_pods(servers, options)
    return {"packer.yaml": manifests(servers, options)}


def manifests(
    servers: tuple[Server, ...],
    options: Options,
    extra_labels: Callable[[Server], dict[str, str]] = lambda _server: {},
) -> str:
    """ConfigMap, Deployment and Service of every server; `extra_labels`: further labels of its pod."""
    documents: list[object] = []
    for server in servers:
        config = config_map(server, options)
        pod = deployment(server, options, config, extra_labels(server))
        documents += [config, pod, service(server, options)]
    return quoting.yaml_text(documents)


def metadata(name: str, labels: dict[str, str], options: Options) -> dict[str, Any]:
    """Name, namespace and labels of a resource."""
    place = {"namespace": options.namespace} if options.namespace else {}
    return {"name": name, **place, "labels": labels}


def server_labels(server: Server) -> dict[str, str]:
    """Labels of a server; unique to it among the plan's."""
    return {
        "app.kubernetes.io/name": "vllm",
        "app.kubernetes.io/managed-by": "packer",
        "app.kubernetes.io/instance": server.name,
    }


def config_map(server: Server, options: Options, *, with_adapters: bool = True) -> dict[str, Any]:
    """vLLM's settings as the file that `vllm serve --config` reads."""
    settings: dict[str, Any] = {"model": server.model, "port": server.port, **server.settings()}
    if with_adapters:
        settings["lora-modules"] = server.lora_modules()
    text = quoting.yaml_text([settings])
    if len(text) > _MAX_CONFIG_BYTES:
        raise ValidationError(
            f"Expected the settings of a server to fit a ConfigMap (1 MiB), got {len(text):,} bytes for "
            f"{server.name}: name the adapters or their sources shorter."
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(server.name, server_labels(server), options),
        "data": {"vllm.yaml": text},
    }


def deployment(
    server: Server, options: Options, config: dict[str, Any], extra_labels: dict[str, str] | None = None
) -> dict[str, Any]:
    """One pod of vLLM that reads `config`."""
    labels = server_labels(server)
    digest = hashlib.sha256(config["data"]["vllm.yaml"].encode()).hexdigest()[:16]
    about = metadata(server.name, labels, options)
    about["annotations"] = {"packer/profile": server.bin.profile.label}
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": server.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    if options.adapters_claim:
        volumes.append(adapters_volume(options))
    pod = {
        "metadata": {"labels": labels | (extra_labels or {}), "annotations": {"packer/config": digest}},
        "spec": {"containers": [container(server, options)], "volumes": volumes},
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": about,
        "spec": {
            "replicas": 1,
            # One GPU can't hold the old and the new server at once.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": pod,
        },
    }


def container(server: Server, options: Options) -> dict[str, Any]:
    """The container of vLLM."""
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": "/etc/packer", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if options.adapters_claim:
        mounts.append(adapters_mount(options))
    probe = {"httpGet": {"path": "/health", "port": "http"}}
    found: dict[str, Any] = {
        "name": "vllm",
        "image": server.image,
        "command": ["vllm", "serve", "--config", _CONFIG],
        "env": [{"name": "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "value": "True"}],
        "ports": [{"name": "http", "containerPort": server.port}],
        "resources": {"limits": {"nvidia.com/gpu": str(server.gpus)}},
        "volumeMounts": mounts,
        "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": 120},
        "readinessProbe": {**probe, "periodSeconds": 5},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
    }
    if options.token_secret:
        found["env"].append(token(options.token_secret))
    return found


def token(secret: str) -> dict[str, Any]:
    """The environment variable with the Hugging Face token."""
    return {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": secret, "key": "token"}}}


def adapters_volume(options: Options) -> dict[str, Any]:
    """The volume of the claim with the adapters."""
    claim = {"claimName": options.adapters_claim, "readOnly": True}
    return {"name": "adapters", "persistentVolumeClaim": claim}


def adapters_mount(options: Options) -> dict[str, Any]:
    """Where a container finds that volume."""
    return {"name": "adapters", "mountPath": options.adapters_dir, "readOnly": True}


def service(server: Server, options: Options) -> dict[str, Any]:
    """The address of a server inside the cluster: its name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(server.name, server_labels(server), options),
        "spec": {
            "selector": server_labels(server),
            "ports": [{"name": "http", "port": server.port, "targetPort": "http"}],
        },
    }
