"""Start commands of vLLM: a shell script that starts one server or all of them, and the same as JSON."""

from __future__ import annotations

from packer.export import quoting
from packer.export.servers import Options, Server

_HEAD = """#!/bin/sh
# Starts the servers of a plan, one vLLM each.
#   sh start.sh GPU     one server, in the foreground
#   sh start.sh all     all of them on this host, until interrupted
set -eu

server() {
case "$1" in
"""
_TAIL = """*)
  echo "start.sh: expected one of the servers 0 to {last}, or all" >&2
  exit 2
  ;;
esac
}}

if [ "${{1:-}}" = all ]; then
  unset CUDA_VISIBLE_DEVICES
  trap 'kill 0' INT TERM
  for gpu in {numbers}; do
    server "$gpu" &
  done
  wait
else
  server "${{1:-}}"
fi
"""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`start.sh` and `args.json`."""
    first_gpu = 0
    cases, arguments = [], []
    for server in servers:
        port = options.port + server.index
        devices = ",".join(str(first_gpu + k) for k in range(server.gpus))
        first_gpu += server.gpus
        words = quoting.shell_words(server.command(port))
        # exec: vLLM takes the shell's place, so that a signal reaches it.
        export = f'export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES:-{devices}}}"'
        cases.append(f"{server.index})\n  {export}\n  exec {words}\n  ;;\n")
        arguments.append(
            {
                "server": server.name,
                "port": port,
                "env": {"CUDA_VISIBLE_DEVICES": devices},
                "command": server.command(port),
            }
        )
    numbers = " ".join(str(server.index) for server in servers)
    script = _HEAD + "".join(cases) + _TAIL.format(last=len(servers) - 1, numbers=numbers)
    return {"start.sh": script, "args.json": quoting.json_text(arguments, indent=2) + "\n"}
