"""Docker Compose: one service per server, each with its own GPU (compose-spec, `deploy.resources`)."""

from __future__ import annotations

from packer.export import templates
from packer.export.servers import ExportedServer, Options, on_one_host


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`compose.yaml`; the adapters are in `./adapters` next to it."""
    text = templates.render("compose.yaml", servers=list(on_one_host(servers, options)), options=options)
    return {"compose.yaml": text}
