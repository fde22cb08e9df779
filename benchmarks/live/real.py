"""Two real vLLM servers on the CPU behind nginx, with traffic, while packer moves, adds and removes adapters.

    uv run python benchmarks/live/real.py --launch vllm-cpu/launch.toml

The popularity of the adapters changes twice, each time with a plan that `packer live apply` carries out. Then
`packer live follow` runs: adapters are added to the fleet and taken away, one server is killed (SIGKILL) and started
again. Every request goes through nginx, open loop; what was answered, and by when, is in real.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import packer
from packer.bin import Bin
from packer.io.workloads import write_workload
from packer.live.launch import Launch, read_launch
from packer.live.server import ServerOptions, command_line, environment, healthy
from packer.plan import Plan, Status
from packer.predictors.twin import TwinPredictor

HERE = Path(__file__).resolve().parent
ADAPTERS, SLOTS, RANK = 12, 8, 16
EVERY_S = 15.0
PACKER = [str(Path(sys.executable).with_name("packer"))]


@dataclass
class Request:
    """One request of the client. `status`: 0 for a connection that was cut."""

    sent_s: float
    adapter: str
    status: int
    took_s: float
    error: str = ""


class Servers:
    """Two servers with fixed ports."""

    def __init__(self, launch: Launch, folder: Path, ports: list[int]) -> None:
        self.launch, self.folder, self.ports = launch, folder, ports
        self.processes: list[subprocess.Popen[bytes] | None] = [None, None]

    def start(self, k: int) -> None:
        """Start a server, without waiting."""
        profile_settings = packer.load_profile(str(PROFILE)).settings(SLOTS, RANK)
        emulated = self.launch.emulation
        kv_bytes = None if emulated is None else emulated.kv_bytes(profile_settings)
        options = ServerOptions((), profile_settings, kv_bytes)
        launch = replace(self.launch, step_log=False)
        words = command_line(launch, options, self.ports[k])
        words.remove("--lora-modules")
        words[words.index("--max-cpu-loras") + 1] = str(2 * ADAPTERS)
        with (self.folder / f"server-{k}.log").open("ab") as log:
            self.processes[k] = subprocess.Popen(
                words, stdout=log, stderr=log, env=environment(launch, None), start_new_session=True
            )

    def kill(self, k: int, number: int = signal.SIGKILL) -> None:
        """End a server and its processes."""
        process, self.processes[k] = self.processes[k], None
        if process is not None:
            os.killpg(process.pid, number)
            process.wait()

    def url(self, k: int) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.ports[k]}"

    def wait(self, k: int, within_s: float = 300.0) -> None:
        """Until it answers."""
        end = time.monotonic() + within_s
        while not healthy(self.url(k)):
            if time.monotonic() > end:
                raise SystemExit(f"server {k} did not start: {self.folder}/server-{k}.log")
            time.sleep(0.5)


PROFILE = HERE.parent / "real_vllm" / "results" / "profile.toml"


def fleet_of(names: list[str], rate: float) -> packer.Workload:
    """Adapters with these names; ranks 8 and 16."""
    adapters = [packer.Adapter(name, 8 if k % 2 else 16, rate / len(names)) for k, name in enumerate(names)]
    lengths = packer.Lengths.gamma(24.0, 0.5, high=64), packer.Lengths.gamma(8.0, 0.5, high=16)
    return packer.Workload(adapters, *lengths, 0.0, name="real")


def plan_of(fleet: packer.Workload, placed: list[dict[int, float]]) -> Plan:
    """A plan with these adapters on the two servers."""
    profile = packer.load_profile(str(PROFILE))
    settings = profile.settings(SLOTS, RANK)
    bins = tuple(Bin(tuple(own), settings, profile, tuple(own.values())) for own in placed)
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    return Plan(fleet, bins, figures, Status.FEASIBLE, "gpus", "greedy", "twin")


def write_nginx(folder: Path, port: int) -> tuple[Path, str]:
    """nginx's configuration; the file that packer writes, and the command that makes nginx read it."""
    main, included = folder / "nginx.conf", folder / "packer.conf"
    included.write_text(f"server {{ listen {port}; return 503; }}\n")
    main.write_text(
        f"daemon off; worker_processes 1; pid {folder}/nginx.pid;\nevents {{ worker_connections 2048; }}\n"
        f"http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;\n"
        f"include {included}; }}\n"
    )
    command = f"nginx -q -c {main} -e {folder}/nginx.log -p {folder}"
    return included, f"sed -i 's/listen 8080/listen {port}/' {included} && {command} -s reload"


