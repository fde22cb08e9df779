"""A Grafana dashboard: what packer predicts beside what the servers report.

Predicted figures come from `packer evaluate PLAN --url … --every 300 --listen 0.0.0.0:9877`, measured ones
from vLLM's own metrics; both are read from one Prometheus, the dashboard's variable `datasource`. The variable
`server_label` is the label by which Prometheus tells servers apart: `service` behind a ServiceMonitor, else
`instance`.
"""

from __future__ import annotations

from typing import Any

from packer.export import quoting
from packer.export.servers import Options, Server

SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_BY = "sum by ($server_label)"
_WINDOW = "[$__rate_interval]"


def _mean(*histograms: str) -> str:
    """Mean of a histogram in ms; the later names are those of other versions of vLLM."""
    found = [
        f"{_BY} (rate({name}_sum{_WINDOW})) / {_BY} (rate({name}_count{_WINDOW}))" for name in histograms
    ]
    return f"1000 * ({' or '.join(found)})"


_TOKENS = (
    f"{_BY} (rate(vllm:prompt_tokens_total{_WINDOW})) + {_BY} (rate(vllm:generation_tokens_total{_WINDOW}))"
)
_PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    (
        "Throughput",
        "tok/s",
        (("predicted {{server}}", "packer_server_predicted_throughput_tok_s"), ("measured", _TOKENS)),
    ),
    (
        "Mean TTFT",
        "ms",
        (
            ("predicted {{server}}", "packer_server_predicted_ttft_ms"),
            ("measured", _mean("vllm:time_to_first_token_seconds")),
        ),
    ),
    (
        "Mean ITL",
        "ms",
        (
            ("predicted {{server}}", "packer_server_predicted_itl_ms"),
            (
                "measured",
                _mean("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            ),
        ),
    ),
    (
        "Headroom (growth of every rate until a server breaks)",
        "x",
        (("{{server}}", "packer_server_headroom"),),
    ),
    (
        "Offered load of the fleet",
        "tok/s",
        (("{{kind}}", "packer_plan_offered_tok_s"),),
    ),
    (
        "Adapters that drifted, are new or silent",
        "short",
        (
            ("drifted", "packer_plan_drifted_adapters"),
            ("new", "packer_plan_new_adapters"),
            ("silent", "packer_plan_silent_adapters"),
        ),
    ),
    (
        "Requests in the engine",
        "short",
        (
            ("running", f"{_BY} (vllm:num_requests_running)"),
            ("waiting", f"{_BY} (vllm:num_requests_waiting)"),
        ),
    ),
    (
        "Share of the KV cache in use",
        "percentunit",
        (
            (
                "measured",
                f"{_BY} (vllm:kv_cache_usage_perc) or {_BY} (vllm:gpu_cache_usage_perc)",
            ),
        ),
    ),
    (
        "Adapters in GPU slots",
        "short",
        (("resident", f"{_BY} (vllm:num_gpu_loaded_lora_adapters)"),),
    ),
)
"""Title, unit, and (legend, query) of each panel."""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`dashboard.json`, for import or provisioning."""
    panels = [_advice(), *(_panel(number, *each) for number, each in enumerate(_PANELS))]
    profiles = ", ".join(sorted({server.bin.profile.label for server in servers}))
    dashboard = {
        "uid": f"packer-{options.prefix}"[:40],
        "title": f"packer: {options.prefix}",
        "description": f"Predicted beside measured, {len(servers)} servers; profile {profiles}.",
        "tags": ["packer", "vllm", "lora"],
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": []},
        "panels": panels,
    }
    return {"dashboard.json": quoting.json_text(dashboard, indent=2) + "\n"}


def _variables() -> list[dict[str, Any]]:
    labels = ("instance", "service", "pod")
    options = [{"text": each, "value": each, "selected": number == 0} for number, each in enumerate(labels)]
    return [
        {"name": "datasource", "type": "datasource", "label": "Prometheus", "query": "prometheus", "hide": 0},
        {
            "name": "server_label",
            "type": "custom",
            "label": "Label of a server",
            "query": ",".join(labels),
            "options": options,
            "current": options[0],
            "hide": 0,
        },
    ]


def _advice() -> dict[str, Any]:
    colours = {"keep": "green", "watch": "orange", "replan": "red"}
    overrides = [
        {
            "matcher": {"id": "byName", "options": name},
            "properties": [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        }
        for name, colour in colours.items()
    ]
    return {
        "id": 1,
        "type": "stat",
        "title": "Advice",
        "datasource": _DATASOURCE,
        "gridPos": {"h": 4, "w": 24, "x": 0, "y": 0},
        "targets": [_target("A", "{{advice}}", "packer_plan_advice == 1")],
        "fieldConfig": {"defaults": {}, "overrides": overrides},
        "options": {
            "textMode": "name",
            "colorMode": "background",
            "reduceOptions": {"calcs": ["lastNotNull"]},
        },
    }


def _panel(number: int, title: str, unit: str, queries: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    row, column = divmod(number, 3)
    targets = [
        _target(chr(ord("A") + k), legend if "{{" in legend else f"{legend} {{{{$server_label}}}}", query)
        for k, (legend, query) in enumerate(queries)
    ]
    return {
        "id": number + 2,
        "type": "timeseries",
        "title": title,
        "datasource": _DATASOURCE,
        "gridPos": {"h": 8, "w": 8, "x": 8 * column, "y": 4 + 8 * row},
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
    }


def _target(ref: str, legend: str, query: str) -> dict[str, Any]:
    return {"refId": ref, "datasource": _DATASOURCE, "expr": query, "legendFormat": legend, "range": True}
