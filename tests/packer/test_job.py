"""A fine-tuning job is checked where it is made, and travels with its workload."""

from __future__ import annotations

from pathlib import Path

import pytest

from packer.adapter import Adapter
from packer.errors import FileFormatError, IncompatibleError, ValidationError
from packer.io.workloads import read_workload, write_workload
from packer.job import FineTuning
from packer.lengths import Lengths
from packer.workload import Workload

JOB = FineTuning(1000, Lengths.gamma(300, 0.5), 32, 2, 2.0, 28, 6.5, "chunked:chunk_tokens=64")


@pytest.mark.parametrize(
    "wrong",
    [{"samples": -1}, {"rank": 0}, {"batch": 0}, {"layers": 1.5}, {"backward_ratio": 0.0}, {"weights_ms": -1.0}],
)
def test_rules(wrong: dict[str, float]) -> None:
    """Each field has its rule, which the error names."""
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        FineTuning(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("ending", ["json", "yaml"])
def test_round_trip(tmp_path: Path, ending: str) -> None:
    """Documents give the same job back."""
    fleet = Workload([Adapter("a", 8, 1.0)], fine_tuning=JOB)
    path = tmp_path / f"fleet.{ending}"
    write_workload(fleet, path)
    assert read_workload(path).fine_tuning == JOB


def test_tables_refuse_it(tmp_path: Path) -> None:
    """A table has no place for a job and says so."""
    with pytest.raises(IncompatibleError, match="fine-tuning"):
        write_workload(Workload([Adapter("a", 8, 1.0)], fine_tuning=JOB), tmp_path / "fleet.csv")


def test_errors_name_the_key(tmp_path: Path) -> None:
    """A wrong value or key is named with the file."""
    path = tmp_path / "fleet.yaml"
    path.write_text("fine_tuning: {sample_tokens: 0}\nadapters: [{name: a, rank: 8, rate: 1}]\n")
    with pytest.raises(FileFormatError, match=r"fleet\.yaml.*fine_tuning"):
        read_workload(path)
    path.write_text("fine_tuning: {speed: 3}\nadapters: [{name: a, rank: 8, rate: 1}]\n")
    with pytest.raises(FileFormatError, match=r"fine_tuning\.speed"):
        read_workload(path)


def test_fingerprints_without_a_job_stay() -> None:
    """A job is part of the fingerprint; no job is not."""
    plain = Workload([Adapter("a", 8, 1.0)])
    assert plain.fingerprint != plain.tuned_by("temporal").fingerprint
    assert plain.tuned_by("temporal").tuned_by("chunked").fine_tuning == FineTuning(policy="chunked")


def test_the_length_of_samples_is_a_distribution() -> None:
    """A number of tokens is refused when the job is made, not in the middle of a run."""
    with pytest.raises(ValidationError, match=r"Expected sample_tokens to be a Lengths, as packer\.Lengths"):
        FineTuning(sample_tokens=1024)  # type: ignore[arg-type]
