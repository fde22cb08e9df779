"""Fuzzing of everything that reads a user's file: damaged and changed files are read or refused, nothing else.

    python benchmarks/fuzz/run.py --cases 100000 --seed 0

A case is a reader, a valid file for it and a few changes, all drawn from (seed, case): the same numbers give
the same file. What was read is used (simulated, exported, evaluated). A finding is any exception other than
`PackerError`, a process that dies, and a case of more than 20 s of CPU time or 3 GiB. `--first N --cases 1`
repeats case N.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

from targets import Target, targets

from packer.errors import PackerError

LIMIT_S = 20
WAIT_S = 300
LIMIT_BYTES = 3 << 30
RARE = 20
BEFORE = "before the first case"


@dataclass
class Tally:
    """What happened: cases by reader that were read and refused, and the findings."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    findings: list[str] = field(default_factory=list)


def chosen(case: int, common: list[Target], rare: list[Target]) -> Target:
    """The reader of a case: one after the other, a rare one once in `RARE` rounds."""
    turn, place = divmod(case, len(common) + 1)
    if place < len(common):
        return common[place]
    return rare[turn // RARE % len(rare)] if rare and (turn % RARE == 0 or not common) else common[place - 1]


def one_case(target: Target, seed: int, case: int, folder: Path) -> bool:
    """Change the file of a reader and read it; whether it was read. Raises whatever is a finding."""
    rng = np.random.default_rng([seed, case])
    data = target.changes[rng.integers(len(target.changes))](target.seed, rng)
    path = folder / target.file
    path.write_bytes(data)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                target.use(target.read(str(path)))
    except PackerError as error:
        text = str(error)
        assert len(text) < 4000, f"a message of {len(text)} characters"
        return False
    return True


def cases(seed: int, first: int, last: int, folder: Path, only: str = "") -> Tally:
    """Run the cases first … last − 1 in this process, of all readers or of those whose name contains `only`."""
    everything = [target for target in targets() if only in target.name]
    common = [target for target in everything if not target.rare]
    rare = [target for target in everything if target.rare]
    for target in everything:  # imports and compilation are no part of a case
        (folder / target.file).write_bytes(target.seed)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            target.use(target.read(str(folder / target.file)))
    tally = Tally()
    progress = folder / "progress"
    for case in range(first, last):
        target = chosen(case, common, rare)
        progress.write_text(f"{case} {target.name}")
        started = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
        signal.alarm(WAIT_S)
        try:
            counter = tally.read if one_case(target, seed, case, folder) else tally.refused
            counter[target.name] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            tally.findings.append(
                f"case {case}, {target.name}: {type(error).__name__}: {str(error)[:200]} "
                f"({Path(where.filename).name}:{where.lineno})"
            )
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        tally.slowest_s = max(tally.slowest_s, time.process_time() - started)
    return tally


def _child(seed: int, first: int, last: int, folder: Path, out: Path, only: str) -> None:
    def too_long(_signal: int, _frame: object) -> None:
        raise TimeoutError(f"more than {LIMIT_S} s of CPU time or {WAIT_S} s")

    signal.signal(signal.SIGPROF, too_long)
    signal.signal(signal.SIGALRM, too_long)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
    out.write_text(json.dumps(vars(cases(seed, first, last, folder, only))))


def contained(seed: int, first: int, last: int, only: str = "") -> Tally:
    """Run cases in child processes: one that dies is a finding, and the next one goes on behind its case."""
    total = Tally()
    with tempfile.TemporaryDirectory(prefix="packer-fuzz-") as name:
        folder = Path(name)
        (folder / "progress").write_text(f"{first} {BEFORE}")
        while first < last:
            out = folder / "tally.json"
            out.unlink(missing_ok=True)
            pid = os.fork()
            if pid == 0:
                try:
                    _child(seed, first, last, folder, out, only)
                except BaseException:
                    traceback.print_exc()
                os._exit(0)
            os.waitpid(pid, 0)
            if out.exists():
                part = json.loads(out.read_text())
                first = last
                total.read += Counter(part["read"])
                total.refused += Counter(part["refused"])
                total.slowest_s = max(total.slowest_s, part["slowest_s"])
                total.findings += part["findings"]
            else:
                died, _, reader = (folder / "progress").read_text().partition(" ")
                if reader == BEFORE:
                    sys.exit("the readers and their valid files can't be made")
                total.findings.append(f"case {died}, {reader}: the process died")
                first = int(died) + 1
    return total


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="readers whose name contains this")
    parser.add_argument("--json", type=Path, help="write the figures here")
    given = parser.parse_args()
    started = time.monotonic()
    total = Tally()
    last = given.first + given.cases
    for first in range(given.first, last, 5000):
        part = contained(given.seed, first, min(first + 5000, last), given.only)
        total.read += part.read
        total.refused += part.refused
        total.slowest_s = max(total.slowest_s, part.slowest_s)
        total.findings += part.findings
        print(f"{first + 5000 - given.first} cases, {time.monotonic() - started:.0f} s", flush=True)
        for finding in part.findings:
            print(finding, flush=True)
    for name in sorted(total.read | total.refused):
        print(f"{name:20} read {total.read[name]:7,}  refused {total.refused[name]:7,}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024
    print(f"{len(total.findings)} findings, slowest case {total.slowest_s:.1f} s, largest process {peak:,} MB")
    if given.json is not None:
        given.json.write_text(json.dumps(vars(total), indent=2))
    sys.exit(1 if total.findings else 0)


if __name__ == "__main__":
    main()
