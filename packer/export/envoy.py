"""Envoy: a route for each adapter by the header `x-adapter`, with weighted clusters for replicated adapters.

The file is a `RouteConfiguration` with the `clusters` it names (envoy.config.route.v3,
envoy.config.cluster.v3). The header holds what `packer.export.quoting.header_key` makes of the adapter's
name.
"""

from __future__ import annotations

from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Options, routes

_TOTAL_WEIGHT = 10_000


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`envoy.yaml`: static resources to merge into a bootstrap configuration."""
    found = {
        quoting.header_key(name): {server.name: weight for server, weight in weights(places)}
        for name, places in routes(servers).items()
    }
    return {"envoy.yaml": templates.render("envoy.yaml", routes=found, servers=servers)}


def weights(places: list[tuple[ExportedServer, float]]) -> list[tuple[ExportedServer, int]]:
    """The servers with whole weights in proportion to their shares, each at least 1, with the sum 10,000."""
    rounded = [max(1, round(share * _TOTAL_WEIGHT)) for _, share in places]
    rounded[rounded.index(max(rounded))] += _TOTAL_WEIGHT - sum(rounded)
    return [(server, weight) for (server, _), weight in zip(places, rounded, strict=True)]
