"""llm-d router 0.10: the servers as one pool, and chart values whose endpoint picker keeps to the plan.

llm-d's own scorers send an adapter to any server with a free slot, also to one that was not started with it. Here
each adapter is a scheduling profile of its own: `header-profile-handler` takes the profile that the header
`X-Adapter` names (as in the nginx and Envoy exports), and a `label-selector-filter` leaves the adapter's servers.
A replicated adapter's servers are drawn by their planned shares: `weighted-random-picker` draws by score, and a
`header-label-affinity-scorer` for each server gives a constant one, that of its label against the header `:method`,
which every completion has as POST. Requests without the header run the profile `default`, for the base model.
"""

from __future__ import annotations

from typing import Any

from packer.export import kubernetes, quoting
from packer.export.pods import check_pods
from packer.export.servers import Options, Server, routes

HEADER = "X-Adapter"
DEFAULT = "default"
_POOL = "llm-d.ai/inference-pool"
_SCORERS = (("queue-scorer", 2), ("kv-cache-utilization-scorer", 1))
_PICKER = "weighted-random-picker"


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`values.yaml` for the chart llm-d-router-gateway or -standalone, and `servers.yaml` for `kubectl apply`."""
    check_pods(servers, options)

    def labels(server: Server) -> dict[str, str]:
        return {_POOL: options.prefix, "llm-d.ai/engine-type": "vllm", _share(server): "POST"}

    config = quoting.yaml_text([_picker(servers)])
    values = {
        "router": {
            "modelServers": {
                "type": "vllm",
                "protocol": "http",
                "matchLabels": {_POOL: options.prefix},
                "targetPorts": [{"number": options.port}],
            },
            # Open, the gateway would send requests to servers without their adapter.
            "inferencePool": {"failureMode": "FailClose"},
            "epp": {
                # The profile handler and the scorer of labels are of the stability level Alpha.
                "flags": {"allow-experimental-plugins": True},
                "pluginsConfigFile": "packer.yaml",
                "pluginsCustomConfig": {"packer.yaml": config},
            },
        }
    }
    return {
        "values.yaml": quoting.yaml_text([values]),
        "servers.yaml": kubernetes.manifests(servers, options, labels),
    }


def _picker(servers: tuple[Server, ...]) -> dict[str, Any]:
    """The EndpointPickerConfig: one filter for each set of servers, one profile for each adapter."""
    table = {quoting.header_key(name): places for name, places in routes(servers).items()}
    sets: dict[tuple[str, ...], str] = {}
    for places in table.values():
        sets.setdefault(tuple(server.name for server, _ in places), f"servers-{len(sets)}")
    filters = [
        {
            "name": name,
            "type": "label-selector-filter",
            "parameters": {
                "matchExpressions": [
                    {"key": "app.kubernetes.io/instance", "operator": "In", "values": list(chosen)}
                ]
            },
        }
        for chosen, name in sets.items()
    ]
    shared = {server.name: server for places in table.values() if len(places) > 1 for server, _ in places}
    constants = [
        {
            "name": _share(server),
            "type": "header-label-affinity-scorer",
            "parameters": {"headerName": ":method", "labelKey": _share(server)},
        }
        for server in shared.values()
    ]
    handler = {
        "type": "header-profile-handler",
        "parameters": {"headerName": HEADER, "defaultProfile": _unused(table)},
    }
    scorers = [{"pluginRef": name, "weight": weight} for name, weight in _SCORERS]
    profiles = [{"name": _unused(table), "plugins": scorers}]
    for key, places in table.items():
        chosen = {"pluginRef": sets[tuple(server.name for server, _ in places)]}
        drawn: list[dict[str, Any]] = []
        if len(places) > 1:
            drawn = [{"pluginRef": _share(server), "weight": round(share, 6)} for server, share in places]
            drawn.append({"pluginRef": _PICKER})
        profiles.append({"name": key, "plugins": [chosen, *drawn]})
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [
            handler,
            *({"type": name} for name, _ in _SCORERS),
            *filters,
            *constants,
            *([{"type": _PICKER}] if constants else []),
        ],
        "schedulingProfiles": profiles,
    }


def _share(server: Server) -> str:
    """The label of a server's pod that its constant score is read from, and the scorer's name."""
    return f"packer-share-{server.name}"


def _unused(table: dict[str, Any]) -> str:
    """A name for the profile of requests without the header that no adapter has."""
    name = DEFAULT
    while name in table:
        name += "-profile"
    return name
