"""A Grafana dashboard with packer's predictions and the servers' metrics, both from one Prometheus (the dashboard's
variable `datasource`). Variable `server_label`: the label by which Prometheus distinguishes servers."""

from __future__ import annotations

import json
import re

from packer.export import quoting, templates
from packer.export.servers import ExportedServer, Options

_SGLANG = {
    "num_requests_running": "num_running_reqs",
    "num_requests_waiting": "num_queue_reqs",
    "kv_cache_usage_perc": "token_usage",
    "num_gpu_loaded_lora_adapters": "lora_pool_slots_used",
}
"""vLLM's metrics that SGLang 0.5 has under another name (srt/metrics/collector.py); the others differ by the prefix."""


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`dashboard.json`, for import or provisioning."""
    text = templates.read("dashboard.json")
    if {server.bin.profile.engine.name.lower() for server in servers} == {"sglang"}:
        text = re.sub(r"vllm:([a-z_]+)", lambda found: f"sglang:{_SGLANG.get(found[1], found[1])}", text)
    dashboard = json.loads(text)
    profiles = ", ".join(sorted({server.bin.profile.label for server in servers}))
    dashboard["uid"] = f"packer-{options.prefix}"[:40]
    dashboard["title"] = f"packer: {options.prefix}"
    dashboard["description"] = f"Predicted beside measured, {len(servers)} servers; profile {profiles}."
    return {"dashboard.json": quoting.json_text(dashboard, indent=2) + "\n"}
