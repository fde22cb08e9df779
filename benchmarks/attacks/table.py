"""The attacks: what is typed, with which files, and what must come of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECRET = "sk-s3cr3t0123"
PLUGINS = {
    "exits": "sys.exit(0)",
    "raises": "raise RuntimeError('\\x1b]0;title\\x07no')",
    "recurses": "return self.solve(*_args, **_more)",
    "nothing": "return None",
    "interrupts": "raise GeneratorExit('no')",
    "prints": "print('noise'); raise ValueError('x' * 100_000)",
}
PLUGIN = """
import sys

class Mine:
    name = "mine"
    def supports(self, *_): return None
    def solve(self, *_args, **_more):
        {body}
"""


TWICE = """
import signal, subprocess, sys, time
command = "packer sweep f.csv --max-loras 2,3,4,5,6 --duration 9e6 -o s.csv".split()
process = subprocess.Popen(command)
for wait_s in (3.0, 0.3):
    time.sleep(wait_s)
    process.send_signal(signal.SIGINT)
sys.exit(process.wait())
"""


@dataclass(frozen=True)
class Attack:
    """`line`: of shell. `codes`: exit codes that may come. `says`: pattern of what is printed. `absent`: files that
    must not be there afterwards. `check`: what else is wrong, given the folder and the standard output; "" if nothing.
    """

    name: str
    line: str
    says: str = ""
    codes: tuple[int, ...] = (2,)
    absent: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Path, str], str] | None = None


def prepare(home: Path, program: str, root: Path) -> None:
    """The files of the attacks."""
    fleet = "".join(f"a{k},{(8, 16)[k % 2]},0.2\n" for k in range(6))
    (home / "f.csv").write_text("adapter,rank,rate\n" + fleet)
    (home / "title.csv").write_text("adapter,rank,rate,\x1b]0;owned\x07\na,8,1,2\n")
    (home / "names.csv").write_text("adapter,rank,rate\n\u202egpj.exe,8,0.1\n=cmd|calc,8,0.1\n@x,8,0.1\n+1,8,0.1\n")
    (home / "shell.csv").write_text(
        "adapter,rank,rate\n$(touch owned),8,0.1\n`touch owned`,8,0.1\n'; touch owned;',8,1\n"
    )
    (home / "html.csv").write_text('adapter,rank,rate\n"</script><script>alert(1)</script>",8,0.1\n{{7*7}},8,0.1\n')
    (home / "long.csv").write_text(f"adapter,rank,rate\na,8,{'x' * 20_000}\n")
    (home / "digits.json").write_text('{"adapters": [{"name": "a", "rank": 8, "rate": %s}]}' % ("9" * 5000))
    (home / "deep.json").write_text("[" * 200_000)
    (home / "deep.toml").write_text("a." * 40_000 + "a = 1\n")
    (home / "brackets.toml").write_text("a = " + "[" * 80_000)
    (home / "laughs.yaml").write_text("a: &a [x]\n" + "".join(f"b{k}: [*a, *a]\n" for k in range(50)))
    (home / "bomb.csv.gz").write_bytes(gzip.compress(b"adapter,rank,rate\n" + b"\n" * (300 << 20), 9))
    (home / "zeros.csv").write_bytes(bytes(5000))
    (home / "cut.parquet").write_bytes(b"PAR1" + bytes(range(256)) * 40 + b"PAR1")
    (home / "twice.py").write_text(TWICE)
    (home / "log.jsonl").write_text('{"time": 1e308, "model": "a", "prompt_tokens": 5, "completion_tokens": 5}\n' * 9)
    (home / "servers.toml").write_text(f'schema = 1\n[[servers]]\nurl = "http://user:{SECRET}@127.0.0.1:9"\n')
    (home / "path.toml").write_text('schema = 1\nadapters = "{name.__class__}"\n[[servers]]\nurl = "http://h:1"\n')
    (home / "config").mkdir()
    (home / "config" / "config.json").write_text('{"num_hidden_layers": 1e400, "hidden_size": -5}')
    for name, body in PLUGINS.items():
        folder = home / "plugins" / name
        info = folder / "strange-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / "strange_plugin.py").write_text(PLUGIN.replace("{body}", body))
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[packer.solvers]\nmine = strange_plugin:Mine\n")
    loading = home / "plugins" / "loading"
    (loading / "strange-1.0.dist-info").mkdir(parents=True)
    (loading / "strange_plugin.py").write_text("import sys; print('noise'); sys.exit(0)\n")
    for name in ("METADATA", "entry_points.txt"):
        text = (home / "plugins" / "exits" / "strange-1.0.dist-info" / name).read_text()
        (loading / "strange-1.0.dist-info" / name).write_text(text)
    made = "solve f.csv --objective gpus --predictor tree -o plan.json -q"
    subprocess.run([sys.executable, "-c", program, *made.split()], cwd=home, check=True)
    plan = json.loads((home / "plan.json").read_text())
    for name, change in CHANGES.items():
        other = json.loads(json.dumps(plan))
        change(other)
        (home / name).write_text(json.dumps(other))


def _negative(plan: Any) -> None:
    plan["gpus"][0]["evaluation"]["mean_ttft_ms"] = -5.0


def _renamed(plan: Any) -> None:
    (profile,) = plan["profiles"].values()
    profile["latency"]["coefficients"]["base_ms"] = 1e-9


CHANGES: dict[str, Callable[[Any], None]] = {
    "negative.json": _negative,
    "empty.json": lambda plan: plan.update(objective=""),
    "renamed.json": _renamed,
    "title.json": lambda plan: plan["workload"]["adapters"][0].update(name="\x1b]0;owned\x07"),
}
"""Plans with a fault."""


def no_formulas(folder: Path, _out: str) -> str:
    """No cell of the table is calculated."""
    cells = [cell for line in (folder / "a.csv").read_text().splitlines() for cell in line.split(",")]
    return next((f"a cell is {cell[:20]!r}" for cell in cells if cell.startswith(("=", "+", "@"))), "")


def no_script(folder: Path, _out: str) -> str:
    """A name is no markup."""
    return "a name is markup" if "<script>alert" in (folder / "r.html").read_text() else ""


def is_json(_folder: Path, out: str) -> str:
    """Standard output is one JSON document."""
    try:
        json.loads(out)
    except ValueError:
        return f"no JSON: {out[:80]!r}"
    return ""


GPUS = "packer solve f.csv --objective gpus --predictor tree"
SHORT = "packer simulate f.csv --max-loras 2 --duration 5 -q"
COST = "compiled code can't be kept"
SERVERS = 'printf \'schema = 1\\nstate = "s.json"\\n[[servers]]\\nurl = "http://127.0.0.1:9"\\n\''
STATE = f"""{SERVERS} > s.toml; printf '{{"schema": 1, "plan": "x", "servers": {{"a": {{"b": 9e9}}}}}}'"""
ALONE = {"HOME": "/proc", "XDG_CACHE_HOME": "", "NUMBA_CACHE_DIR": ""}


def homeless(name: str, line: str, **environment: str) -> Attack:
    """Without a place for compiled code: the same result, and one line of what it costs."""
    return Attack(f"cache: {name}", line, COST, (0,), environment=environment)


def plugin(name: str, says: str) -> Attack:
    """A solver of another package."""
    return Attack(
        f"plug-in: {name}", "packer solve f.csv --objective gpus --solver mine --json", says,
        absent=("plan.json.tmp",), environment={"PYTHONPATH": f"FOLDER/plugins/{name}"}, check=is_json,
    )  # fmt: skip


ATTACKS: list[Attack] = [
    homeless("no home, simulate", SHORT, **ALONE),
    homeless("no home, solve", f"{GPUS} -o p.json -q", **ALONE),
    homeless("no home, evaluate", "packer evaluate plan.json --seed 5 -q", **ALONE),
    homeless("a file in its place", f"touch c && NUMBA_CACHE_DIR=c {SHORT}"),
    homeless("a read-only folder",
             f"mkdir c && unshare -m sh -c 'mount -t tmpfs -o ro none c && NUMBA_CACHE_DIR=$PWD/c {SHORT}'"),
    homeless("a full folder",
             f"mkdir c && unshare -m sh -c 'mount -t tmpfs -o size=16k none c && NUMBA_CACHE_DIR=$PWD/c {SHORT}'"),
    homeless("a folder of everyone", f"mkdir -p c/kernels && chmod 777 c/kernels && NUMBA_CACHE_DIR=$PWD/c {SHORT}"),
    homeless("the working folder",
             f"mkdir -p packer/kernels && {SHORT}", HOME="/proc", XDG_CACHE_HOME="", NUMBA_CACHE_DIR=""),
    Attack("cache: a read-only root", f"unshare -m sh -c 'mount -o remount,bind,ro / && HOME=/root {SHORT}'", "", (0,)),
    Attack("file: a title in a header", "packer workload describe title.csv", "unknown column"),
    Attack("file: a title in a plan", "packer show title.json", "control characters"),
    Attack("file: directions and formulas in names", "packer workload describe names.csv", "", (0, 2)),
    Attack("file: a value of 20,000 characters", "packer workload describe long.csv", "expected a number|characters"),
    Attack("file: a number of 5,000 digits", "packer workload describe digits.json", "digits.json"),
    Attack("file: deep JSON", "packer workload describe deep.json", "deep.json"),
    Attack("file: a key of 80 kB", "packer profiles show deep.toml", "deep.toml"),
    Attack("file: brackets of TOML", "packer profiles show brackets.toml", "brackets.toml"),
    Attack("file: settings of 80 kB", "PACKER_CONFIG=deep.toml packer profiles list", "deep.toml"),
    Attack("file: aliases of YAML", "packer workload describe laughs.yaml", "aliases"),
    Attack("file: a gzip bomb", "packer workload describe bomb.csv.gz", "bomb.csv.gz"),
    Attack("file: zeros", "packer workload describe zeros.csv", "zeros.csv"),
    Attack("file: a damaged Parquet file", "packer workload describe cut.parquet", "cut.parquet"),
    Attack("file: a pipe", "mkfifo p.csv && packer workload describe p.csv", "p.csv"),
    Attack("file: a device", "ln -s /dev/zero z.csv && packer workload describe z.csv", "z.csv"),
    Attack("file: a link to itself", "ln -s l.csv l.csv && packer workload describe l.csv", "l.csv"),
    Attack("file: times beyond all clocks", "packer workload from-log log.jsonl --rank 8 -o w.csv", "log.jsonl",
           absent=("w.csv",)),
    Attack("file: a model of bad numbers", "packer solve f.csv --gpu h200 --model config", "config"),
    Attack("file: a device as a model", "packer solve f.csv --gpu h200 --model /dev/zero", "/dev/zero"),
    Attack("file: a state that is none", f"{STATE} > s.json && packer live apply plan.json --servers s.toml --dry-run",
           "s.json"),
    Attack("file: a state that is a device",
           f"{SERVERS} > s.toml && ln -s /dev/zero s.json && packer live apply plan.json --servers s.toml --dry-run",
           "s.json"),
    Attack("file: a state that links to itself",
           f"{SERVERS} > s.toml && ln -s s.json s.json && packer live apply plan.json --servers s.toml --dry-run",
           "", (2, 3)),
    Attack("file: a lock that is a folder",
           f"{SERVERS} > s.toml && mkdir s.json.lock && packer live apply plan.json --servers s.toml --dry-run",
           "refused"),
    Attack("file: braces that look into objects", "packer live apply plan.json --servers path.toml --dry-run",
           "braces"),
    Attack("plan: negative latencies", "packer evaluate negative.json --predictor tree", "negative.json|mean_ttft_ms"),
    Attack("plan: an empty objective", "packer evaluate empty.json --predictor tree", "objective"),
    Attack("plan: a profile that is another", "packer evaluate renamed.json --predictor tree",
           "fingerprint|renamed.json"),
    Attack("output: a link to itself", f"ln -s o.json o.json && {GPUS} -o o.json --force", "o.json"),
    Attack("output: the input", "packer solve f.csv --objective gpus --predictor tree -o f.csv --force", "f.csv",
           check=lambda folder, _: "" if b"adapter" in (folder / "f.csv").read_bytes() else "the input is gone"),
    Attack("output: one file twice", f"{GPUS} -o o --per-adapter ./o", "o", absent=("o",)),
    Attack("output: a full device", f"{GPUS} --json > /dev/full", "No space left"),
    Attack("output: a file as a folder", f"touch x && {GPUS} -o x/o.json", "x"),
    Attack("output: formulas", f"{GPUS.replace('f.csv', 'names.csv')} -o o.json --per-adapter a.csv -q", "", (0, 2),
           environment={"PACKER_QUOTE_FORMULAS": "1"}),
    Attack("output: shell in names", "packer solve shell.csv --objective gpus --predictor tree -o o.json -q && "
           "packer export o.json --format vllm -o s.sh && printf '#!/bin/sh\\nexit 0\\n' > bin/vllm && "
           "chmod +x bin/vllm && timeout 20 sh s.sh >/dev/null 2>&1; true", "", (0,), absent=("owned",)),
    Attack("output: markup in names", "packer solve html.csv --objective gpus --predictor tree -o o.json -q && "
           "packer report o.json -o r.html -q", "", (0,), check=no_script),
    Attack("output: a folder of init that is there", "mkdir new && touch new/plan.json && packer init f.csv --gpu h200 "
           "--model config -o new", "new|config"),
    plugin("exits", "ended the program by sys.exit"),
    plugin("raises", "raised RuntimeError"),
    plugin("recurses", "raised RecursionError"),
    plugin("nothing", "Expected a Solution of Mine.solve, got None"),
    plugin("interrupts", "raised GeneratorExit"),
    plugin("prints", "raised ValueError"),
    plugin("loading", "ended the program by sys.exit|can't be loaded"),
    Attack("environment: no threads", SHORT, "Numba refuses", environment={"NUMBA_NUM_THREADS": "0"}),
    Attack("environment: threads that are no number", SHORT, "NUMBA_NUM_THREADS", (0, 2),
           environment={"NUMBA_NUM_THREADS": "x"}),
    Attack("environment: a bad back end of matplotlib", f"{SHORT} --plot s.html", "", (0, 2),
           environment={"MPLBACKEND": "no"}),
    Attack("environment: no folder for temporary files", f"{GPUS} -o o.json -q", "", (0,),
           environment={"TMPDIR": "/none"}),
    Attack("environment: a terminal without width", "packer profiles list", "", (0,),
           environment={"COLUMNS": "0", "TERM": "no\x1b[2J", "LANG": "C", "PYTHONIOENCODING": "ascii"}),
    Attack("environment: settings that are a device", "packer profiles list", "/dev/zero",
           environment={"PACKER_CONFIG": "/dev/zero"}),
    Attack("option: numbers that are none", f"{GPUS} --rate-factor nan -o o.json", "rate", absent=("o.json",)),
    Attack("option: a number without bounds", f"{GPUS} --rate-factor 1e300 -o o.json", "rate", absent=("o.json",)),
    Attack("option: a setting without bounds", f"{GPUS} --set max-num-seqs=1e99 -o o.json", "max-num-seqs",
           absent=("o.json",)),
    *(
        Attack(f"option: {program} as Python", f"packer live doctor --python $(which {program})",
               "is no Python|can't be run")
        for program in ("true", "echo")
    ),
    Attack("option: a title as an adapter", "packer show plan.json --adapter \"$(printf '\\033]0;t\\007')\"",
           "[Uu]nknown adapter"),
    Attack("option: a port that is none",
           "packer live follow plan.json --servers path.toml --listen 127.0.0.1:99999", "99999|braces"),
    Attack("option: a rehearsal without requests", "packer live follow plan.json --simulate f.csv -o o.json",
           "", absent=("o.json",)),
    Attack("option: a GPU that is a path", "packer solve f.csv --gpu ../../etc/passwd --model config", "passwd"),
    Attack("option: a goal of 100,000 keys", f"{GPUS} --slo \"$(head -c 100000 /dev/zero | tr '\\0' ,)\" -o o.json",
           "", absent=("o.json",)),
    Attack("secret: in an address", f"packer live doctor --url http://user:{SECRET}@127.0.0.1:9",
           "127.0.0.1:9", (2, 3)),
    Attack("secret: in an address without a scheme", f"packer live doctor --url user:{SECRET}@127.0.0.1:9",
           "like http://"),
    Attack("secret: in an address in place of a file", f"packer workload describe http://user:{SECRET}@h/f.csv",
           "no such"),
    Attack("secret: in place of its variable's name",
           f"packer live doctor --url http://127.0.0.1:9 --api-key-env {SECRET}", "is not set"),
    Attack("secret: in the address of Prometheus",
           f"packer workload from-metrics --url http://user:{SECRET}@127.0.0.1:9 --rank 8 -o w.csv",
           "127.0.0.1:9", (2, 3)),
    Attack("secret: in a query",
           f"packer workload from-metrics --url 'http://127.0.0.1:9/?key={SECRET}' --rank 8 -o w.csv", "without \\?"),
    Attack("secret: in a file of servers", "packer live apply plan.json --servers servers.toml --dry-run", "", (2, 3)),
    Attack("secret: a key of two lines",
           "printf 'a\\nb' > k && packer live doctor --url http://127.0.0.1:9 --api-key-env @k", "key of one line"),
    *(
        Attack(f"signal: SIGINT after {ms} ms",
               f"timeout -s INT 0.{ms:03d} packer profiles list > /dev/null; test $? -ge 124 -o $? -le 2",
               "", (0,))
        for ms in (20, 60, 120, 200, 300, 400)
    ),
    # A shell starts what is in the background without SIGINT.
    Attack("signal: two SIGINTs", f"{sys.executable} twice.py", "interrupted", (130,), absent=("s.csv",)),
]  # fmt: skip
