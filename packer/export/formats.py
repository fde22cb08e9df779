"""The export formats by name. Each is one module with `render(servers, options) -> {file name: text}`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from packer.errors import UnknownNameError

if TYPE_CHECKING:
    from packer.export.servers import Options, Server
    from packer.plan import Plan

    Render = Callable[[tuple[Server, ...], Options], dict[str, str]]


@dataclass(frozen=True, slots=True)
class Format:
    """A format: where its `render` is, and what it is for."""

    module: str
    summary: str


FORMATS = {
    "vllm": Format("packer.export.vllm", "Start commands: a shell script and JSON arguments."),
    "compose": Format("packer.export.compose", "Docker Compose: one service per GPU."),
    "k8s": Format("packer.export.kubernetes", "Kubernetes: Deployment, Service and ConfigMap per GPU."),
    "helm": Format("packer.export.helm", "vLLM production stack: chart values and LoraAdapter resources."),
    "aibrix": Format("packer.export.aibrix", "AIBrix: servers and ModelAdapter resources."),
    "routing": Format("packer.export.routing", "Adapter to server: JSON, nginx, Envoy and LiteLLM."),
    "nginx": Format("packer.export.nginx", "Adapter to server: an nginx map."),
    "envoy": Format("packer.export.envoy", "Adapter to server: an Envoy route configuration."),
    "litellm": Format("packer.export.litellm", "Adapter to server: a LiteLLM proxy configuration."),
}


def export_plan(plan: Plan, format_name: str, options: Options | None = None) -> dict[str, str]:
    """Files of a format, by name; the first one is the main one. Those made with an estimated profile are marked.

    Raises
    ------
    UnknownNameError
        No format has that name.
    IncompatibleError
        The plan is infeasible, or the format can't read the source of an adapter.
    ValidationError
        An adapter has no source though a table was given, or a server gets no valid port or address.
    """
    from packer.export.provenance import marked
    from packer.export.servers import Options, servers

    if format_name not in FORMATS:
        raise UnknownNameError("export format", format_name, FORMATS)
    chosen = options or Options()
    render: Render = import_module(FORMATS[format_name].module).render
    return marked(render(servers(plan, chosen), chosen), plan)
