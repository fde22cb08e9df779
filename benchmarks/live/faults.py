"""Every fault of servers in `tests/live/faults.py`, by the command itself: words, exit code, memory, end after SIGTERM.

    python -m benchmarks.live.faults [--json benchmarks/live/faults.json]

Each command runs in a process of its own against a server with the fault. Faults for which packer waits run again and
get SIGTERM: they must end within 10 s.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from benchmarks.fuzz.faults import FAKE_SERVER, LAUNCH
from packer.adapter import Adapter
from packer.io.plans import plan_to_dict
from packer.io.profiles import load_profile
from packer.planning.solve import solve
from packer.testing.records import record_text
from packer.workload import Workload
from tests.live.certificates import UNTRUSTED, untrusted_server
from tests.live.faults import ASKED, PROMETHEUS, STREAMED, Answer, sent
from tests.live.stand_in import StandIn

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = "import sys; sys.argv[0] = 'packer'; from packer.cli import main; main()"
PROFILE = "h100-64gb/llama-3.1-8b-instruct"
LIMIT_MB, LIMIT_S, END_S = 300, 240, 10.0
WAITING_S, LOADED_S = 3.0, 8.0
"""When SIGTERM comes: a silent server costs the doctor 5 s."""

NO_PAGE = "preemptions have no value: 0 pages"
STARTED: dict[str, tuple[str, tuple[int, ...]]] = {
    "die:3": ("server 0: the server ended with status 3", (0, 3)), "hang:3": ("starved|fail|hangs", (0, 3)),
    "http500": ("500", (3,)), "refuse:a0": ("requests failed", (0,)), "no-metrics": (NO_PAGE, (0,)),
    "bad-metrics": ("preemptions", (0,)), "big-metrics": (NO_PAGE, (0,)), "restart": ("", (0,)),
    "renamed": (NO_PAGE, (0,)), "memory": ("memory error no yes .*No available memory", (0,)),
    "children": ("failed requests 0", (0,)),
}  # fmt: skip
"""Faults of a server that `live validate` starts: packer's words, and its exit codes."""


@dataclass
class Case:
    """A command, the answer to what it asks, and what it must say; `told_s`: it gets SIGTERM then; `certificate`: one
    of `UNTRUSTED`, with which the server speaks TLS; `started`: a fault of `tests/live/fake_server.py`, which it
    starts."""

    name: str
    words: str
    path: str
    answer: Answer
    says: str
    codes: tuple[int, ...]
    told_s: float = 0.0
    certificate: str = ""
    started: str = ""


def cases() -> Iterator[Case]:
    """All faults, and SIGTERM during those that make packer wait."""
    metrics = "workload from-metrics --url URL --rank 8 -o w.csv"
    measured = f"live calibrate --url URL --profile {PROFILE} --max-loras 2 --max-lora-rank 8 --budget 1s -o p.toml"
    for name, fault in ASKED.items():
        yield Case(f"doctor {name}", "live doctor --url URL", fault.path, fault.answer, fault.says, (3,))
        if fault.slow:
            yield Case(
                f"doctor {name}, SIGTERM",
                "live doctor --url URL",
                fault.path,
                fault.answer,
                "",
                (130,),
                told_s=WAITING_S,
            )
    for name, fault in PROMETHEUS.items():
        yield Case(f"from-metrics {name}", metrics, fault.path, fault.answer, fault.says, (3,))
        if fault.slow:
            yield Case(
                f"from-metrics {name}, SIGTERM",
                metrics,
                fault.path,
                fault.answer,
                "",
                (130,),
                told_s=LOADED_S,
            )
    for name, (answer, _) in STREAMED.items():
        yield Case(
            f"calibrate {name}", measured, "/v1/completions", answer, "No server could be measured|hangs|fail", (3,)
        )
    for name, (*_, says) in UNTRUSTED.items():
        for words in ("live doctor --url URL", metrics, measured):
            said = "" if words == measured else says
            yield Case(f"{words.split()[1]} {name}", words, "", sent(), said, (3,), certificate=name)
    validated = "live validate plan.json --launch launch.toml --duration 2s --bins 0 -o v.json"
    for name, (says, codes) in STARTED.items():
        yield Case(f"validate {name}", validated, "", sent(), says, codes, started=name)
    for name in ("hang:3", "slow-start", "children"):
        lasting = validated.replace("2s", "60s")
        yield Case(f"validate {name}, SIGTERM", lasting, "", sent(), "", (3, 130), LOADED_S, started=name)
    for name in ("silence", "comments without end", "tokens without end"):
        answer, _ = STREAMED[name]
        yield Case(f"calibrate {name}, SIGTERM", measured, "/v1/completions", answer, "", (3, 130), LOADED_S)


