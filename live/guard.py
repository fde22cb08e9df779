"""Run a server so that it never outlives packer: when the pipe from packer closes, it is stopped.

    python guard.py GRACE_S COMMAND …

Standard input is the pipe; it closes when packer stops the server, ends or is killed, even by SIGKILL. The command runs
in a process group of its own, which gets SIGTERM, and SIGKILL after GRACE_S seconds. Standard library only.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

POLL_S = 0.05


def group_lives(group: int) -> bool:
    """Whether a process group still has a member."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def stop_group(child: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGTERM to the group, then SIGKILL to its remaining processes after `grace_s`."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return
        end = time.monotonic() + wait_s
        while time.monotonic() < end:
            child.poll()
            if not group_lives(child.pid):
                return
            time.sleep(POLL_S)


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the pipe closes; returns its exit status (negative: the signal)."""
    grace_s, command = float(arguments[0]), arguments[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the pipe decides
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_default_signals)
    closed = threading.Event()

    def watch() -> None:
        sys.stdin.buffer.read()
        closed.set()

    threading.Thread(target=watch, daemon=True).start()
    while child.poll() is None and not closed.is_set():
        closed.wait(POLL_S)
    code = child.poll()
    stop_group(child, grace_s)  # also when the leader died and left children behind
    return code if code is not None else 0


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    os._exit(status if status >= 0 else 128 - status)  # the watching thread still blocks in read()
