"""Attacks on packer's files, options, plug-ins and environment: each ends with words and an exit code, nothing else.

    python benchmarks/attacks/run.py [--only NAME] [--json results.json]

Each attack of `table.py` is a line of shell in a folder of its own. A fault is: another exit code or other words than
expected, a traceback, a character that a terminal acts on, a quoted value of more than 200 characters, a temporary
file that is left, a file that should not be there, a secret in what is printed or written, more than 120 s of CPU time
or 1.5 GB.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from table import ATTACKS, SECRET, Attack, prepare

from packer.testing.records import record_text

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; sys.argv[0] = 'packer'; from packer.cli import main; main()"
LIMIT_S, LIMIT_MB, LIMIT_TEXT, WAIT_S = 120, 1500, 4000, 900
ACTED_ON = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
COLOURS = re.compile("\x1b\\[[0-9;]*m")


def limited() -> None:
    """Before a command: it may not use more CPU time than an attack is worth, and hears signals."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a run in the background ignores it
    resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S))


def faults_of(attack: Attack, folder: Path) -> list[str]:
    """Run an attack; what is wrong afterwards."""
    environment = os.environ | {"PACKER_CONFIG": "", "PYTHONPATH": str(ROOT)} | attack.environment
    environment = {name: value.replace("FOLDER", str(folder)) for name, value in environment.items()}
    # The shell in $(…) of an attack needs packer, too, and a namespace a program rather than a function.
    script = folder / "bin" / "packer"
    script.parent.mkdir(exist_ok=True)
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -c "{PROGRAM}" "$@"\n')
    script.chmod(0o755)
    environment["PATH"] = f"{script.parent}:{os.environ['PATH']}"
    before = {path for path in folder.rglob("*") if path.exists()}
    process = subprocess.Popen(
        ["sh", "-c", attack.line], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, preexec_fn=limited,
    )  # fmt: skip
    try:
        out, err = (data.decode("utf-8", "replace") for data in process.communicate(timeout=WAIT_S))
    except subprocess.TimeoutExpired:
        process.kill()
        return [f"no end after {WAIT_S} s"]
    said = re.sub(r"\s+", " ", out + err)
    wrong = []
    if process.returncode not in attack.codes:
        wrong.append(f"exit code {process.returncode}, expected {attack.codes}: {said[-300:]}")
    if not re.search(attack.says, said):
        wrong.append(f"expected {attack.says!r}, got {said[-300:]!r}")
    # A signal may come before Python has begun with packer's first line.
    traced = "Traceback" in err and ("signal" not in attack.name or str(ROOT / "packer") in err)
    if traced or "internal error" in err:
        wrong.append(f"traceback: {err[-300:]}")
    if found := ACTED_ON.search(COLOURS.sub("", out + err)):
        wrong.append(f"prints {found[0]!r}")
    if len(err) > LIMIT_TEXT:
        wrong.append(f"a message of {len(err)} characters")
    if SECRET in out + err:
        wrong.append("prints a secret")
    for path in folder.rglob("*"):
        if path.name.startswith(".packer-"):
            wrong.append(f"{path.name} is left")
        elif path not in before and path.is_file() and SECRET.encode() in path.read_bytes():
            wrong.append(f"{path.name} holds a secret")
    wrong += [f"{name} was written" for name in attack.absent if (folder / name).exists()]
    if attack.check is not None and (more := attack.check(folder, out)):
        wrong.append(more)
    return wrong


def main() -> None:
    """Run them all, say what is wrong, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--json", type=Path, help="write the record here")
    given = parser.parse_args()
    record: dict[str, list[str]] = {}
    peak_mb = 0
    with tempfile.TemporaryDirectory(prefix="packer-attack-") as name:
        home = Path(name) / "home"
        home.mkdir()
        prepare(home, PROGRAM, ROOT)
        for attack in ATTACKS:
            if given.only not in attack.name:
                continue
            folder = Path(name) / "folder"
            shutil.copytree(home, folder)
            record[attack.name] = faults_of(attack, folder)
            peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
            print(f"{attack.name}: {'; '.join(record[attack.name]) or 'held'}", flush=True)
            shutil.rmtree(folder)
    failed = sum(bool(wrong) for wrong in record.values()) + (peak_mb > LIMIT_MB)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{len(record)} attacks, {failed} faults, largest process {peak_mb:,} MB, {used.ru_utime:.0f} s of CPU time")
    if given.json is not None:
        rows = {"attacks": len(record), "faults": failed, "peak_mb": peak_mb, "found": record}
        given.json.write_text(record_text(rows) + "\n", "utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
