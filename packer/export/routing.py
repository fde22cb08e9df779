"""Which server serves which adapter: JSON for own routers, and the nginx, Envoy and LiteLLM files."""

from __future__ import annotations

from packer.export import envoy, litellm, nginx, quoting
from packer.export.servers import ExportedServer, Options, routes

VERSION = 1


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`routing.json`, `nginx.conf`, `envoy.yaml` and `litellm.yaml`."""
    table = routes(servers)
    document = {
        "version": VERSION,
        "servers": {server.name: f"http://{server.address}" for server in servers},
        "profiles": {server.name: server.bin.profile.label for server in servers},
        "adapters": {
            name: [{"server": server.name, "share": round(share, 9)} for server, share in places]
            for name, places in table.items()
        },
    }
    files = {"routing.json": quoting.json_text(document, indent=2) + "\n"}
    for module in (nginx, envoy, litellm):
        files |= module.render(servers, options)
    return files
