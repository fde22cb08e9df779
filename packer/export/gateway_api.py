"""Gateway API: HTTPRoutes that send an adapter's requests to the Service of its server (gateway.networking.k8s.io/v1).

Like the nginx and Envoy files they match the header `X-Adapter`. A route has at most 16 rules (gateway-api v1.2,
apis/v1/httproute_types.go), so there is one for each 16 adapters. The Gateway is called `packer` and the Services as
the servers.
"""

from __future__ import annotations

from packer.export import quoting, templates
from packer.export.envoy import weights
from packer.export.servers import ExportedServer, Options, routes

MOST_RULES = 16


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`httproutes.yaml`, for `kubectl apply -f`."""
    rules = [
        (quoting.header_key(name), [(server, weight) for server, weight in weights(places)])
        for name, places in routes(servers).items()
    ]
    groups = [rules[k : k + MOST_RULES] for k in range(0, len(rules), MOST_RULES)]
    return {"httproutes.yaml": templates.render("httproutes.yaml", groups=groups, options=options)}
