"""Calibration: fit a profile to measurements.

1. Fit memory and loading to their tables, and the step law to micro-benchmarks by non-negative least squares.
2. With runs, fit the law again to micro-benchmarks and runs, first with Little's law, then on the twin's mean states.
3. Cross-validate: leave out groups of families of runs in turn, and measure the error on the runs left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from packer.errors import ModelError
from packer.fit import score, step_law
from packer.fit.frontend_fit import fit_frontend
from packer.fit.lengths_fit import fit_correlation
from packer.fit.mean_state import ROUNDS, fit_mean_state
from packer.fit.memory_fit import fit_loading, fit_memory
from packer.fit.score import ScoredRun
from packer.fit.step_law import Prior, prior_of
from packer.fit.tables import MeasuredRun, Profiling
from packer.profile import Profile
from packer.progress import Progress, silent
from packer.terms import LINEAR

TERMS = (
    "base_ms", "per_decode_ms", "per_prefill_token_ms", "first_adapter_ms", "per_adapter_ms", "per_slot_ms",
    "per_slot_rank_ms", "per_lora_token_ms", "per_adapter_token_ms", "per_adapter_registered_ms", "per_slot_token_ms",
    "per_kv_token_ms", "per_token_beyond_graph_ms", "per_waiting_ms", "per_slot_block_ms", "per_adapter_block_ms",
)  # fmt: skip
"""Terms of the step law that lowered the error on families left out (docs/fidelity.md)."""
DIGITS = 6
SEED = 1000
FOLDS = 8  # Maximum number of groups of families that are left out in turn; up to this number, each family is a group.


@dataclass(frozen=True, eq=False)
class Calibration:
    """The profile, with held-out errors inside, and the scored runs behind these errors.

    `micro`: runs scored by the profile of micro-benchmarks only. `held_out`: runs scored by profiles that were fitted
    without the run's family. Both are empty without cross-validation. `others`: by family, the profile without it.
    """

    profile: Profile
    micro_profile: Profile
    micro: tuple[ScoredRun, ...] = ()
    held_out: tuple[ScoredRun, ...] = ()
    others: Mapping[str, Profile] = field(default_factory=dict)


def terms_of(base: Profile) -> tuple[str, ...]:
    """The terms to fit: `TERMS`, and those of the base model that an estimate has in addition (prompts beyond the
    ridge, experts)."""
    more = (term.name for term in LINEAR if term.part == "model" and base.latency.coefficients.get(term.name))
    return (*TERMS, *(name for name in more if name not in TERMS))


def _note(prior: Prior | None) -> str:
    return "" if prior is None else f"{prior.source}, for what measurements leave open"


def _rounded(profile: Profile) -> Profile:
    kept = {term: float(f"{v:.{DIGITS}g}") for term, v in profile.latency.coefficients.items() if v > 0}
    return replace(profile, latency=replace(profile.latency, coefficients=kept))


def micro_profile(base: Profile, profiling: Profiling) -> Profile:
    """Fit a profile to micro-benchmarks only; parts without a table stay as in `base`. Terms that they do not determine
    stay near those of `base` (`packer.fit.step_law.prior_of`). An estimate stays one unless adapters were measured."""
    memory, loading = base.memory, base.loading
    if profiling.kv_capacity:
        memory = fit_memory(profiling.kv_capacity, base.model, base.engine)
    if profiling.loading:
        timed = fit_loading(profiling.loading)
        loading = replace(timed, cold_start=loading.cold_start, spares_batch=loading.spares_batch)
    equations = step_law.micro_equations(profiling, base.engine, base.latency)
    latency, note = base.latency, ""
    if len(equations.step_ms):
        prior = prior_of(base)
        found = step_law.solve(equations, terms_of(base), prior)
        latency = replace(base.latency, form="linear", coefficients=found)
        note = _note(prior)
    calibrated = base.calibrated or bool(profiling.adapters)
    profile = replace(
        base, memory=memory, loading=loading, latency=latency, calibrated=calibrated, errors={}, provenance={}
    )
    return with_provenance(_rounded(profile), prior=note)


def fit_runs(
    start: Profile, profiling: Profiling, runs: Sequence[MeasuredRun], *, done: Callable[[], None] = lambda: None
) -> Profile:
    """Fit the step law to micro-benchmarks and runs. What both tables of steps and the runs do not determine stays near
    `start`: requests to the base model alone, for example, if every run had adapters."""
    terms, law = terms_of(start), replace(start.latency, form="linear", coefficients={})
    micro = step_law.micro_equations(profiling, start.engine, law)
    whole = profiling.backbone and profiling.adapters and len(terms) == len(TERMS)
    prior = None if whole else prior_of(start)
    first = step_law.solve(micro + step_law.run_equations(runs, start.engine, law), terms, prior)
    law = replace(law, coefficients={term: value for term, value in first.items() if value > 0})
    begun = replace(with_provenance(start, prior=_note(prior)), latency=law, calibrated=True)
    return _rounded(fit_mean_state(begun, runs, micro, terms, seed=SEED, prior=prior, done=done))


def calibrate(
    base: Profile, profiling: Profiling, runs: Sequence[MeasuredRun] = (), *, cross_validate: bool = True,
    progress: Progress = silent,
) -> Calibration:  # fmt: skip
    """Fit a profile.

    `base`: gives the model, GPU, engine and settings, and all parts without measurements.
    `profiling`: micro-benchmarks; its tables may be empty if there are runs.
    `runs`: whole runs; () fits micro-benchmarks only.
    `cross_validate`: also measure the error on families left out, and store it in the profile.
    `progress`: called with (stage, simulations done, simulations to do).
    Raises `ModelError`: fewer than 8 runs started and have a TPOT and a request throughput.
    """
    alone = micro_profile(base, profiling)
    started = [run for run in runs if run.ok]
    if not runs:
        return Calibration(alone, alone)
    if (timed := sum(run.timed for run in started)) < 8:
        rule = "Expected at least 8 runs that started and have tpot_mean_ms and request_throughput"
        raise ModelError(f"{rule}, got {timed}.")
    correlation = fit_correlation(runs, alone)
    if correlation is not None:
        runs = [replace(run, length_correlation=correlation) for run in runs]
        started = [run for run in runs if run.ok]
        note = f"{correlation}, from running requests and KV usage of the runs"
        alone = with_provenance(alone, length_correlation=note)
    if alone.frontend.scrape_interval_s is not None and any("scrape_s" in run.metrics for run in started):
        alone = replace(alone, frontend=fit_frontend(fit_runs(alone, profiling, started), started))
    families = sorted({run.family for run in runs})
    folds = [families[k::FOLDS] for k in range(min(FOLDS, len(families)))]
    if not cross_validate or len(folds) < 2:
        folds = []
    total = ROUNDS * len(started)
    if folds:
        total += 2 * len(runs) + ROUNDS * sum(run.family not in fold for run in started for fold in folds)
    number = count(1)  # threads may count at once

    def step(stage: str) -> Callable[[], None]:
        return lambda: progress(stage, next(number), total)

    def fitted(chosen: Sequence[MeasuredRun], stage: str) -> Profile:
        return fit_runs(alone, profiling, chosen, done=step(stage))

    profile = fitted(started, "fitting")
    if not folds:
        return Calibration(profile, alone)
    held_out: list[ScoredRun] = []
    others: dict[str, Profile] = {}
    for fold in folds:
        unseen = fitted([run for run in started if run.family not in fold], "cross-validating")
        others |= dict.fromkeys(fold, unseen)
        left = [run for run in runs if run.family in fold]
        held_out += score.score_runs(left, unseen, done=step("scoring"))
    micro = score.score_runs(runs, alone, done=step("scoring"))
    profile = replace(profile, errors=score.summary(held_out))
    alone = replace(alone, errors=score.summary(micro))
    return Calibration(profile, alone, tuple(micro), tuple(held_out), others)


def with_provenance(profile: Profile, **notes: str) -> Profile:
    """Return the profile with these notes on who measured what, how and when; empty notes are removed."""
    kept = {key: note for key, note in {**profile.provenance, **notes}.items() if note}
    return replace(profile, provenance=kept)
