"""What the benchmarks on real servers start: vLLM on the CPU, nginx, Prometheus and a client that sends open loop.

    python benchmarks/live/stack.py FOLDER start|stop|kill gpu-K

starts or ends one server of a folder, as the commands in a file of servers do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

import packer
from packer.bin import Bin
from packer.live.launch import read_launch
from packer.live.server import ServerOptions, command_line, environment, healthy
from packer.plan import Plan, Status
from packer.predictors.twin import TwinPredictor

PROFILE = Path(__file__).resolve().parents[1] / "real_vllm" / "results" / "profile.toml"
SLOTS, RANK, MOST_ADAPTERS = 8, 16, 24
NGINX, SERVERS, PROMETHEUS, METRICS = 18430, (18431, 18432), 18435, 18436
"""Ports; `METRICS` of `packer live follow`."""
SCRAPE_S = 5.0
PACKER = [str(Path(sys.executable).with_name("packer"))]


@dataclass
class Request:
    """One request of the client. `status`: 0 for a connection that was cut."""

    sent_s: float
    adapter: str
    status: int
    took_s: float
    error: str = ""


@dataclass(frozen=True)
class Stack:
    """Two servers with fixed ports, and what is around them, in a folder with `launch.toml`'s path."""

    folder: Path

    def url(self, k: int) -> str:
        """Where a server answers."""
        return f"http://127.0.0.1:{SERVERS[k]}"

    def command(self, what: str, name: str = "{name}") -> str:
        """The command that starts or ends a server, for the file of servers."""
        return f"{sys.executable} {Path(__file__).resolve()} {self.folder} {what} {name}"

    def start(self, k: int) -> None:
        """Start a server, without waiting; by a process that ends, so that the server is nobody's child here."""
        subprocess.run(self.command("start", f"gpu-{k}"), shell=True, check=True)

    def launch(self, k: int) -> None:
        """Start a server as a process of its own, whose number is kept in a file."""
        launch = replace(read_launch((self.folder / "launch").read_text()), step_log=False)
        settings = packer.load_profile(str(PROFILE)).settings(SLOTS, RANK)
        emulated = launch.emulation
        kv_bytes = None if emulated is None else emulated.kv_bytes(settings)
        words = command_line(launch, ServerOptions((("", ""),), settings, kv_bytes), SERVERS[k])
        at = words.index("--lora-modules")
        del words[at : at + 2]
        words[words.index("--max-cpu-loras") + 1] = str(MOST_ADAPTERS)
        with (self.folder / f"server-{k}.log").open("ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment(launch, None),
                start_new_session=True,
            )  # fmt: skip
        (self.folder / f"server-{k}.pid").write_text(str(process.pid))

    def end(self, k: int, number: int = signal.SIGKILL, within_s: float = 30.0) -> None:
        """Send a server's processes a signal, and wait until they are gone; SIGKILL after `within_s`."""
        path = self.folder / f"server-{k}.pid"
        if not path.exists():
            return
        group = int(path.read_text())
        end = time.monotonic() + within_s
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, number)
            while time.monotonic() < end:
                os.killpg(group, 0)
                time.sleep(0.05)
            os.killpg(group, signal.SIGKILL)
        path.unlink()

    def wait(self, ks: Iterable[int], within_s: float = 300.0) -> None:
        """Until the servers answer."""
        end = time.monotonic() + within_s
        for k in ks:
            while not healthy(self.url(k)):
                if time.monotonic() > end:
                    raise SystemExit(f"server {k} did not start: {self.folder}/server-{k}.log")
                time.sleep(0.5)

    def write_files(self, launch: Path, *commands: str) -> None:
        """The file of servers, and what nginx and Prometheus read. `commands`: that the file has, "start" or "stop"."""
        (self.folder / "launch").write_text(str(launch.resolve()))
        main, included = self.folder / "nginx.conf", self.folder / "packer.conf"
        included.write_text(f"server {{ listen {NGINX}; return 503; }}\n")
        main.write_text(
            f"daemon off; worker_processes 1; pid {self.folder}/nginx.pid;\n"
            f"events {{ worker_connections 2048; }}\n"
            f"http {{ access_log off; client_body_temp_path {self.folder}/body;\n"
            f"proxy_temp_path {self.folder}/proxy;\ninclude {included}; }}\n"
        )
        reload = f"sed -i 's/listen 8080/listen {NGINX}/' {included} && {' '.join(self._nginx())} -s reload"
        rows = "".join(
            f'[[servers]]\nname = "gpu-{k}"\nurl = "{self.url(k)}"\n'
            + "".join(f'{what} = "{self.command(what)}"\n' for what in commands)
            for k in range(len(SERVERS))
        )
        (self.folder / "servers.toml").write_text(
            f'schema = 1\nmodel = "base"\nadapters = "{launch.resolve().parent}/adapters/rank-{{rank}}"\n{rows}'
            f'[router]\nformat = "nginx"\nfile = "{included}"\nreload = "{reload}"\n'
            "[limits]\nload_s = 60.0\ndrain_s = 60.0\nanswer_s = 20.0\nstart_s = 300.0\n"
        )
        jobs = {"vllm": [f"127.0.0.1:{port}" for port in SERVERS], "packer": [f"127.0.0.1:{METRICS}"]}
        (self.folder / "prometheus.yml").write_text(
            f"global:\n  scrape_interval: {SCRAPE_S:g}s\nrule_files: [rules.yml]\nscrape_configs:\n"
            + "".join(
                f"  - job_name: {job}\n    static_configs: [{{targets: {json.dumps(targets)}}}]\n"
                for job, targets in jobs.items()
            )
        )
        rules = {
            "ServerLost": "packer_live_server_ready == 0",
            "ServersNeeded": "packer_live_servers_needed > 0",
            "PackerBlind": "time() - packer_live_last_look_timestamp_seconds > 60",
        }
        (self.folder / "rules.yml").write_text(
            "groups:\n  - name: packer\n    interval: 5s\n    rules:\n"
            + "".join(f"      - alert: {name}\n        expr: {rule}\n" for name, rule in rules.items())
        )

    def _nginx(self) -> list[str]:
        own = self.folder
        return ["nginx", "-q", "-c", f"{own}/nginx.conf", "-e", f"{own}/nginx.log", "-p", f"{own}"]

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """nginx and Prometheus, and no server left behind."""
        with (self.folder / "prometheus.log").open("wb") as log:
            prometheus = subprocess.Popen(
                ["prometheus", f"--config.file={self.folder}/prometheus.yml", "--log.level=warn",
                 f"--storage.tsdb.path={self.folder}/tsdb", f"--web.listen-address=127.0.0.1:{PROMETHEUS}"],
                stdout=log, stderr=log,
            )  # fmt: skip
        nginx = subprocess.Popen(self._nginx())
        try:
            yield
        finally:
            nginx.terminate()
            prometheus.terminate()
            for k in range(len(SERVERS)):
                self.end(k)

    def asked(self, query: str) -> dict[str, float]:
        """Prometheus' answer: value by the labels that tell the series apart."""
        url = f"http://127.0.0.1:{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            rows = json.load(answer)["data"]["result"]
        keys = ("alertname", "server", "instance", "job")
        return {
            next((row["metric"][key] for key in keys if key in row["metric"]), ""): float(row["value"][1])
            for row in rows
        }

    def refused(self) -> dict[str, int]:
        """Errors in nginx's log: connections that a dead server refused, and requests cut on the way."""
        text = (self.folder / "nginx.log").read_text() if (self.folder / "nginx.log").exists() else ""
        lines = [line for line in text.splitlines() if "[error]" in line]
        refused = sum("Connection refused" in line for line in lines)
        cut = sum("prematurely closed" in line or "reset by peer" in line for line in lines)
        return {"connection_refused": refused, "cut": cut, "other": len(lines) - refused - cut}


