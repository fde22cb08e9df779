"""LiteLLM proxy: one deployment for each adapter on each server, weighted by its share (`simple-shuffle`).

LiteLLM takes `*` in a model's name for any text, after looking for the exact name: an adapter with `*` in
its name still reaches its server, and other names that fit the pattern are answered there with vLLM's "no
such model".
"""

from __future__ import annotations

from packer.export import quoting
from packer.export.envoy import weights
from packer.export.servers import Options, Server, routes


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`litellm.yaml`."""
    models = []
    for name, places in routes(servers).items():
        parts = weights([share for _, share in places])
        for (server, _), weight in zip(places, parts, strict=True):
            parameters = {
                "model": f"hosted_vllm/{name}",
                "api_base": f"http://{server.address}/v1",
                "weight": weight,
            }
            models.append({"model_name": name, "litellm_params": parameters})
    document = {"model_list": models, "router_settings": {"routing_strategy": "simple-shuffle"}}
    return {"litellm.yaml": quoting.yaml_text([document])}
