"""llm-d router 0.10: the servers as one pool, and chart values whose endpoint picker keeps to the plan.

llm-d's own scorers send an adapter to any server with a free slot, also to one that was not started with it. Here
each adapter is a scheduling profile of its own: `header-profile-handler` takes the profile that the header
`X-Adapter` names (as in the nginx and Envoy exports), and a `label-selector-filter` leaves the adapter's servers.
Among the servers of a replicated adapter the queue lengths decide: planned shares are not kept. Requests without the
header run the profile `default`, for the base model.
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


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`values.yaml` for the chart llm-d-router-gateway or -standalone, and `servers.yaml` for `kubectl apply`."""
    check_pods(servers, options)
    labels = {_POOL: options.prefix, "llm-d.ai/engine-type": "vllm"}
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
            "epp": {"pluginsConfigFile": "packer.yaml", "pluginsCustomConfig": {"packer.yaml": config}},
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
    handler = {
        "type": "header-profile-handler",
        "parameters": {"headerName": HEADER, "defaultProfile": _unused(table)},
    }
    scorers = [{"pluginRef": name, "weight": weight} for name, weight in _SCORERS]
    profiles = [{"name": _unused(table), "plugins": scorers}]
    for key, places in table.items():
        chosen = {"pluginRef": sets[tuple(server.name for server, _ in places)]}
        profiles.append({"name": key, "plugins": [chosen, *scorers] if len(places) > 1 else [chosen]})
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": [handler, *({"type": name} for name, _ in _SCORERS), *filters],
        "schedulingProfiles": profiles,
    }


def _unused(table: dict[str, Any]) -> str:
    """A name for the profile of requests without the header that no adapter has."""
    name = DEFAULT
    while name in table:
        name += "-profile"
    return name
