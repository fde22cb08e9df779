"""Kubernetes: a ConfigMap with vLLM's settings, a Deployment and a Service for each server.

The settings are in a file that vLLM reads (`vllm serve --config`), not on the command line, because
Kubernetes expands `$(NAME)` in the arguments of a container.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from markupsafe import Markup

from packer.errors import ValidationError
from packer.export import templates
from packer.export.servers import ExportedServer, Options

_MAX_CONFIG_BYTES = 1_000_000
"""A ConfigMap holds at most 1 MiB."""


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`packer.yaml`, for `kubectl apply -f`."""
    return {"packer.yaml": manifests(servers, options)}


def manifests(
    servers: tuple[ExportedServer, ...],
    options: Options,
    extra_labels: Callable[[ExportedServer], dict[str, str]] = lambda _server: {},
    *,
    with_adapters: bool = True,
) -> str:
    """ConfigMap, Deployment and Service of every server; `extra_labels`: further labels of its pod."""
    found = []
    for server in servers:
        settings = {"model": server.model, "port": server.port, **server.served_names, **server.settings()}
        modules = server.lora_modules() if with_adapters else []
        text = templates.render("vllm.yaml", settings=settings, modules=modules)
        if len(text) > _MAX_CONFIG_BYTES:
            raise ValidationError(
                f"Expected the settings of a server to fit a ConfigMap (1 MiB), got {len(text):,} bytes for "
                f"{server.name}: name the adapters or their sources shorter."
            )
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append((server, Markup(text), digest, extra_labels(server)))
    return templates.render("servers.yaml", servers=found, options=options)
