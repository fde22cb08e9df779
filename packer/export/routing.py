"""Routes from adapters to servers: JSON for custom routers, nginx, Envoy, the Gateway API and LiteLLM. nginx and Envoy
read the adapter's name in the header `X-Adapter` (`packer.export.quoting.header_key`)."""

from __future__ import annotations

from collections import Counter

from packer.errors import IncompatibleError, shown
from packer.export import quoting, templates
from packer.export.servers import MANAGED, ExportedServer, Options, routes

VERSION = 1
MOST_RULES = 16  # Most rules of an HTTPRoute, and backends of a rule (gateway-api v1.2 to v1.6, httproute_types.go).
_TOTAL_WEIGHT = 10_000
Servers = tuple[ExportedServer, ...]


def routing(servers: Servers, options: Options) -> dict[str, str]:
    """`routing.json`, `nginx.conf`, `envoy.yaml` and `litellm.yaml`."""
    document = {
        "version": VERSION,
        "servers": {server.name: f"http://{server.address}" for server in servers},
        "profiles": {server.name: server.bin.profile.label for server in servers},
        "adapters": {
            name: [{"server": server.name, "share": round(share, 9)} for server, share in places]
            for name, places in routes(servers).items()
        },
    }
    files = {"routing.json": quoting.json_text(document, indent=2) + "\n"}
    for render in (nginx, envoy, litellm):
        files |= render(servers, options)
    return files


def nginx(servers: Servers, options: Options) -> dict[str, str]:
    """`nginx.conf`, for inclusion in the block `http`: a map from the header to the server. `split_clients` distributes
    the requests of replicated adapters; requests with the same header `X-Session-Id` go to the same replica. nginx
    ignores case in the values of a map, so names that differ only by case become case-sensitive regular expressions."""
    table = {quoting.header_key(name): places for name, places in routes(servers).items()}
    folded = Counter(key.lower() for key in table)
    splits, rows = [], []
    for number, (key, places) in enumerate(table.items()):
        target = places[0][0].name
        if len(places) > 1:
            target = f"$packer_split_{number}"
            parts = [(f"{weight / 100:.2f}%", server.name) for server, weight in weights(places)]
            splits.append((target, [*parts[:-1], ("*", parts[-1][1])]))
        rows.append((quoting.nginx_map_key(key, exact_case=folded[key.lower()] > 1), target))
    # Buckets of both hash tables must hold the longest key; nginx itself rounds their size up to the cache line.
    bucket = 1 << max(6, (max(map(len, table)) + 64).bit_length())
    most = 1 << max(11, (4 * len(table)).bit_length())
    text = templates.render("nginx.conf", servers=servers, splits=splits, rows=rows, bucket=bucket, most=most)
    return {"nginx.conf": text}


def envoy(servers: Servers, options: Options) -> dict[str, str]:
    """`envoy.yaml`: static resources to merge into a bootstrap configuration. A `RouteConfiguration` and its `clusters`
    (envoy.config.route.v3, envoy.config.cluster.v3): one route per adapter, with weighted clusters for replicated
    adapters."""
    table = _weighted(servers).items()
    found = {key: {server.name: weight for server, weight in places} for key, places in table}
    return {"envoy.yaml": templates.render("envoy.yaml", routes=found, servers=servers)}


def gateway_api(servers: Servers, options: Options) -> dict[str, str]:
    """`httproutes.yaml`, for `kubectl apply -f`: HTTPRoutes (gateway.networking.k8s.io/v1) to the servers' Services.
    Each HTTPRoute covers up to `MOST_RULES` adapters. The Gateway is named `packer`, each Service like its server.
    Raises `IncompatibleError`: an adapter is on more servers than that."""
    rules = list(_weighted(servers).items())
    most, key = max((len(places), key) for key, places in rules)
    if most > MOST_RULES:
        rule = f"Expected an adapter on at most {MOST_RULES} servers, all that a rule of an HTTPRoute takes"
        raise IncompatibleError(f"{rule}, got {shown(key)} on {most}: use nginx, envoy or litellm.")
    groups = [rules[k : k + MOST_RULES] for k in range(0, len(rules), MOST_RULES)]
    return {"httproutes.yaml": templates.render("httproutes.yaml", groups=groups, options=options, managed=MANAGED)}


def litellm(servers: Servers, options: Options) -> dict[str, str]:
    """`litellm.yaml`: a deployment for each adapter on each server, weighted by its share (`simple-shuffle`). LiteLLM
    looks for the exact name of a model first, then treats `*` in names as a wildcard. An adapter with `*` in its name
    thus reaches its server; for other names that match the pattern, this server responds "no such model"."""
    deployments = [(name, *each) for name, places in routes(servers).items() for each in weights(places)]
    return {"litellm.yaml": templates.render("litellm.yaml", deployments=deployments)}


def _weighted(servers: Servers) -> dict[str, list[tuple[ExportedServer, int]]]:
    """Header value of an adapter → its servers with their weights."""
    return {quoting.header_key(name): weights(places) for name, places in routes(servers).items()}


def weights(places: list[tuple[ExportedServer, float]]) -> list[tuple[ExportedServer, int]]:
    """The servers with integer weights in proportion to their shares; each is at least 1, and their sum is 10,000."""
    rounded = [max(1, round(share * _TOTAL_WEIGHT)) for _, share in places]
    rounded[rounded.index(max(rounded))] += _TOTAL_WEIGHT - sum(rounded)
    return [(server, weight) for (server, _), weight in zip(places, rounded, strict=True)]
