"""The whole calibration, on runs that a known profile made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from packer.errors import ModelError
from packer.fit import pipeline
from packer.fit.pipeline import calibrate
from packer.fit.tables import MeasuredRun, Profiling
from packer.profile import Profile
from packer.twin.margin import rate_margin


def test_calibration_predicts_families_that_it_has_not_seen(
    true_profile: Profile, measured_runs: list[MeasuredRun]
) -> None:
    """Held-out errors are small when the twin's physics is right, and travel in the profile."""
    base = replace(true_profile, latency=replace(true_profile.latency, coefficients={"base_ms": 20.0}))
    calls: list[tuple[int, int]] = []
    result = calibrate(
        base, Profiling(), measured_runs, progress=lambda _stage, done, total: calls.append((done, total))
    )
    errors = result.profile.errors
    assert errors["throughput_smape"] < 6
    assert errors["tpot_smape"] < 8
    assert errors["memory_verdicts_wrong"] == 0
    assert {each.run.run_id for each in result.held_out} == {run.run_id for run in measured_runs}
    assert calls[-1][0] == calls[-1][1]


def test_a_family_is_predicted_from_all_runs_of_the_others(
    true_profile: Profile, measured_runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors are those of the shipped procedure: the fit without a family sees every run of the others."""
    seen: list[set[str]] = []

    def fit_runs(start: Profile, _profiling: Profiling, runs: Sequence[MeasuredRun], **_given: object) -> Profile:
        seen.append({run.run_id for run in runs})
        return start

    monkeypatch.setattr(pipeline, "fit_runs", fit_runs)
    many = [replace(run, run_id=f"{run.run_id}-{k}", duration_s=5.0) for k in range(9) for run in measured_runs]
    result = calibrate(true_profile, Profiling(), many)
    families = sorted({run.family for run in many})
    assert list(result.others) == families
    everything = {run.run_id for run in many}
    unseen = [{run.run_id for run in many if run.family != family} for family in families]
    assert seen == [everything, *unseen]


def test_runs_with_adapters_leave_the_base_model_s_steps_as_in_the_base(
    true_profile: Profile, measured_runs: list[MeasuredRun]
) -> None:
    """Runs whose steps all have adapters don't tell the base model's time from the first adapter's: the base profile
    does, and the profile says so."""
    true = true_profile.with_coefficients(first_adapter_ms=0.5)
    found = calibrate(true, Profiling(), measured_runs[:9], cross_validate=False).profile
    assert found.latency.coefficients["base_ms"] == pytest.approx(9.0, rel=0.1)
    assert found.latency.coefficients["first_adapter_ms"] < 2.0
    assert found.provenance["prior"].startswith(true.name)


def test_calibration_is_the_same_every_time(
    true_profile: Profile, measured_runs: list[MeasuredRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same measurements give the same profile, to the last digit, however many cores there are."""
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(os, "cpu_count", lambda n=cores: n)
        profile = calibrate(true_profile, Profiling(), measured_runs[:9], cross_validate=False).profile
        found.append(profile.fingerprint)
    assert found[0] == found[1]


def test_too_few_runs_are_refused(true_profile: Profile, measured_runs: list[MeasuredRun]) -> None:
    """Fewer than 8 runs that started and have the time of their steps can't hold the law."""
    with pytest.raises(ModelError, match="at least 8 runs"):
        calibrate(true_profile, Profiling(), measured_runs[:5])
    for unknown in ({}, {"tpot_mean_ms": 0.0}):
        untimed = [replace(run, metrics={"total_tok_s": 9.0, **unknown}) for run in measured_runs]
        with pytest.raises(ModelError, match="tpot_mean_ms and request_throughput, got 0"):
            calibrate(true_profile, Profiling(), untimed)


def test_margin_grows_with_the_confidence(true_profile: Profile) -> None:
    """A higher confidence needs a margin at least as large."""
    profile = replace(
        true_profile,
        errors={f"capacity_margin_p{q}": v for q, v in ((50, -0.01), (80, 0.01), (90, 0.02), (95, 0.03), (99, 0.06))},
    )
    margins = [rate_margin(profile, c) for c in (0.5, 0.7, 0.9, 0.95, 0.97, 0.99)]
    assert margins == sorted(margins)
    assert margins[0] == 0.0
    assert margins[3] == pytest.approx(0.03)
