"""Datasets: scenarios, resuming, damage."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from packer.adapter import Adapter
from packer.errors import FileFormatError, IncompatibleError, MissingDependencyError, OutputError
from packer.io.files import claimed
from packer.predictors import build as module
from packer.predictors import scenarios
from packer.predictors.build import PART_ROWS, build_dataset
from packer.predictors.dataset import FORMAT, Dataset, Spec, read_dataset
from packer.predictors.features import COLUMN
from packer.predictors.scenarios import LARGE, RATES, SHARES, SIZES, scenario
from packer.profile import Profile
from packer.twin.memory.policy import memory_error

ROWS = 9


@pytest.fixture(scope="module", autouse=True)
def _short(short_runs: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Rows are of short simulations: what becomes of the rows is tested."""
    with short_runs():
        yield


@pytest.fixture(scope="module")
def built(small: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small dataset."""
    path = tmp_path_factory.mktemp("built") / "d.parquet"
    build_dataset(small, path, rows=ROWS, seed=4, jobs=1)
    return path


def test_scenarios_are_repeatable_and_varied(small: Profile) -> None:
    """The same index gives the same scenario; all families come, with lengths far from the paper's."""
    first, again = [[scenario(i, small, 1) for i in range(60)] for _ in range(2)]
    assert [case.workload.adapters for case in first] == [case.workload.adapters for case in again]
    assert {case.family for case in first} == set(SHARES)
    prompts = [case.workload.input_tokens.mean for case in first]
    assert min(prompts) < 40
    assert max(prompts) > 1000


def test_adapters_are_made_once_and_for_servers_that_start(small: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that does not start costs no adapters, and another rate no new ones; a GPU without any is named."""
    made: list[str] = []

    def counted(name: str, *rest: Any) -> Adapter:
        made.append(name)
        return Adapter(name, *rest)

    monkeypatch.setattr(scenarios, "Adapter", counted)
    assert sum(len(scenario(i, small, 1).workload) for i in range(60)) > 0.9 * len(made)
    monkeypatch.setattr(scenarios, "memory_error", lambda *_: "too large")
    with pytest.raises(IncompatibleError, match=r"No server of .* starts"):
        scenario(0, small, 1)


def test_grid_scenarios_are_the_papers(small: Profile) -> None:
    """Grid rows take three rates and three sizes from the paper's sets."""
    cases = [case for i in range(80) if (case := scenario(i, small, 2)).family == "grid"]
    assert cases
    for case in cases:
        assert set(case.workload.rates.tolist()) <= set(RATES)
        assert set(case.workload.ranks.tolist()) <= set(SIZES)
        assert case.settings.max_loras <= len(case.workload)


def test_large_servers_are_among_them(small: Profile) -> None:
    """Of `large` scenarios every one has thousands of adapters and starts; loads lie on both sides of the capacity."""
    cases = [case for i in range(200) if (case := scenario(i, small, 5)).family == "large"]
    counts = [len(case.workload) for case in cases]
    assert LARGE[0] <= min(counts) < 1000
    assert 3000 < max(counts) <= LARGE[1]
    assert all(memory_error(small, case.settings) is None for case in cases)
    loads = [case.features(small)[COLUMN["load_factor"]] for case in cases]
    assert min(loads) < 0.7
    assert max(loads) > 1.1


def test_every_scenario_starts(data: Dataset) -> None:
    """Memory errors are computed, not learned: no row holds one."""
    assert np.all(data.labels["served_share"] > 0)
    assert np.isfinite(data.features).all()
    assert 0.1 < data.starved.mean() < 0.9


def test_an_interrupted_build_goes_on(
    built: Path, small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill between two parts the same command finishes: no row lost, none twice, the same bytes."""
    path = tmp_path / "d.parquet"
    written: list[int] = []
    write = module._write_part
    monkeypatch.setattr(module, "PART_ROWS", 4)

    def killed(part: Path, rows: list[dict[str, object]]) -> None:
        if written:
            raise KeyboardInterrupt
        write(part, rows)
        written.append(len(rows))

    monkeypatch.setattr(module, "_write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        build_dataset(small, path, rows=ROWS, seed=4, jobs=1)
    assert not path.exists()
    monkeypatch.setattr(module, "_write_part", write)
    seen: list[int] = []
    build_dataset(small, path, rows=ROWS, seed=4, jobs=1, progress=lambda _what, done, _total: seen.append(done))
    assert seen == [4, 8, ROWS]
    assert path.read_bytes() == built.read_bytes()
    assert not path.with_name("d.parquet.parts").exists()


@pytest.mark.parametrize(("seed", "made_by"), [(0, FORMAT), (1, "packer dataset 2")])
def test_parts_of_another_dataset_are_not_mixed(small: Profile, tmp_path: Path, seed: int, made_by: str) -> None:
    """Parts of another seed, or of a version that drew other scenarios for it, are refused, not overwritten."""
    path = tmp_path / "d.parquet"
    with claimed(tmp_path / "d.parquet.parts") as folder:
        spec = Spec(small.name, small.fingerprint, 10, seed, format=made_by)
        (folder / "spec.json").write_text(spec.text())
    with pytest.raises(IncompatibleError, match="another data set"):
        build_dataset(small, path, rows=10, seed=1, jobs=1)


def test_two_builds_into_one_file(small: Profile, tmp_path: Path) -> None:
    """The second one is refused while the first one runs, and goes on with its parts if that was killed."""
    path = tmp_path / "d.parquet"
    with (
        claimed(tmp_path / "d.parquet.parts"),
        pytest.raises(OutputError, match="another process writes"),
    ):
        build_dataset(small, path, rows=10, seed=0, jobs=1)
    assert not path.exists()


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    """No worker outlives the build: after kill −9 of the build its workers are gone in seconds, busy as they are."""
    code = (
        "import os, pathlib, time\n"
        "from packer.predictors import build\n"
        "from packer.testing.analytic import small_profile\n"
        "def busy(*_):\n"
        f"    pathlib.Path({str(tmp_path)!r}, f'{{os.getpid()}}.busy').touch()\n"
        "    time.sleep(60)\n"
        "def part_of(*arguments):  # in a worker\n"
        "    from packer.predictors import build\n"
        "    build.row_of = busy\n"
        "    return build.part_of(*arguments)\n"
        "build.part_of = part_of\n"
        f"build.build_dataset(small_profile(), {str(tmp_path / 'd.parquet')!r}, rows=1_000, jobs=2)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    while len(workers := [file.stem for file in tmp_path.glob("*.busy")]) < 2 and time.monotonic() < end:
        time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert len(workers) == 2
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert not (tmp_path / "d.parquet").exists()


@pytest.mark.parametrize("fits", [0, 1, 2])
def test_a_full_disk_is_an_output_error(
    fits: int, small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file is the first that does not fit: an OutputError, and nothing that looks complete."""
    write = Path.write_bytes
    written: list[Path] = []

    def full(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) > fits:
            write(path, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left"):
        build_dataset(small, tmp_path / "d.parquet", rows=3, jobs=1)
    assert not (tmp_path / "d.parquet").exists()
    assert not list(tmp_path.rglob("*.tmp"))


def test_an_existing_file_is_kept(built: Path, small: Profile) -> None:
    """Without force nothing is overwritten, and that is said before the work."""
    with pytest.raises(OutputError, match="exists"):
        build_dataset(small, built, rows=3, jobs=1)


def test_a_cut_file_is_refused(built: Path, tmp_path: Path) -> None:
    """A dataset that lost its end is no dataset."""
    path = tmp_path / "cut.parquet"
    path.write_bytes(built.read_bytes()[:-2000])
    with pytest.raises(FileFormatError, match="cut short"):
        read_dataset(path)


CHANGES: dict[str, tuple[Callable[[pl.DataFrame], pl.DataFrame], str]] = {
    "rows taken out": (lambda frame: frame.head(7), r"expected rows 0 … 8 once each, got 7"),
    "no rows": (lambda frame: frame.head(0), "got 0"),
    "rows swapped": (lambda frame: frame.reverse(), "once each"),
    "column gone": (lambda frame: frame.drop("capacity"), "column 'capacity': this column is missing"),
    "column of text": (lambda frame: frame.with_columns(step=pl.lit("x")), "column 'step': expected numbers"),
    "names of numbers": (lambda frame: frame.with_columns(group=pl.lit(1)), "column 'group': expected text"),
    "label empty": (lambda frame: frame.with_columns(mean_itl_ms=pl.lit(None, pl.Float64)), "mean_itl_ms"),
    "label NaN": (lambda frame: frame.with_columns(served_share=pl.lit(float("nan"))), "served_share"),
    "label negative": (lambda frame: frame.with_columns(p99_itl_ms=pl.lit(-1.0)), "p99_itl_ms"),
    "one TTFT NaN": (
        lambda frame: frame.with_columns(
            p99_ttft_ms=pl.lit(float("nan")), mean_ttft_ms=pl.lit(1.0), median_ttft_ms=pl.lit(1.0)
        ),
        "p99_ttft_ms",
    ),
    "feature infinite": (lambda frame: frame.with_columns(step=pl.lit(float("inf"))), "finite features"),
    "label changed": (lambda frame: frame.with_columns(mean_itl_ms=pl.lit(1.0)), "does not match its hash"),
    "group changed": (lambda frame: frame.with_columns(group=pl.lit("g")), "does not match its hash"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_tables_are_refused(built: Path, tmp_path: Path, change: str) -> None:
    """Columns and rows that were edited are refused with the rule that they break, or by the hash."""
    edit, says = CHANGES[change]
    notes = pl.read_parquet_metadata(built)
    path = tmp_path / "changed.parquet"
    kept = {key: notes[key] for key in ("packer", "digest")}
    edit(pl.read_parquet(built)).write_parquet(path, metadata=kept)
    with pytest.raises(FileFormatError, match=says):
        read_dataset(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("capacity", "horsepower", "unknown horsepower; missing capacity"),
        ('"rows": 9', '"rows": 0', "rows"),
        ('"rows": 9', '"rows": "9"', "rows"),
        ('"seed": 4', '"seed": 5', "hash"),
        (FORMAT, "packer dataset 2", "build it again"),
        ("{", "[", "expected JSON"),
    ],
)
def test_changed_metadata_is_refused(built: Path, tmp_path: Path, old: str, new: str, says: str) -> None:
    """The specification in the file is data of a user, too."""
    notes = pl.read_parquet_metadata(built)
    path = tmp_path / "changed.parquet"
    changed = {"packer": notes["packer"].replace(old, new, 1), "digest": notes["digest"]}
    assert changed["packer"] != notes["packer"]
    pl.read_parquet(built).write_parquet(path, metadata=changed)
    with pytest.raises(FileFormatError, match=says):
        read_dataset(path)


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bytes_are_refused(built: Path, tmp_path: Path, seed: int) -> None:
    """Damage that makes the decoder panic or abort ends in words, and damage that it reads over in the hash."""
    rng = np.random.default_rng(seed)
    data = bytearray(built.read_bytes())
    for at in rng.integers(4, len(data) - 8, 4 + 30 * (seed % 2)):
        data[at] ^= int(rng.integers(1, 256))
    path = tmp_path / "flipped.parquet"
    path.write_bytes(bytes(data))
    with pytest.raises(FileFormatError):
        read_dataset(path)


def test_a_damaged_part_is_named(small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part with flipped bytes ends the build in words that say what to do."""
    write = module._write_part

    def damaged(part: Path, rows: list[dict[str, object]]) -> None:
        write(part, rows)
        data = part.read_bytes()
        part.write_bytes(data[:200] + b"x" * 40 + data[240:-9] + b"\xff" + data[-8:])

    monkeypatch.setattr(module, "_write_part", damaged)
    with pytest.raises(FileFormatError, match="Remove the folder and build again"):
        build_dataset(small, tmp_path / "d.parquet", rows=3, seed=4, jobs=1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Files that are no datasets get one clear sentence."""
    with pytest.raises(FileFormatError, match="no such file"):
        read_dataset(tmp_path / "none.parquet")
    other = tmp_path / "other.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(other)
    with pytest.raises(FileFormatError, match="packer predictor build"):
        read_dataset(other)


def test_ray_that_is_absent_is_named(small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ray the message has the install line."""
    monkeypatch.setitem(__import__("sys").modules, "ray.util.joblib", None)
    with pytest.raises(MissingDependencyError, match=r"adapter-packer\[ray\]"):
        build_dataset(small, tmp_path / "d.parquet", rows=3, jobs=1, backend="ray")


@pytest.mark.usefixtures("local_ray", "whole_hours")
def test_ray_gives_the_same_bytes(small: Profile, tmp_path: Path) -> None:
    """A local Ray cluster builds the same dataset, of two parts, as this process does."""
    ray, here = tmp_path / "ray.parquet", tmp_path / "here.parquet"
    build_dataset(small, ray, rows=PART_ROWS + 5, seed=4, jobs=2, backend="ray")
    build_dataset(small, here, rows=PART_ROWS + 5, seed=4, jobs=1)
    assert ray.read_bytes() == here.read_bytes()
