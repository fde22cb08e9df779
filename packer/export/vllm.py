"""Start commands of vLLM: a shell script that starts one server or all of them, and the same as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from packer.export import quoting
from packer.export.servers import ExportedServer, Options, on_one_host
from packer.export.templates import render as template


def render(servers: tuple[ExportedServer, ...], options: Options) -> dict[str, str]:
    """`start.sh` and `args.json`."""
    return scripts(servers, options, ExportedServer.command)


def scripts(
    servers: tuple[ExportedServer, ...], options: Options, command: Callable[[ExportedServer, int], list[str]]
) -> dict[str, str]:
    """`start.sh` and `args.json` of any engine; `command`: a server and its port → its command line."""
    cases, arguments = [], []
    for server, port, gpus in on_one_host(servers, options):
        devices, words = ",".join(gpus), command(server, port)
        cases.append((server, port, devices, shlex.join(words)))
        arguments.append(
            {
                "server": server.name,
                "profile": server.bin.profile.label,
                "port": port,
                "env": {"CUDA_VISIBLE_DEVICES": devices},
                "command": words,
            }
        )
    script = template("start.sh", servers=cases)
    return {"start.sh": script, "args.json": quoting.json_text(arguments, indent=2) + "\n"}
