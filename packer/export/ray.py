"""Ray Serve LLM: one LLMConfig for each server, with `lora_config` (ray.serve.llm:build_openai_app).

Ray loads an adapter from `dynamic_lora_loading_path`/NAME at its first request.
"""

from __future__ import annotations

from packer.errors import IncompatibleError, shown
from packer.export import quoting, templates
from packer.export.makers import GAUDI
from packer.export.nodes import ray_accelerator
from packer.export.servers import ExportedServer, Options, routes
from packer.export.sources import parsed

_SCHEMES = ("s3", "gcs")


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`serve.yaml`, for `serve deploy`; `models.json`: adapter → the names under which it is served, with shares."""

    def requested(server: ExportedServer, name: str) -> str:
        return server.name if any(item.name == name for item in server.base) else f"{server.name}:{name}"

    found, several = [], len({server.bin.profile.gpu.name for server in servers}) > 1
    for server in servers:
        switches = server.bin.profile.engine.switches
        settings = {name: value for name, value in server.settings().items() if name[3:] not in switches}
        arguments = {name.replace("-", "_"): value for name, value in (settings | switches).items()}
        if (drafts := server.bin.profile.engine.speculation) is not None:
            arguments["speculative_config"] = drafts.config
        if server.modules:
            arguments["max_cpu_loras"] = server.bin.max_loras
        gpu = server.bin.profile.gpu.name
        if server.maker is GAUDI:
            raise IncompatibleError(f"Ray Serve LLM reserves GPUs, which {gpu} is not to Ray: use --format k8s.")
        accelerator = ray_accelerator(gpu) if several else None
        found.append((server, arguments, _folder(server) if server.modules else None, accelerator))
    names = {
        "profiles": {server.name: server.bin.profile.label for server in servers},
        "adapters": {
            name: [{"model": requested(server, name), "share": round(share, 9)} for server, share in places]
            for name, places in routes(servers).items()
        },
    }
    return {
        "serve.yaml": templates.render("ray.yaml", servers=found, options=options),
        "models.json": quoting.json_text(names, indent=2) + "\n",
    }


def _folder(server: ExportedServer) -> str:
    """The folder that holds every adapter of a server under its own name."""
    folders = set()
    for item in server.modules:
        folder, _, last = item.source.rstrip("/").rpartition("/")
        if parsed(item.source)[0] not in _SCHEMES or last != item.name:
            raise IncompatibleError(
                f"Expected the source of adapter {shown(item.name)} to be s3:// or gs:// with the adapter's name at "
                f"its end, which is where Ray Serve looks, got {shown(item.source)}. Give --sources."
            )
        folders.add(folder.replace("gcs://", "gs://", 1))
    if len(folders) > 1:
        rule = f"Expected the adapters of {server.name} in one folder, as Ray Serve takes one for each server,"
        raise IncompatibleError(f"{rule} got {', '.join(sorted(folders)[:3])}.")
    return folders.pop()
