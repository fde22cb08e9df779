"""LiteLLM proxy: one deployment for each adapter on each server, weighted by its share (`simple-shuffle`).

LiteLLM takes `*` in a model's name for any text, after looking for the exact name: an adapter with `*` in
its name still reaches its server, and other names that fit the pattern are answered there with vLLM's "no
such model".
"""

from __future__ import annotations

from packer.export import templates
from packer.export.envoy import weights
from packer.export.servers import ExportedServer, Options, routes


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`litellm.yaml`."""
    deployments = [
        (name, server, weight)
        for name, places in routes(servers).items()
        for server, weight in weights(places)
    ]
    return {"litellm.yaml": templates.render("litellm.yaml", deployments=deployments)}
