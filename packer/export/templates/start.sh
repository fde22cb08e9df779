#!/bin/sh
# Starts the servers of a plan, one engine each.
#   sh start.sh GPU     one server, in the foreground
#   sh start.sh all     all of them on this host, until interrupted
# With all, a server that ends is named and the others run on. The script ends when none is left, with the
# largest of their exit statuses, or by a signal, after stopping them all.
set -eu

server() {
case "$1" in
{% for server, port, devices, words in servers %}
{{ server.index }})
{% set variable = server.maker.variable %}
  export {{ variable }}="{{ "${" | safe }}{{ variable }}:-{{ devices | safe }}}"
{# exec: the engine takes the shell's place, so that a signal reaches it #}
  exec {{ words | safe }}
  ;;
{% endfor %}
*)
  echo "start.sh: expected one of the servers $servers, or all" >&2
  exit 2
  ;;
esac
}

servers="{{ servers | map("first") | map(attribute="index") | join(" ") | safe }}"

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
  unset {{ variables | safe }}
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
