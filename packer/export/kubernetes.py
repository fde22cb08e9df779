"""Kubernetes: a ConfigMap with vLLM's settings, a Deployment and a Service for each server; checks of pods' needs.

vLLM reads the settings from a file (`vllm serve --config`), not from the command line, because
Kubernetes expands `$(NAME)` in the arguments of a container.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from markupsafe import Markup

from packer.errors import IncompatibleError, ValidationError, shown
from packer.export import templates
from packer.export.nodes import short_name
from packer.export.servers import ExportedServer, Options
from packer.export.sources import parsed

_MAX_CONFIG_BYTES = 1_000_000  # Largest settings file of a server: a ConfigMap holds at most 1 MiB.


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`packer.yaml`, for `kubectl apply -f`."""
    return {"packer.yaml": manifests(servers, options)}


def manifests(
    servers: tuple[ExportedServer, ...], options: Options,
    extra_labels: Callable[[ExportedServer], dict[str, str]] = lambda _server: {}, *, with_adapters: bool = True,
) -> str:  # fmt: skip
    """ConfigMap, Deployment and Service of every server; `extra_labels`: further labels of a server's Deployment and
    its pod."""
    found = []
    for server in servers:
        settings = {"model": server.model, "port": server.port, **server.served_names, **server.settings()}
        modules = server.lora_modules() if with_adapters else []
        text = templates.render("vllm.yaml", settings=settings, modules=modules)
        if len(text) > _MAX_CONFIG_BYTES:
            rule = f"Expected the settings of a server to fit a ConfigMap (1 MiB), got {len(text):,} bytes for"
            raise ValidationError(f"{rule} {server.name}: name the adapters or their sources shorter.")
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        found.append((server, Markup(text), digest, server.labels | extra_labels(server)))
    return templates.render("servers.yaml", servers=found, options=options)


GATED = ("meta-llama/", "google/gemma")  # Prefixes of repositories that Hugging Face serves only with a token.


def check_pods(servers: tuple[ExportedServer, ...], options: Options) -> None:
    """Raise `IncompatibleError` if an adapter's path is on no volume, a gated model has no token, or no node label is
    known for one of several kinds of GPU. The message lists everything that is missing. Otherwise the pod would be
    scheduled, take a GPU and fail."""
    paths = [
        (item.name, path)
        for server in servers
        for item in server.modules
        for kind, path in (parsed(item.source),)
        if kind == "path"
    ]
    missing = []
    if paths and not options.adapters_claim:
        name, path = paths[0]
        missing.append(
            f"Adapter {shown(name)} is the path {shown(path)}, and no volume is mounted there: give "
            "--adapters-claim, the volume claim that holds the adapters, or --sources with repositories."
        )
    folder = options.adapters_dir.rstrip("/") + "/"
    for name, path in paths if options.adapters_claim else ():
        if not path.startswith(folder):
            said = f"Expected the path of adapter {shown(name)} to lie below {folder}, where the claim"
            missing.append(f"{said} {options.adapters_claim} is mounted (--adapters-dir), got {shown(path)}.")
            break
    gated = sorted({server.model for server in servers if server.model.startswith(GATED)})
    if gated and not options.token_secret:
        said = f"{gated[0]} is downloaded only with a Hugging Face token: give --token-secret,"
        missing.append(f"{said} the Secret whose key 'token' holds it, or --model with a copy that needs none.")
    kinds = {server.bin.profile.gpu.name: server for server in servers}
    for gpu, server in kinds.items() if len(kinds) > 1 else ():
        if not server.nodes:
            rule = f"The plan has {len(kinds)} kinds of GPU, and no node label is known for {shown(gpu)}:"
            missing.append(f"{rule} give --node-label {short_name(gpu)}:KEY=VALUE.")
    if missing:
        raise IncompatibleError(" ".join(missing))