class Client:
    """Sends requests open loop by weights that may change."""

    def __init__(self, url: str, names: list[str], rate: float, seed: int) -> None:
        self.url, self.rate, self.rng = url, rate, np.random.default_rng(seed)
        self.weights = dict.fromkeys(names, 1.0)
        self.done: list[Request] = []
        self.start_s = time.monotonic()

    def now(self) -> float:
        """Since the traffic began, s."""
        return time.monotonic() - self.start_s

    def hot(self, names: list[str]) -> None:
        """These adapters get most of the requests."""
        self.weights = {name: 8.0 if name in names else 1.0 for name in self.weights}

    async def one(self, session: aiohttp.ClientSession, adapter: str) -> None:
        """A request, to its end."""
        sent = self.now()
        body = {
            "model": adapter, "prompt": self.rng.integers(10, 1000, 24).tolist(), "max_tokens": 8,
            "ignore_eos": True,
        }  # fmt: skip
        status, error = 0, ""
        try:
            async with session.post(
                f"{self.url}/v1/completions", json=body, headers={"X-Adapter": adapter, "Connection": "close"}
            ) as answer:
                text = await answer.text()
                status, error = answer.status, "" if answer.status == 200 else text[:200]
        except (aiohttp.ClientError, TimeoutError, OSError) as fault:
            error = f"{type(fault).__name__}: {fault}"[:200]
        self.done.append(Request(sent, adapter, status, self.now() - sent, error))

    async def run(self, until_s: float) -> None:
        """Send until then, and wait for the answers."""
        tasks: set[asyncio.Task[None]] = set()
        timeout = aiohttp.ClientTimeout(total=120)
        async with aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True)
        ) as session:
            due = self.now()
            while due < until_s:
                names, weights = list(self.weights), np.array([*self.weights.values()])
                adapter = str(self.rng.choice(names, p=weights / weights.sum()))
                task = asyncio.create_task(self.one(session, adapter))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                due += float(self.rng.exponential(1.0 / self.rate))
                await asyncio.sleep(max(0.0, due - self.now()))
            await asyncio.gather(*tasks)


async def packer_run(*words: str, log: Path) -> int:
    """A command of packer to its end."""
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(*PACKER, *words, stdout=file, stderr=file)
        return await process.wait()


