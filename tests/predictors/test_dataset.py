"""Datasets: scenarios, resuming, damage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from packer.errors import FileFormatError, IncompatibleError, MissingDependencyError, OutputError
from packer.predictors import dataset as module
from packer.predictors.dataset import PART_ROWS, Dataset, build_dataset, read_dataset
from packer.predictors.scenarios import FAMILIES, RATES, SIZES, scenario
from packer.profile import Profile

ROWS = PART_ROWS + 5


@pytest.fixture(scope="module")
def built(small: Profile, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two parts."""
    path = tmp_path_factory.mktemp("built") / "d.parquet"
    build_dataset(small, path, rows=ROWS, seed=4, jobs=1)
    return path


def test_scenarios_are_repeatable_and_varied(small: Profile) -> None:
    """The same index gives the same scenario; all families come, with lengths far from the paper's."""
    first, again = [[scenario(i, small, 1) for i in range(60)] for _ in range(2)]
    assert [case.workload.adapters for case in first] == [case.workload.adapters for case in again]
    assert {case.family for case in first} == set(FAMILIES)
    prompts = [case.workload.input_tokens.mean for case in first]
    assert min(prompts) < 40
    assert max(prompts) > 1000


def test_grid_scenarios_are_the_papers(small: Profile) -> None:
    """Grid rows take three rates and three sizes from the paper's sets."""
    cases = [case for i in range(80) if (case := scenario(i, small, 2)).family == "grid"]
    assert cases
    for case in cases:
        assert set(case.workload.rates.tolist()) <= set(RATES)
        assert set(case.workload.ranks.tolist()) <= set(SIZES)
        assert case.settings.max_loras <= len(case.workload)


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
    build_dataset(
        small, path, rows=ROWS, seed=4, jobs=1, progress=lambda _what, done, _total: seen.append(done)
    )
    assert seen[0] == PART_ROWS
    assert path.read_bytes() == built.read_bytes()
    assert not path.with_name("d.parquet.parts").exists()


def test_parts_of_another_dataset_are_not_mixed(small: Profile, tmp_path: Path) -> None:
    """Parts that belong to another seed are refused, not overwritten."""
    path = tmp_path / "d.parquet"
    module._claim(tmp_path / "d.parquet.parts", module.Spec(small.name, small.fingerprint, 10, 0))
    with pytest.raises(IncompatibleError, match="another dataset"):
        build_dataset(small, path, rows=10, seed=1, jobs=1)


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


def test_missing_rows_are_refused(built: Path, tmp_path: Path) -> None:
    """A dataset with rows taken out says so."""
    path = tmp_path / "less.parquet"
    note = pl.read_parquet_metadata(built)["packer"]
    pl.read_parquet(built).head(7).write_parquet(path, metadata={"packer": note})
    with pytest.raises(FileFormatError, match=r"expected rows 0 … 36 once each, got 7"):
        read_dataset(path)


def test_missing_and_unknown_features_are_named(built: Path, tmp_path: Path) -> None:
    """A column that is gone, or a feature of another version, is named."""
    note = pl.read_parquet_metadata(built)["packer"]
    path = tmp_path / "column.parquet"
    pl.read_parquet(built).drop("capacity").write_parquet(path, metadata={"packer": note})
    with pytest.raises(FileFormatError, match="capacity"):
        read_dataset(path)
    pl.read_parquet(built).write_parquet(path, metadata={"packer": note.replace("capacity", "horsepower")})
    with pytest.raises(FileFormatError, match="horsepower"):
        read_dataset(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    """Files that are no datasets get one clear sentence."""
    with pytest.raises(FileFormatError, match="no such file"):
        read_dataset(tmp_path / "none.parquet")
    other = tmp_path / "other.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(other)
    with pytest.raises(FileFormatError, match="packer dataset build"):
        read_dataset(other)


def test_ray_that_is_absent_is_named(small: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ray the message has the install line."""
    monkeypatch.setitem(__import__("sys").modules, "ray.util.joblib", None)
    with pytest.raises(MissingDependencyError, match=r"adapter-packer\[ray\]"):
        build_dataset(small, tmp_path / "d.parquet", rows=3, jobs=1, backend="ray")


def test_ray_gives_the_same_bytes(small: Profile, tmp_path: Path, built: Path) -> None:
    """A local Ray cluster builds the same dataset as processes do."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        build_dataset(small, tmp_path / "d.parquet", rows=ROWS, seed=4, jobs=2, backend="ray")
    finally:
        ray.shutdown()
    assert (tmp_path / "d.parquet").read_bytes() == built.read_bytes()
