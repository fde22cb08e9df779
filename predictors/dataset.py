"""Datasets: scenarios judged by the twin. Built in parts, each written whole, so that nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from packer.errors import FileFormatError, IncompatibleError, MissingDependencyError
from packer.io.files import atomic_path, check_writable, write_text
from packer.predictors.features import NAMES
from packer.predictors.scenarios import scenario
from packer.profile import Profile
from packer.twin.until_clear import evaluate_until_clear

if TYPE_CHECKING:
    import polars as pl

FORMAT = "packer dataset 1"
PART_ROWS = 32
MAX_OUTSTANDING = 26_800
"""Ceiling of outstanding requests, as the client of the measured runs had it."""

LABELS = (
    "served_share",
    "mean_itl_ms",
    "p99_itl_ms",
    "mean_tpot_ms",
    "mean_ttft_ms",
    "median_ttft_ms",
    "p99_ttft_ms",
)
Backend = Literal["processes", "ray"]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Spec:
    """What a dataset is: enough to build it again, byte for byte."""

    profile: str
    fingerprint: str
    rows: int
    seed: int
    features: tuple[str, ...] = NAMES
    format: str = FORMAT

    def text(self) -> str:
        """As JSON, the same for equal specs."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A dataset in memory: features float64 (n, F), labels by name float64 (n,), family and group per row.

    TTFT labels are NaN where the run was too short to tell them.
    """

    spec: Spec
    features: npt.NDArray[np.float64]
    labels: dict[str, npt.NDArray[np.float64]]
    family: npt.NDArray[np.str_]
    group: npt.NDArray[np.str_]

    def __len__(self) -> int:
        return len(self.features)

    @property
    def digest(self) -> str:
        """Hash of the content: 16 hex digits."""
        content = hashlib.sha256(self.spec.text().encode())
        content.update(np.ascontiguousarray(self.features).tobytes())
        for name in LABELS:
            content.update(np.ascontiguousarray(self.labels[name]).tobytes())
        return content.hexdigest()[:16]

    @property
    def starved(self) -> npt.NDArray[np.bool_]:
        """Served share below the threshold, bool (n,)."""
        from packer.bin import STARVATION_THRESHOLD

        return self.labels["served_share"] < STARVATION_THRESHOLD


def row_of(index: int, profile: Profile, seed: int) -> dict[str, Any]:
    """One scenario, judged."""
    case = scenario(index, profile, seed)
    found = evaluate_until_clear(
        case.workload,
        profile,
        case.settings,
        seed=(seed * 1_000_003 + index) % 2**31,
        max_outstanding=MAX_OUTSTANDING,
        edge_seeds=1,
    )
    row: dict[str, Any] = {"index": index, "family": case.family, "group": case.group}
    row |= dict(zip(NAMES, case.features(profile).tolist(), strict=True))
    row["served_share"] = found.evaluation.served_share
    row |= {name: float(getattr(found.evaluation, name)) for name in LABELS[1:]}
    if found.extrapolated:
        row |= dict.fromkeys(("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"), float("nan"))
    row |= {"duration_s": found.duration_s, "runs": found.runs}
    return row


def part_of(number: int, spec: Spec, profile: Profile) -> list[dict[str, Any]]:
    """The rows of one part."""
    start = number * PART_ROWS
    return [row_of(i, profile, spec.seed) for i in range(start, min(start + PART_ROWS, spec.rows))]


def build_dataset(
    profile: Profile,
    path: str | os.PathLike[str],
    *,
    rows: int,
    seed: int = 0,
    jobs: int = -1,
    backend: Backend = "processes",
    force: bool = False,
    progress: Progress = lambda _what, _done, _total: None,
) -> Spec:
    """Judge `rows` scenarios and write them as Parquet. An interrupted build goes on where it stopped.

    Parameters
    ----------
    profile
        The server.
    path
        The Parquet file. Until it is complete, finished parts stand in the directory `<path>.parts`.
    rows, seed
        How many scenarios, and their seed: the same give the same file.
    jobs
        Processes; −1 means one per core.
    backend
        "processes" on this machine, or "ray" on the Ray cluster that `ray.init` finds.
    force
        Overwrite an existing file.

    Raises
    ------
    IncompatibleError
        The directory of parts belongs to another dataset.
    MissingDependencyError
        Ray is not installed.
    """
    target = check_writable(path, force=force)
    spec = Spec(profile.name, profile.fingerprint, rows, seed)
    folder = target.with_name(target.name + ".parts")
    _claim(folder, spec)
    numbers = range(-(-rows // PART_ROWS))
    missing = [k for k in numbers if not _part(folder, k).exists()]
    done = rows - sum(_rows_in(k, rows) for k in missing)
    progress("scenarios", done, rows)
    for number, part in _judged(missing, spec, profile, jobs, backend):
        _write_part(_part(folder, number), part)
        done += len(part)
        progress("scenarios", done, rows)
    _merge(folder, spec, target)
    shutil.rmtree(folder)
    return spec


def _rows_in(number: int, rows: int) -> int:
    return min(PART_ROWS, rows - number * PART_ROWS)


def _claim(folder: Path, spec: Spec) -> None:
    """Make the directory of parts, or check that it is that of the same dataset."""
    folder.mkdir(exist_ok=True)
    note = folder / "spec.json"
    if not note.exists():
        if any(not item.name.startswith(".") for item in folder.iterdir()):  # dots: a killed write's rest
            raise IncompatibleError(
                f"{folder}: expected parts of a dataset, got other files: move them away."
            )
        write_text(note, spec.text())
    elif note.read_text("utf-8") != spec.text():
        raise IncompatibleError(
            f"{folder} holds parts of another dataset (profile, rows, seed or features differ): remove "
            "it, or build into another file."
        )


def _part(folder: Path, number: int) -> Path:
    return folder / f"part-{number:06d}.parquet"


def _judged(
    missing: list[int], spec: Spec, profile: Profile, jobs: int, backend: Backend
) -> Any:  # an iterator of (number, rows)
    from joblib import Parallel, delayed, effective_n_jobs, parallel_config

    if backend == "ray":
        _register_ray()
    with parallel_config(backend="ray" if backend == "ray" else "loky", n_jobs=jobs):
        at_once = 4 * effective_n_jobs(jobs)
        with Parallel() as pool:
            for start in range(0, len(missing), at_once):
                batch = missing[start : start + at_once]
                yield from zip(batch, pool(delayed(part_of)(k, spec, profile) for k in batch), strict=True)


def _register_ray() -> None:
    try:
        from ray.util.joblib import register_ray
    except ImportError:
        raise MissingDependencyError("The Ray backend needs ray: pip install 'adapter-packer[ray]'") from None
    register_ray()


def _write_part(path: Path, rows: list[dict[str, Any]]) -> None:
    import polars as pl

    with atomic_path(path) as temporary:
        pl.DataFrame(rows).write_parquet(temporary)


def _merge(folder: Path, spec: Spec, target: Path) -> None:
    import polars as pl

    numbers = range(-(-spec.rows // PART_ROWS))
    frame = pl.concat([pl.read_parquet(_part(folder, k)) for k in numbers])
    with atomic_path(target) as temporary:
        frame.write_parquet(temporary, metadata={"packer": spec.text()})


def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Read what `build_dataset` wrote.

    Raises
    ------
    FileFormatError
        It is no dataset, was cut short, or has missing or unknown columns.
    """
    import polars as pl

    frame, text = _parquet(path)
    try:
        raw = json.loads(text)
        spec = Spec(**{**raw, "features": tuple(raw["features"])})
    except (TypeError, KeyError, ValueError):
        raise FileFormatError("expected a dataset written by packer dataset build.", path=path) from None
    if spec.format != FORMAT:
        raise FileFormatError(f"expected the format {FORMAT!r}, got {spec.format!r}.", path=path)
    if spec.features != NAMES:
        unknown = sorted(set(spec.features) - set(NAMES)) or "none"
        absent = sorted(set(NAMES) - set(spec.features)) or "none"
        raise FileFormatError(
            f"its features are not this version's: unknown {unknown}, missing {absent}: build it again.",
            path=path,
        )
    for column in (*NAMES, *LABELS, "family", "group", "index"):
        if column not in frame.columns:
            raise FileFormatError("the column is missing.", path=path, column=column)
    if frame["index"].to_list() != list(range(spec.rows)):
        raise FileFormatError(
            f"expected rows 0 … {spec.rows - 1} once each, got {frame.height}: it was cut short or edited.",
            path=path,
        )
    return Dataset(
        spec,
        frame.select(pl.col(name).cast(pl.Float64) for name in NAMES).to_numpy(),
        {name: frame[name].cast(pl.Float64).to_numpy() for name in LABELS},
        frame["family"].to_numpy().astype(np.str_),
        frame["group"].to_numpy().astype(np.str_),
    )


def _parquet(path: str | os.PathLike[str]) -> tuple[pl.DataFrame, str]:
    import polars as pl

    if not Path(path).is_file():
        raise FileFormatError("there is no such file.", path=path)
    try:
        return pl.read_parquet(Path(path)), pl.read_parquet_metadata(Path(path)).get("packer", "")
    except (pl.exceptions.PolarsError, OSError) as error:
        raise FileFormatError(f"it is no Parquet file, or it was cut short: {error}.", path=path) from None
