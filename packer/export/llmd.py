"""llm-d router 0.10: the servers as one pool, and chart values whose endpoint picker keeps to the plan.

llm-d's own scorers send an adapter to any server with a free slot, also to one that was not started with it. Here
each adapter is a scheduling profile of its own: `header-profile-handler` takes the profile that the header
`X-Adapter` names (as in the nginx and Envoy exports), and a `label-selector-filter` leaves the adapter's servers.
A replicated adapter's servers are drawn by their planned shares: `weighted-random-picker` draws by score, and a
`header-label-affinity-scorer` for each server gives a constant one, that of its label against the header `:method`,
which every completion has as POST. Requests without the header run the profile `default`, for the base model.
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
        filtered = sets.setdefault(chosen, f"servers-{len(sets)}")
        profiles.append((quoting.header_key(name), filtered, shares))
    default = "default"  # of requests without the header: a name that no adapter has
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
    """The label of a server's pod that its constant score is read from, and the scorer's name."""
    return f"packer-share-{server}"