async def drive(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, on a clock whose unit is a part of the whole time."""
    names = [f"a{k:02d}" for k in range(ADAPTERS)]
    launch = read_launch(options.launch)
    servers = Servers(launch, folder, [18431, 18432])
    included, reload = write_nginx(folder, 18430)
    base = Path(options.launch).resolve().parent
    (folder / "servers.toml").write_text(
        f'schema = 1\nmodel = "base"\nadapters = "{base}/adapters/rank-{{rank}}"\n'
        + "".join(f'[[servers]]\nurl = "{servers.url(k)}"\n' for k in range(2))
        + f'[router]\nformat = "nginx"\nfile = "{included}"\nreload = "{reload}"\n'
        "[limits]\nload_s = 60.0\ndrain_s = 60.0\nanswer_s = 20.0\n"
    )
    fleet = fleet_of(names, options.rate)
    half = ADAPTERS // 2
    placed = [
        [dict.fromkeys(range(half), 1.0), dict.fromkeys(range(half, ADAPTERS), 1.0)],
        [dict.fromkeys([0, 1, *range(half, half + 4)], 1.0), dict.fromkeys([2, 3, 4, 5, 10, 11], 1.0)],
        [{**dict.fromkeys(range(half), 1.0), 8: 0.5}, {**dict.fromkeys([6, 7, 9, 10, 11], 1.0), 8: 0.5}],
    ]
    for k, own in enumerate(placed):
        plan_of(fleet, own).save(folder / f"plan-{k}.json")
    write_workload(fleet, folder / "fleet.json", force=True)
    log, given = folder / "packer.log", ("--servers", str(folder / "servers.toml"))
    nginx = subprocess.Popen(
        ["nginx", "-q", "-c", str(folder / "nginx.conf"), "-e", str(folder / "nginx.log"), "-p", str(folder)]
    )
    events: list[tuple[float, str]] = []
    follow = None
    try:
        for k in range(2):
            servers.start(k)
        for k in range(2):
            servers.wait(k)
        assert await packer_run("live", "apply", str(folder / "plan-0.json"), *given, "--yes", log=log) == 0
        client = Client("http://127.0.0.1:18430", names, options.rate, options.seed)
        unit = options.minutes * 60.0 / 16.0

        def note(what: str) -> None:
            events.append((round(client.now(), 2), what))
            print(f"{client.now():7.1f} s {what}", flush=True)

        async def until(part: float) -> None:
            await asyncio.sleep(max(0.0, part * unit - client.now()))

        traffic = asyncio.create_task(client.run(16 * unit))
        for k, part in ((1, 2.0), (2, 4.5)):
            await until(part)
            client.hot([names[j] for j in placed[k][0]][:4])
            note(f"other hot adapters; apply plan {k}")
            code = await packer_run("live", "apply", str(folder / f"plan-{k}.json"), *given, "--yes", log=log)
            note(f"applied, exit code {code}")
        with log.open("ab") as file:
            follow = subprocess.Popen(
                [*PACKER, "live", "follow", str(folder / "plan-2.json"), *given, "--every", f"{EVERY_S:g}s",
                 "--fleet", str(folder / "fleet.json"), "--html", str(folder / "follow.html"), "--force"],
                stdout=file, stderr=file,
            )  # fmt: skip
        await until(7.5)
        more = [*names, "b00", "b01"]
        write_workload(fleet_of(more, options.rate), folder / "fleet.json", force=True)
        note("adapters b00 and b01 are added")
        await asyncio.sleep(2.5 * EVERY_S)
        client.weights |= {"b00": 4.0, "b01": 4.0}
        note("requests for b00 and b01 begin")
        await until(10.0)
        left = [name for name in more if name not in ("a10", "a11")]
        client.weights = {name: client.weights[name] for name in left}
        await asyncio.sleep(5.0)
        write_workload(fleet_of(left, options.rate), folder / "fleet.json", force=True)
        note("adapters a10 and a11 are taken away")
        await until(12.0)
        killed_s = client.now()
        servers.kill(1)
        note("server 1 is killed")
        await until(12.4)
        servers.start(1)
        note("server 1 is started again")
        await traffic
        if follow.poll() is None:
            follow.send_signal(signal.SIGINT)  # which a process started in the background of a shell ignores
        try:
            code = follow.wait(30)
        except subprocess.TimeoutExpired:
            follow.kill()
            code = follow.wait()
        follow = None
        note(f"follow ended with exit code {code}")
        held = [await models(servers.url(k)) for k in range(2)]
        return {"events": events, "held": held, **judged(client.done, killed_s)}
    finally:
        if follow is not None:
            follow.kill()
        nginx.terminate()
        for k in range(2):
            servers.kill(k)


async def models(url: str) -> list[str]:
    """The adapters of a server at the end."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
            return sorted(card["id"] for card in (await answer.json())["data"] if card.get("parent"))
    except aiohttp.ClientError:
        return ["the server does not answer"]


def judged(done: list[Request], killed_s: float) -> dict[str, Any]:
    """Errors, apart by what caused them: moves, or the killed server."""
    failed = [each for each in done if each.status != 200]
    of_kill = [each for each in failed if each.sent_s + each.took_s >= killed_s]
    flying = [each for each in of_kill if each.sent_s < killed_s]
    refused = [each for each in of_kill if each.sent_s >= killed_s]
    last = max((each.sent_s for each in refused), default=killed_s)
    return {
        "requests": len(done),
        "completed": len(done) - len(failed),
        "errors_before_the_kill": len(failed) - len(of_kill),
        "in_flight_on_the_killed_server": len(flying),
        "refused_after_the_kill": len(refused),
        "answered_again_after_s": round(last - killed_s, 1),
        "limit_s": 2 * EVERY_S,
        "median_s": float(np.median([each.took_s for each in done])),
        "errors": Counter(f"{each.status} {each.error}"[:120] for each in failed).most_common(8),
        "failed": [asdict(each) for each in failed[:50]],
    }


def main() -> None:
    """Run it, print and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", required=True)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("live-real"))
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found = asyncio.run(drive(options, folder))
    about = {
        "machine": platform.processor() or platform.machine(),
        "minutes": options.minutes,
        "rate": options.rate,
    }
    (HERE / "real.json").write_text(json.dumps({**about, **found}, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key != "failed"}, indent=1))


if __name__ == "__main__":
    main()
