"""llm-d router 0.10: the servers as one pool, and chart values whose endpoint picker follows the plan.

llm-d's own scorers send an adapter to any server with a free slot, even if it was not started with the adapter. In
this export each adapter has its own scheduling profile: `header-profile-handler` selects the profile that the header
`X-Adapter` names (as in the nginx and Envoy exports), and a `label-selector-filter` keeps only the adapter's servers.
Servers of a replicated adapter are drawn by their planned shares: `weighted-random-picker` draws by score, and a
`header-label-affinity-scorer` gives each server a constant score, because it compares the server's label with the
header `:method`, which is always POST. Requests without `X-Adapter` run the profile `default`, for the base model.
"""

from __future__ import annotations

from packer.export import kubernetes, quoting, templates
from packer.export.servers import ExportedServer, Options, routes


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`values.yaml` for the chart llm-d-router-gateway or -standalone, and `servers.yaml` for `kubectl apply`."""

    def labels(server: ExportedServer) -> dict[str, str]:
        pool = {"llm-d.ai/inference-pool": options.prefix, "llm-d.ai/engine-type": "vllm"}
        return {**pool, _share(server.name): "POST"}

    sets: dict[tuple[str, ...], str] = {}
    profiles = []
    for name, places in routes(servers).items():
        chosen = tuple(server.name for server, _ in places)
        shares = {_share(server.name): round(share, 6) for server, share in places if len(places) > 1}
        profiles.append((quoting.header_key(name), sets.setdefault(chosen, f"servers-{len(sets)}"), shares))
    default = "default"  # profile of requests without the header; no adapter has this name
    while default in {name for name, _, _ in profiles}:
        default += "-profile"
    shared = dict.fromkeys(scorer for _, _, shares in profiles for scorer in shares)
    return {
        "values.yaml": templates.render(
            "llmd-values.yaml", options=options, default=default, sets=sets, shared=shared, profiles=profiles
        ),
        "servers.yaml": kubernetes.manifests(servers, options, labels),
    }


def _share(server: str) -> str:
    """Name of a server's scorer, and of the pod label from which the scorer reads the constant score."""
    return f"packer-share-{server}"