def fleet_of(names: Sequence[str], rate: float, goal: str = "") -> packer.Workload:
    """Adapters with these names; ranks 8 and 16."""
    adapters = [packer.Adapter(name, 8 if k % 2 else 16, rate / len(names)) for k, name in enumerate(names)]
    lengths = packer.Lengths.gamma(24.0, 0.5, high=64), packer.Lengths.gamma(8.0, 0.5, high=16)
    fleet = packer.Workload(adapters, *lengths, 0.0, name="real")
    return replace(fleet, slo=fleet.slo.changed_by(packer.Goal.parse(goal))) if goal else fleet


def plan_of(fleet: packer.Workload, placed: Sequence[Mapping[int, float]]) -> Plan:
    """A plan with these adapters on the servers."""
    profile = packer.load_profile(str(PROFILE))
    settings = profile.settings(SLOTS, RANK)
    bins = tuple(Bin(tuple(own), settings, profile, tuple(own.values())) for own in placed)
    figures = TwinPredictor(seed=0).evaluate(fleet, bins)
    return Plan(fleet, bins, figures, Status.FEASIBLE, "gpus", "greedy", "twin")


class Client:
    """Sends requests open loop by weights and a rate that may change; each answer is kept in a file at once."""

    def __init__(self, names: Iterable[str], rate: float, seed: int, record: Path) -> None:
        self.rate, self.rng, self.record = rate, np.random.default_rng(seed), record
        self.weights = dict.fromkeys(names, 1.0)
        self.done: list[Request] = []
        self.events: list[tuple[float, str]] = []
        self.start_s = time.monotonic()

    def now(self) -> float:
        """Since the traffic began, s."""
        return time.monotonic() - self.start_s

    def note(self, what: str) -> None:
        """Keep and print that something happens now."""
        self.events.append((round(self.now(), 2), what))
        print(f"{self.now():7.1f} s {what}", flush=True)

    async def until(self, at_s: float) -> None:
        """Wait until then."""
        await asyncio.sleep(max(0.0, at_s - self.now()))

    def hot(self, names: Sequence[str]) -> None:
        """These adapters get most of the requests."""
        self.weights = {name: 8.0 if name in names else 1.0 for name in self.weights}

    async def one(self, session: aiohttp.ClientSession, adapter: str, tokens: int = 8) -> Request:
        """A request, to its end."""
        sent = self.now()
        body = {
            "model": adapter, "prompt": self.rng.integers(10, 1000, 24).tolist(), "max_tokens": tokens,
            "ignore_eos": True,
        }  # fmt: skip
        status, error = 0, ""
        try:
            async with session.post(
                f"http://127.0.0.1:{NGINX}/v1/completions",
                json=body,
                headers={"X-Adapter": adapter, "Connection": "close"},
            ) as answer:
                text = await answer.text()
                status, error = answer.status, "" if answer.status == 200 else text[:200]
        except (aiohttp.ClientError, TimeoutError, OSError) as fault:
            error = f"{type(fault).__name__}: {fault}"[:200]
        return Request(sent, adapter, status, self.now() - sent, error)

    async def run(self, until_s: float) -> None:
        """Send until then, and wait for the answers."""
        tasks: set[asyncio.Task[None]] = set()
        with self.record.open("w") as file:

            async def sent(session: aiohttp.ClientSession, adapter: str) -> None:
                self.done.append(found := await self.one(session, adapter))
                file.write(json.dumps(asdict(found)) + "\n")
                file.flush()

            async with session_of() as session:
                due = self.now()
                while due < until_s:
                    names, weights = list(self.weights), np.array([*self.weights.values()])
                    adapter = str(self.rng.choice(names, p=weights / weights.sum()))
                    task = asyncio.create_task(sent(session, adapter))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
                    due += float(self.rng.exponential(1.0 / self.rate))
                    await self.until(due)
                await asyncio.gather(*tasks)

    async def answer_again(self, names: Sequence[str], within_s: float = 120.0) -> dict[str, float]:
        """Ask each adapter for one token twice a second until it answers; returns after how long, s."""
        began = self.now()

        async def one(session: aiohttp.ClientSession, name: str) -> float:
            while self.now() < began + within_s:
                sent = self.now()
                if (await self.one(session, name, 1)).status == 200:
                    return round(self.now() - began, 2)
                await self.until(sent + 0.5)
            return float("inf")

        async with session_of() as session:
            return dict(zip(names, await asyncio.gather(*(one(session, name) for name in names)), strict=True))


