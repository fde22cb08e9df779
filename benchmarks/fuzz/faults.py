"""Faults while a command writes: a full disk, SIGTERM, SIGKILL, and a second process that writes the same file.

    python benchmarks/fuzz/faults.py --rounds 20

Each command that writes files runs in processes of its own. Whatever happens, each result is afterwards absent,
or what it was before, or complete; nothing of a traceback is printed; the exit code is 0, 2, 3 or 130 (or the
signal), and only SIGKILL leaves a temporary file.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OLD = b"what was there before\n"

COMMANDS: dict[str, tuple[str, ...]] = {
    "solve f.csv --predictor tree -o p.json --per-adapter a.csv": ("p.json", "a.csv"),
    "solve f.csv --predictor tree --from plan.json -o p.json": ("p.json",),
    "evaluate plan.json --predictor tree -o p.json": ("p.json",),
    "evaluate plan.json --predictor tree --input m.json --rank 8 --seen w.csv": ("w.csv",),
    "simulate f.csv --max-loras 2 --duration 60 -o o.json --per-adapter a.csv --timeline t.parquet": (
        "o.json", "a.csv", "t.parquet",
    ),
    "simulate f.csv --max-loras 2 --duration 60 --plot s.html": ("s.html",),
    "simulate f.csv --cluster cluster.toml --duration 60 --per-server v.csv --requests q.parquet -o o.json": (
        "v.csv", "q.parquet", "o.json",
    ),
    "sweep f.csv --adapters 2,4 --max-loras 2 --duration 60 -o s.csv --plot s.html": ("s.csv", "s.html"),
    "sweep f.csv --max-loras 4 --tuning chunked --duration 60 -o s.parquet": ("s.parquet",),
    "compare f.csv --solvers greedy,random --predictors tree -o c.csv --plot c.html": ("c.csv", "c.html"),
    "compare f.csv --cluster cluster.toml --systems vllm,s-lora --duration 60 --seeds 2 -o o.json": ("o.json",),
    "compare f.csv --solvers greedy --predictors tree --launch launch.toml --launch-duration 1 -o c.json": (
        "c.json",
    ),
    "schedule f.csv --rates day.csv --period 43200 --predictor tree --static p --servers s --keda k --routes r -o o": (
        "p", "s", "k", "r/0000-nginx.conf", "r/1200-envoy.yaml", "o",
    ),
    "memory --max-loras 8 --max-lora-rank 8 --plot m.html": ("m.html",),
    "export plan.json --format vllm -o start.sh": ("start.sh",),
    "export plan.json --format routing -o out": ("out/nginx.conf", "out/envoy.yaml"),
    "report plan.json -o r.html": ("r.html",),
    "workload generate --adapters 50 --rates 0.1,0.2 --ranks 8,16 -o w.yaml": ("w.yaml",),
    "workload generate --adapters 50 --total-rate 5 --ranks 8,16 -o w.csv.gz": ("w.csv.gz",),
    "workload from-log t.csv --adapters 2 --ranks 8 -o w.parquet": ("w.parquet",),
    "workload from-log log.jsonl --rank 8 -o w.json --loads l.csv --day d.csv": (
        "w.json", "l.csv", "d.csv",
    ),
    "profiles estimate --model config.json --gpu l40s -o e.toml": ("e.toml",),
    "predictor build --profile given.toml --rows 4 --jobs 1 -o d.parquet": ("d.parquet",),
    "predictor train rows.parquet --kind tree -o n.packer --draw n.svg": ("n.packer", "n.svg"),
    "profiles fit --profiling measured --name fitted -o e.toml": ("e.toml",),
    "workload from-metrics --input m.json --save n.json --rank 8 -o w.csv --loads l.csv --day d.csv": (
        "n.json", "w.csv", "l.csv", "d.csv",
    ),
    "init f.csv --model meta-llama/Llama-3.1-8B-Instruct --gpu h100-64gb -o new": (
        "new/profile.toml", "new/fleet.csv", "new/packer.toml", "new/plan.json", "new/report.html",
    ),
    "live follow plan.json --simulate r.json -o o.json": ("o.json",),
    "live validate plan.json --launch launch.toml --duration 1s --bins 0 -o v.json --html v.html": (
        "v.json", "v.html",
    ),
    "live calibrate --url URL --profile given.toml --max-loras 2 --max-lora-rank 8 --folder s --budget 1s -o e.toml": (
        "e.toml",
    ),
    "live setup-cpu cpu --python ./standin": ("cpu/launch.toml",),
    "live setup-gpu gpu --model model --gpu h200-141gb --python ./standin": ("gpu/launch.toml",),
}  # fmt: skip
"""Commands that write, and what they write; URL is that of a stand-in server."""

ONE_WRITER = ("predictor build", "live validate", "live calibrate", "--launch")
"""Commands that hold a folder of intermediate results: a second one is refused with exit code 2."""


FAKE_SERVER = ROOT / "tests" / "live" / "fake_server.py"
LAUNCH = """
name = "fake"
python = "{python}"
command = ["{{python}}", "{server}"]
adapter_path = "measured"
step_log = false
token_ids = [4, 100]
[model]
name = "tiny"
path = "none"
weights_bytes = 1.0
kv_bytes_per_token = 2048.0
lora_bytes_per_rank = 17408.0
[gpu]
name = "none"
memory_bytes = 1e9
[engine]
version = "0.32.0"
max_model_len = 4096
max_num_batched_tokens = 4096
max_num_seqs = 64
"""
"""A server that speaks vLLM's protocol, for the live commands."""


