"""What `packer live follow` takes while nothing changes: 64 stand-in servers with 5,000 adapters.

    uv run python benchmarks/live/rest.py

The command itself runs, with `--fleet`, its page and its metrics. It looks every few seconds, so that the run is short;
its CPU time for a look counts as that of a minute.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import packer
from packer.bin import Bin
from packer.io.web import address_of
from packer.io.workloads import write_workload
from packer.live.server import get
from packer.plan import Plan, Status
from packer.predictors.twin import TwinPredictor
from tests.live.stand_in import StandIn

MINUTE_S = 60.0
RATE, SLOTS = 2.0, 32
"""Requests per second, and slots, of a server."""
LISTEN = "127.0.0.1:18437"


def serve(names: list[list[str]], base: str, longest: int, out: Connection) -> None:
    """Stand-ins in a process of their own; their counters grow by themselves."""
    servers = [StandIn({n: f"/adapters/{n}" for n in own}, base) for own in names]
    for each in servers:
        each.longest, each.slots = longest, SLOTS
    out.send([each.url for each in servers])
    started = time.monotonic()
    while True:
        tokens = int(800.0 * (time.monotonic() - started))
        for each in servers:
            each.counters = (
                f"vllm:prompt_tokens_total {tokens}\nvllm:generation_tokens_total {tokens}\n"
                f"vllm:time_to_first_token_seconds_count {tokens // 250}\n"
            )
        time.sleep(1.0)


def plan_of(servers: int, adapters: int) -> Plan:
    """Adapters dealt to servers of the shipped profile."""
    profile = packer.load_profile("h100-64gb/llama-3.1-8b-instruct")
    fleet = packer.Workload([packer.Adapter(f"a{k}", 8, RATE * servers / adapters) for k in range(adapters)])
    settings = profile.settings(SLOTS, 8)
    bins = tuple(Bin(tuple(range(s, adapters, servers)), settings, profile) for s in range(servers))
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    return Plan(fleet, bins, figures, Status.FEASIBLE, "gpus", "greedy", "twin")


def taken(pid: int) -> tuple[float, float, float]:
    """CPU time of a process, s; its memory and the most that it had, MiB."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    kb = {line.partition(":")[0]: int(line.split()[1]) for line in lines if line.startswith("Vm")}
    cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return cpu_s, kb["VmRSS"] / 1024, kb["VmHWM"] / 1024


def looked_s() -> float:
    """When the command last looked, s since 1970; 0 before."""
    status, text = get(address_of(f"http://{LISTEN}"), "/metrics", 10.0)
    line = next((line for line in text.splitlines() if line.startswith("packer_live_last_look")), "")
    return float(line.split()[-1]) if status == 200 and line else 0.0


def main() -> None:
    """Run the command for some looks, of which the first half doesn't count, and print CPU time and memory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--looks", type=int, default=10)
    parser.add_argument("--every", type=float, default=6.0)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=5000)
    options = parser.parse_args()
    plan = plan_of(options.servers, options.adapters)
    ours, theirs = multiprocessing.Pipe()
    names = [[f"a{k}" for k in item.adapters] for item in plan.bins]
    engine = plan.bins[0].profile
    given = (names, engine.model.name, engine.engine.max_model_len, theirs)
    multiprocessing.Process(target=serve, args=given, daemon=True).start()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = "".join(f'[[servers]]\nurl = "{url}"\n' for url in ours.recv())
        (folder / "servers.toml").write_text(f"schema = 1\n{rows}")
        plan.save(folder / "plan.json")
        write_workload(plan.workload, folder / "fleet.json")
        words = ["live", "follow", str(folder / "plan.json"), "--servers", str(folder / "servers.toml")]
        words += ["--fleet", str(folder / "fleet.json"), "--every", f"{options.every:g}s", "--listen", LISTEN]
        words += ["--html", str(folder / "follow.html"), "--force"]
        process = subprocess.Popen([str(Path(sys.executable).with_name("packer")), *words])
        try:
            seen, spent, before = 0.0, [], 0.0
            while len(spent) < options.looks and process.poll() is None:
                time.sleep(0.25)
                if (now := looked_s()) > seen:
                    seen = now
                    cpu_s, memory, most = taken(process.pid)
                    spent.append(cpu_s - before)
                    before = cpu_s
                    print(f"look {len(spent)}: {spent[-1]:.2f} s, {memory:.0f} MiB, at most {most:.0f}", flush=True)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    rest = spent[len(spent) // 2 :]
    print(f"at rest {sum(rest) / len(rest) / MINUTE_S:.2%} of a core at a look a minute, {most:.0f} MiB at most")


if __name__ == "__main__":
    main()
