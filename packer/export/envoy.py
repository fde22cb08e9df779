"""Envoy: a route for each adapter by the header `x-adapter`, with weighted clusters for replicated adapters.

The file is a `RouteConfiguration` with the `clusters` it names (envoy.config.route.v3,
envoy.config.cluster.v3). The header holds what `packer.export.quoting.header_key` makes of the adapter's
name.
"""

from __future__ import annotations

from typing import Any

from packer.export import quoting
from packer.export.servers import Options, Server, routes

_TOTAL_WEIGHT = 10_000


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`envoy.yaml`: static resources to merge into a bootstrap configuration."""
    found = [_route(name, places) for name, places in routes(servers).items()]
    configuration = {
        "name": "packer",
        "virtual_hosts": [{"name": "adapters", "domains": ["*"], "routes": found}],
    }
    document = {"route_config": configuration, "clusters": [_cluster(server) for server in servers]}
    return {"envoy.yaml": quoting.yaml_text([document])}


def weights(shares: list[float]) -> list[int]:
    """Whole weights in proportion to the shares, each at least 1, with the sum 10,000."""
    rounded = [max(1, round(share * _TOTAL_WEIGHT)) for share in shares]
    rounded[rounded.index(max(rounded))] += _TOTAL_WEIGHT - sum(rounded)
    return rounded


def _route(name: str, places: list[tuple[Server, float]]) -> dict[str, Any]:
    action: dict[str, Any] = {"cluster": places[0][0].name}
    if len(places) > 1:
        parts = weights([share for _, share in places])
        clusters = [
            {"name": server.name, "weight": part} for (server, _), part in zip(places, parts, strict=True)
        ]
        action = {"weighted_clusters": {"clusters": clusters}}
    header = {"name": "x-adapter", "string_match": {"exact": quoting.header_key(name)}}
    return {"match": {"prefix": "/", "headers": [header]}, "route": {**action, "timeout": "3600s"}}


def _cluster(server: Server) -> dict[str, Any]:
    host, _, port = server.address.rpartition(":")
    address = {"socket_address": {"address": host, "port_value": int(port)}}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address}}]}]
    return {
        "name": server.name,
        "type": "STRICT_DNS",
        "connect_timeout": "5s",
        "load_assignment": {"cluster_name": server.name, "endpoints": endpoints},
    }