CLUSTER = """
schema = 1
[[kinds]]
name = "h"
profile = "h100-64gb/llama-3.1-8b-instruct"
max_loras = 4
max_lora_rank = 16
[[nodes]]
count = 2
servers = ["h"]
"""
STANDIN = """#!/bin/sh
echo '{"vllm": "0.32.0", "torch": "2.13.0"}'
"""
"""An interpreter that says that it has vLLM."""


@contextmanager
def serving(commands: tuple[str, ...]) -> Iterator[str]:
    """URL of a stand-in server, if one of the commands needs it."""
    if not any("URL" in words for words in commands):
        yield ""
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--lora-modules", '{"name": "x"}', '{"name": "y"}']
    server = subprocess.Popen([sys.executable, str(FAKE_SERVER), *flags], stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def prepare(folder: Path, commands: tuple[str, ...], url: str) -> None:
    """The inputs of the commands; a data set and measurements take long and are made for those that need them."""
    import json

    rows = "".join(f"a{k},{(8, 16)[k % 2]},0.2\n" for k in range(6))
    (folder / "f.csv").write_text("adapter,rank,rate\n" + rows)
    (folder / "t.csv").write_text(
        "timestamp,input_tokens,output_tokens\n" + "".join(f"{k},{5 + k},{3 + k}\n" for k in range(60))
    )
    usage = {"prompt_tokens": 5, "completion_tokens": 4}
    lines = [json.dumps({"time": 5e8 + 480 * k, "model": "ab"[k % 2], "usage": usage}) for k in range(200)]
    (folder / "log.jsonl").write_text("\n".join(lines))
    shutil.copy(ROOT / "tests" / "data" / "models" / "llama-3.1-8b.json", folder / "config.json")
    series = {"metric": {"requested_model": "a"}, "values": [[43200, "50"], [86400, "70"]]}
    answer = {"status": "success", "data": {"resultType": "matrix", "result": [series]}}
    metrics = dict.fromkeys(("requests", "input_tokens", "output_tokens"), answer)
    (folder / "m.json").write_text(json.dumps({"window_s": 43200, **metrics}))
    (folder / "launch.toml").write_text(LAUNCH.format(python=sys.executable, server=FAKE_SERVER))
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "day.csv").write_text("adapter,night,day\n" + "".join(f"a{k},0.02,8\n" for k in range(6)))
    (folder / "standin").write_text(STANDIN)
    (folder / "standin").chmod(0o755)
    (folder / "model").mkdir()
    shutil.copy(folder / "config.json", folder / "model")
    (folder / "measured").mkdir()
    rows = "".join(f"llama-3.1-8b-instruct,decode,{b},5,100,{9 + 0.05 * b},ok\n" for b in (1, 10, 50, 100, 200))
    (folder / "measured" / "latency_backbone.csv").write_text(
        "model,phase,set_batch_size,actual_prompt_len,set_output_length,itl_mean_ms,status\n" + rows
    )
    named = [json.dumps({"time": 5e8 + 30 * k, "model": f"a{k % 6}", "usage": usage}) for k in range(60)]
    (folder / "replayed.jsonl").write_text("\n".join(named))
    made = [
        "solve f.csv --predictor tree -o plan.json -q",
        "workload from-log replayed.jsonl --rank 16 --replay -o r.json -q",
        "profiles estimate --model config.json --gpu l40s -o e.toml -q",
    ]
    if any("rows.parquet" in words for words in commands):
        made.append("predictor build --profile e.toml --rows 220 --jobs 1 -o rows.parquet -q")
    for words in made:
        assert _ended(_started(words, folder))[0] == 0, words
    (folder / "e.toml").rename(folder / "given.toml")
    measured = next((words for words in commands if "live calibrate" in words), None)
    if measured is not None:
        words = measured.replace("URL", url).replace("--budget 1s", "--budget 20s")
        assert _ended(_started(f"{words} -q", folder))[0] == 0, words
        (folder / "e.toml").unlink()


