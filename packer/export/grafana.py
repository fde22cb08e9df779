"""A Grafana dashboard with packer's predictions and the servers' metrics, both from one Prometheus (the dashboard's
variable `datasource`). Variable `server_label`: the label by which Prometheus distinguishes servers."""

from __future__ import annotations

import json

from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Options


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`dashboard.json`, for import or provisioning."""
    dashboard = json.loads(templates.read("dashboard.json"))
    profiles = ", ".join(sorted({server.bin.profile.label for server in servers}))
    dashboard["uid"] = f"packer-{options.prefix}"[:40]
    dashboard["title"] = f"packer: {options.prefix}"
    dashboard["description"] = f"Predicted beside measured, {len(servers)} servers; profile {profiles}."
    return {"dashboard.json": quoting.json_text(dashboard, indent=2) + "\n"}
