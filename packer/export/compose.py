"""Docker Compose: one service per server, each with its own GPU (compose-spec, `deploy.resources`)."""

from __future__ import annotations

from packer.export import quoting
from packer.export.servers import Options, Server, host_port


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`compose.yaml`; the adapters are in `./adapters` beside it."""
    services: dict[str, object] = {}
    first_gpu = 0
    for server in servers:
        devices = [str(first_gpu + k) for k in range(server.gpus)]
        first_gpu += server.gpus
        services[server.name] = _service(server, devices, options)
    return {"compose.yaml": quoting.yaml_text([{"services": services, "volumes": {"models": {}}}])}


def _service(server: Server, devices: list[str], options: Options) -> dict[str, object]:
    service = {
        "image": server.image,
        "entrypoint": server.command(server.port),
        "command": [],
        "ports": [f"{host_port(server.index, options)}:{server.port}"],
        "ipc": "host",
        "restart": "unless-stopped",
        "environment": ["HF_TOKEN"],  # without a value: the host's, if it has one
        "volumes": [
            {"type": "bind", "source": "./adapters", "target": options.adapters_dir, "read_only": True},
            {"type": "volume", "source": "models", "target": "/root/.cache/huggingface"},
        ],
        "deploy": {
            "resources": {
                "reservations": {
                    "devices": [{"driver": "nvidia", "device_ids": devices, "capabilities": ["gpu"]}]
                }
            }
        },
    }
    escaped: dict[str, object] = quoting.doubled_dollars(service)
    return escaped