@cache
def plan() -> str:
    """A plan for six adapters of a small load, as a file."""
    fleet = Workload([Adapter(f"a{k}", 8, 3.0) for k in range(6)])
    return json.dumps(plan_to_dict(solve(fleet, load_profile(PROFILE), objective="gpus", predictor="tree")))


def faults_of(case: Case) -> tuple[list[str], float, int]:
    """What is wrong, seconds until the end (after SIGTERM if the command gets it), memory of the process in MB."""
    with tempfile.TemporaryDirectory(prefix="packer-live-fault-") as name:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "PACKER_CONFIG": "", "COLUMNS": "300"}
        if case.certificate:
            server, trusted = untrusted_server(case.certificate, Path(name))
            environment |= trusted
        else:
            server = StandIn({"a": "/a"})
            server.raw = {case.path: case.answer}
        if case.started:
            environment |= {"FAKE_FAULT": case.started, "FAKE_COUNTER": str(Path(name) / "counter")}
            (Path(name) / "measured").mkdir()
            (Path(name) / "launch.toml").write_text(LAUNCH.format(python=sys.executable, server=FAKE_SERVER))
            (Path(name) / "plan.json").write_text(plan())
        url = server.url.replace("http:", "https:") if case.certificate else server.url
        words = case.words.replace("URL", url).split()
        with (Path(name) / "said").open("wb") as said:
            process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, *words], cwd=name, env=environment, stdin=subprocess.DEVNULL,
                stdout=said, stderr=said,
            )  # fmt: skip
        begun = time.monotonic()
        if case.told_s:
            time.sleep(case.told_s)
            os.kill(process.pid, signal.SIGTERM)
            begun = time.monotonic()
        while (found := os.wait4(process.pid, os.WNOHANG))[0] == 0:
            if time.monotonic() - begun > LIMIT_S:
                os.kill(process.pid, signal.SIGKILL)
            time.sleep(0.05)
        process.returncode = code = os.waitstatus_to_exitcode(found[1])
        took_s, peak_mb = time.monotonic() - begun, found[2].ru_maxrss // 1024
        text = re.sub(r"\s+", " ", (Path(name) / "said").read_bytes().decode("utf-8", "replace"))
        left = sorted(path.name for path in Path(name).iterdir() if path.name in ("w.csv", "p.toml"))
    server.close()
    wrong = []
    if code not in case.codes:
        wrong.append(f"exit code {code}: {text[-300:]}")
    if not re.search(case.says, text):
        wrong.append(f"expected {case.says!r}, got {text[-300:]!r}")
    if "Traceback" in text or "internal error" in text or re.search("[\x00-\x1f\x7f-\x9f]", text):
        wrong.append(f"says {text[-300:]!r}")
    if left:
        wrong.append(f"{left[0]} was written")
    if peak_mb > LIMIT_MB:
        wrong.append(f"{peak_mb} MB")
    if case.told_s and took_s > END_S:
        wrong.append(f"ended {took_s:.0f} s after SIGTERM")
    return wrong, took_s, peak_mb


def main() -> None:
    """Run all, two at a time, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    chosen = [case for case in cases() if given.only in case.name]
    found = {}
    with ThreadPoolExecutor(2) as pool:
        for case, (wrong, took_s, peak_mb) in zip(chosen, pool.map(faults_of, chosen), strict=True):
            found[case.name] = {"wrong": wrong, "took_s": round(took_s, 1), "peak_mb": peak_mb}
            print(f"{case.name}: {'; '.join(wrong) or 'held'} ({took_s:.1f} s, {peak_mb} MB)", flush=True)
    failed = sum(bool(each["wrong"]) for each in found.values())
    peak_mb = max(each["peak_mb"] for each in found.values())
    told_s = max((found[case.name]["took_s"] for case in chosen if case.told_s), default=0.0)
    print(f"{len(found)} cases, {failed} faults, at most {peak_mb} MB, at most {told_s:.1f} s after SIGTERM")
    if given.json is not None:
        rows = {"cases": len(found), "faults": failed, "peak_mb": peak_mb, "after_sigterm_s": told_s, "found": found}
        given.json.write_text(record_text(rows) + "\n", "utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