def session_of() -> aiohttp.ClientSession:
    """A session without limits on connections, each for one request."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=connector)


async def packer_run(*words: str, log: Path) -> int:
    """A command of packer to its end."""
    with log.open("ab") as file:
        process = await asyncio.create_subprocess_exec(*PACKER, *words, stdout=file, stderr=file)
        return await process.wait()


class Follow:
    """`packer live follow` in a process of its own."""

    def __init__(self, plan: Path, every_s: float, *words: str) -> None:
        folder = plan.parent
        self.began_s, self.used = time.monotonic(), {"cpu_share": 0.0, "peak_mb": 0.0}
        with (folder / "packer.log").open("ab") as file:
            self.process = subprocess.Popen(
                [*PACKER, "live", "follow", str(plan), "--servers", str(folder / "servers.toml"), "--every",
                 f"{every_s:g}s", "--listen", f"127.0.0.1:{METRICS}", "--html", str(folder / "follow.html"),
                 "--force", *words],
                stdout=file, stderr=file,
            )  # fmt: skip

    def end(self) -> int:
        """Ctrl-C; returns the exit code. What the process took is in `used`."""
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{self.process.pid}/status").read_text()
            ticks = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            cpu_s = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
            peak_kb = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
            self.used = {"cpu_share": round(cpu_s / (time.monotonic() - self.began_s), 4), "peak_mb": peak_kb // 1024}
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


async def models(url: str) -> list[str]:
    """The adapters that a server holds."""
    try:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as answer:
            return sorted(card["id"] for card in (await answer.json())["data"] if card.get("parent"))
    except aiohttp.ClientError:
        return ["the server does not answer"]


def interruptible(work: Callable[[], Any]) -> Any:
    """Run it with Ctrl-C as usual for it and its children: a shell's background ignores it, and passes that on."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return work()


def main() -> None:
    """The command of a file of servers."""
    folder, what, name = sys.argv[1:]
    stack, k = Stack(Path(folder)), int(name.removeprefix("gpu-"))
    if what == "start":
        stack.launch(k)
    else:
        stack.end(k, signal.SIGTERM if what == "stop" else signal.SIGKILL)


if __name__ == "__main__":
    main()