def _started(words: str, folder: Path, *, limit: int | None = None) -> tuple[int, Path]:
    """A process that runs a command and may write no file beyond `limit` bytes: its number, its messages."""
    errors = folder / f".errors-{time.monotonic_ns()}"
    pid = os.fork()
    if pid:
        return pid, errors
    code = 1
    try:
        handle = os.open(errors, os.O_CREAT | os.O_WRONLY)
        os.dup2(handle, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.chdir(folder)
        if limit is not None:
            sys.dont_write_bytecode = True  # Python would keep the first bytes of a module, and fail to load them later
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        import packer.cli
        from packer.cli.streams import flush, prepare

        prepare()
        code = flush(packer.cli.run(words.split()))
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _ended(process: tuple[int, Path]) -> tuple[int, str]:
    """Exit code and messages."""
    _, status = os.waitpid(process[0], 0)
    text = process[1].read_text(errors="replace") if process[1].exists() else ""
    process[1].unlink(missing_ok=True)
    return os.waitstatus_to_exitcode(status), text


def complete(path: Path) -> bool:
    """Whether a result is whole: it can be read by its own reader, or ends as it should."""
    from packer.errors import PackerError
    from packer.io.plans import load_plan
    from packer.io.profiles import load_profile
    from packer.io.workloads import read_workload
    from packer.predictors.dataset import read_dataset
    from packer.predictors.store import read_model

    data = path.read_bytes()
    readers = {
        "p.json": load_plan, "plan.json": load_plan, "e.toml": load_profile, "profile.toml": load_profile,
        "fleet.csv": read_workload, "d.parquet": read_dataset, "n.packer": read_model,
    }  # fmt: skip
    reader = readers.get(path.name) or (read_workload if path.name.startswith("w.") else None)
    if reader is not None:
        try:
            reader(str(path))
        except PackerError:
            return False
        return True
    if path.suffix in (".html", ".svg"):
        return data.rstrip().endswith((b"</html>", b"</svg>"))
    if path.suffix == ".parquet":
        return data.endswith(b"PAR1")
    return data.endswith(b"\n")


def one_fault(words: str, fault: str, home: Path, url: str, rng: random.Random, *, before: bool) -> str:
    """Run a command with a fault; what is wrong afterwards, or nothing."""
    with tempfile.TemporaryDirectory(prefix="packer-fault-") as name:
        folder = Path(name)
        for item in home.iterdir():
            (shutil.copytree if item.is_dir() else shutil.copy)(item, folder / item.name)
        results = [folder / result for result in COMMANDS[words]]
        if before:
            for path in results:
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(OLD)
        words = words.replace("URL", url) + " --force"
        codes = {0, 3} if fault in ("none", "two writers") else {0, 2, 3, 130}
        if fault == "full disk":
            ends = [_ended(_started(words, folder, limit=rng.choice((0, 1, 50, 500, 4000))))]
        elif fault == "two writers":
            two = [_started(words, folder), _started(words, folder)]
            ends = [_ended(process) for process in two]
            codes |= {2} if any(each in words for each in ONE_WRITER) else set()
        elif fault == "none":
            ends = [_ended(_started(words, folder))]
        else:
            process = _started(words, folder)
            time.sleep(rng.random() ** 2 * 1.5)
            os.kill(process[0], signal.SIGTERM if fault == "SIGTERM" else signal.SIGKILL)
            ends = [_ended(process)]
            codes |= {-signal.SIGKILL} if fault == "SIGKILL" else {-signal.SIGTERM}
        wrong = [f"exit code {code}: {text[-300:]}" for code, text in ends if code not in codes]
        wrong += [f"traceback: {text[-300:]}" for _, text in ends if "Traceback" in text]
        for path in results:
            if path.exists() and path.read_bytes() != OLD and not complete(path):
                wrong.append(f"{path.name} is neither old nor complete")
            if before and not path.exists():
                wrong.append(f"{path.name} is gone")
            if fault in ("none", "two writers") and (not path.exists() or path.read_bytes() == OLD):
                wrong.append(f"{path.name} was not written")
        rest = [path.name for path in folder.rglob(".packer-*") if fault != "SIGKILL"]
        wrong += [f"{name} is left" for name in rest]
        return "; ".join(wrong)


def _forked(words: str, fault: str, home: Path, url: str, seed: int, *, before: bool) -> str:
    """`one_fault` in a process of its own: what reads the results starts threads, which no fork survives."""
    note = home / ".wrong"
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        signal.alarm(120)
        note.write_text(one_fault(words, fault, home, url, random.Random(seed), before=before))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    wrong = note.read_text() if status == 0 else "no end after 120 s"
    note.unlink(missing_ok=True)
    if status:
        os.killpg(pid, signal.SIGKILL)
    return wrong


FAULTS = ("none", "full disk", "SIGTERM", "SIGKILL", "two writers")


def run(rounds: int, seed: int, faults: tuple[str, ...], commands: tuple[str, ...]) -> tuple[int, list[str]]:
    """Cases and findings of all commands with all faults."""
    import packer.cli
    import packer.planning.solve
    import packer.twin.simulate  # noqa: F401  (imported before the processes are forked)

    rng = random.Random(seed)
    findings, count = [], 0
    with tempfile.TemporaryDirectory(prefix="packer-fault-") as name, serving(commands) as url:
        home = Path(name)
        prepare(home, commands, url)
        for turn in range(rounds):
            for words in commands:
                for fault in faults:
                    wrong = _forked(words, fault, home, url, rng.getrandbits(32), before=bool((turn + count) % 2))
                    count += 1
                    if wrong:
                        findings.append(f"{fault}, {words}: {wrong}")
                        print(findings[-1], flush=True)
    return count, findings


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--only", default="", help="commands in which this regular expression is found")
    given = parser.parse_args()
    commands = tuple(words for words in COMMANDS if re.search(given.only, words))
    started = time.monotonic()
    count, findings = run(given.rounds, given.seed, tuple(given.faults.split(",")), commands)
    print(f"{count} cases, {len(findings)} findings, {time.monotonic() - started:.0f} s")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
