"""Start commands of vLLM: a shell script that starts one server or all of them, and the same as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Callable

from packer.export import quoting
from packer.export.servers import Options, Server, host_port

_HEAD = """#!/bin/sh
# Starts the servers of a plan, one engine each.
#   sh start.sh GPU     one server, in the foreground
#   sh start.sh all     all of them on this host, until interrupted
# With all, a server that ends is named and the others run on. The script ends when none is left, with the
# largest of their exit statuses, or by a signal, after stopping them all.
set -eu

server() {
case "$1" in
"""
_CASE = """{index})
  export CUDA_VISIBLE_DEVICES="${{CUDA_VISIBLE_DEVICES:-{devices}}}"
  exec {words}
  ;;
"""
_WRONG = """*)
  echo "start.sh: expected one of the servers 0 to {last}, or all" >&2
  exit 2
  ;;
esac
}}

servers="{numbers}"
"""
_TAIL = """
# Stops the servers and ends with status $1; while they are being started, only notes it.
stop() {
  status_given=$1
  if [ "$started" = yes ]; then
    trap - HUP INT TERM
    for entry in $running; do
      kill "${entry#*:}" 2>/dev/null || :
    done
    wait
    exit "$status_given"
  fi
}

# Waits until no server is left, and reports each one that ends.
watch() {
  worst=0
  while [ -n "$running" ]; do
    sleep 1 &
    wait "$!" || :  # unlike a sleep in the foreground, a signal ends it
    left=
    for entry in $running; do
      pid="${entry#*:}"
      if kill -0 "$pid" 2>/dev/null; then
        left="$left $entry"
      else
        status=0
        wait "$pid" || status=$?
        echo "start.sh: server ${entry%%:*} ended with status $status" >&2
        if [ "$status" -gt "$worst" ]; then worst=$status; fi
      fi
    done
    running=$left
  done
  exit "$worst"
}

if [ "${1:-}" = all ]; then
  unset CUDA_VISIBLE_DEVICES
  started=no
  status_given=
  running=
  trap 'stop 129' HUP
  trap 'stop 130' INT
  trap 'stop 143' TERM
  for number in $servers; do
    server "$number" &
    running="$running $number:$!"
  done
  # A server that is still a copy of this shell would lose a signal: let each become its engine.
  sleep 1 &
  wait "$!" || :
  started=yes
  if [ -n "$status_given" ]; then
    sleep 1 || :
    stop "$status_given"
  fi
  watch
else
  server "${1:-}"
fi
"""


def render(servers: tuple[Server, ...], options: Options) -> dict[str, str]:
    """`start.sh` and `args.json`."""
    return scripts(servers, options, Server.command)


def scripts(
    servers: tuple[Server, ...], options: Options, command: Callable[[Server, int], list[str]]
) -> dict[str, str]:
    """`start.sh` and `args.json` of any engine; `command`: a server and its port → its command line."""
    first_gpu = 0
    cases, arguments = [], []
    for server in servers:
        port = host_port(server.index, options)
        devices = ",".join(str(first_gpu + k) for k in range(server.gpus))
        first_gpu += server.gpus
        words = command(server, port)
        # exec: the engine takes the shell's place, so that a signal reaches it.
        cases.append(_CASE.format(index=server.index, devices=devices, words=shlex.join(words)))
        arguments.append(
            {
                "server": server.name,
                "profile": server.bin.profile.label,
                "port": port,
                "env": {"CUDA_VISIBLE_DEVICES": devices},
                "command": words,
            }
        )
    numbers = " ".join(str(server.index) for server in servers)
    wrong = _WRONG.format(last=len(servers) - 1, numbers=numbers)
    script = "".join([_HEAD, *cases, wrong, _TAIL])
    return {"start.sh": script, "args.json": quoting.json_text(arguments, indent=2) + "\n"}
