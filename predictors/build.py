"""Build data sets in parts, each written whole; an interrupted build loses at most one batch of parts."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from packer.errors import FileFormatError, IncompatibleError, MissingDependencyError
from packer.io.files import check_writable, claimed, read_bytes, read_text, write_bytes, write_text
from packer.io.frames import pl
from packer.io.parquet import decoded, parquet_bytes, write_frame
from packer.predictors.dataset import LABELS, TTFT_LABELS, Spec, dataset_of
from packer.predictors.features import NAMES
from packer.predictors.scenarios import scenario
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.twin.until_clear import evaluate_until_clear

PART_ROWS = 32
_WATCH = "packer-watch-parent"
MAX_OUTSTANDING = 26_800  # Maximum number of outstanding requests, as in the client of the measured runs.
Backend = Literal["processes", "ray"]


def row_of(index: int, profile: Profile, seed: int) -> dict[str, Any]:
    """Simulate one scenario and return its row."""
    case = scenario(index, profile, seed)
    own: dict[str, Any] = {"seed": (seed * 1_000_003 + index) % 2**31, "max_outstanding": MAX_OUTSTANDING}
    found = evaluate_until_clear(case.workload, profile, case.settings, edge_seeds=1, **own)
    row: dict[str, Any] = {"index": index, "family": case.family, "group": case.group}
    row |= dict(zip(NAMES, case.features(profile).tolist(), strict=True))
    row |= {name: float(getattr(found.evaluation, name)) for name in LABELS}
    if found.extrapolated:
        row |= dict.fromkeys(TTFT_LABELS, float("nan"))
    row |= {"duration_s": found.duration_s, "runs": found.runs}
    return row


def part_of(number: int, spec: Spec, profile: Profile, parent: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of one part; a worker process ends when `parent`, the process that started it, is gone."""
    if parent is not None and parent != os.getpid():
        _end_with(parent)
    start = number * PART_ROWS
    return [row_of(i, profile, spec.seed) for i in range(start, min(start + PART_ROWS, spec.rows))]


def build_dataset(
    profile: Profile, path: str | os.PathLike[str], *, rows: int, seed: int = 0, jobs: int = -1,
    backend: Backend = "processes", force: bool = False, progress: Progress = silent,
) -> Spec:  # fmt: skip
    """Simulate `rows` scenarios and write them as Parquet. An interrupted build continues from its finished parts.

    `profile`: the server.
    `path`: the Parquet file. Until it is complete, finished parts are in the directory `<path>.parts`.
    `rows`, `seed`: number of scenarios and their seed; the same values give the same file.
    `jobs`: processes; −1 means one per core.
    `backend`: "processes" on this machine, or "ray" on the Ray cluster that `ray.init` finds.
    `force`: overwrite an existing file.
    Raises `IncompatibleError`: the directory of parts belongs to another data set; `FileFormatError`: a part is
    damaged; `OutputError`: the file or a part can't be written, or another process builds into the same file;
    `MissingDependencyError`: Ray is not installed.
    """
    target = check_writable(path, force=force)
    spec = Spec(profile.name, profile.fingerprint, rows, seed)
    with claimed(target.with_name(target.name + ".parts")) as folder:
        _check_note(folder, spec)
        parts = [folder / f"part-{k:06d}.parquet" for k in range(-(-rows // PART_ROWS))]
        missing = [k for k, part in enumerate(parts) if not part.exists()]
        done = rows - sum(min(PART_ROWS, rows - k * PART_ROWS) for k in missing)
        progress("scenarios", done, rows)
        for number, found in _simulated(missing, spec, profile, jobs, backend):
            _write_part(parts[number], found)
            done += len(found)
            progress("scenarios", done, rows)
        try:
            frame, _ = decoded([read_bytes(part) for part in parts])
            notes = {"packer": spec.text(), "digest": dataset_of(frame, spec).digest}
        except FileFormatError as error:
            raise FileFormatError(f"{error} Remove the folder and build again.", path=folder) from None
        write_bytes(target, parquet_bytes(frame, notes), force=force)
        shutil.rmtree(folder, ignore_errors=True)
    return spec


def _check_note(folder: Path, spec: Spec) -> None:
    """Write the specification into a new directory, or check that the directory has the same specification."""
    note = folder / "spec.json"
    if not note.exists():
        if any(not item.name.startswith(".") for item in folder.iterdir()):  # dots: left by a killed write
            raise IncompatibleError(f"{folder}: expected parts of a data set, got other files: move them away.")
        write_text(note, spec.text())
    elif read_text(note) != spec.text():
        rule = f"{folder} holds parts of another data set (profile, rows, seed, features or format differ): remove it,"
        raise IncompatibleError(f"{rule} or build into another file.")


def _simulated(
    missing: list[int], spec: Spec, profile: Profile, jobs: int, backend: Backend
) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield number and rows of each missing part."""
    from joblib import Parallel, delayed, effective_n_jobs, parallel_config

    if backend == "ray":
        register_ray()
    parent = None if backend == "ray" else os.getpid()
    with parallel_config(backend="ray" if backend == "ray" else "loky", n_jobs=jobs):
        at_once = 4 * effective_n_jobs(jobs)
        # Each part is written as soon as it is there, where the backend hands parts on one by one.
        with Parallel(return_as="list" if backend == "ray" else "generator") as pool:
            for start in range(0, len(missing), at_once):
                batch = missing[start : start + at_once]
                found = pool(delayed(part_of)(k, spec, profile, parent) for k in batch)
                yield from zip(batch, found, strict=True)


def register_ray() -> None:
    """Let joblib run on the Ray cluster that `ray.init` finds."""
    try:
        from ray.util.joblib import register_ray as register
    except ImportError:
        raise MissingDependencyError("The Ray backend needs ray: pip install 'adapter-packer[ray]'") from None
    register()  # type: ignore[no-untyped-call, unused-ignore]


def _end_with(parent: int) -> None:
    """End this worker process soon after its parent process has ended, even if the parent was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if not any(thread.name == _WATCH for thread in threading.enumerate()):
        threading.Thread(target=watch, name=_WATCH, daemon=True).start()


def _write_part(path: Path, rows: list[dict[str, Any]]) -> None:
    write_frame(pl.DataFrame(rows), path)
