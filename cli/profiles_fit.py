"""`packer profiles fit`: a profile from tables of measurements, or from results of load generators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

import packer
from packer.cli.declare import Readers, bundle, command, flag, option, pairs
from packer.cli.options import DEFAULT_PROFILE, Writing, common
from packer.cli.output import Table
from packer.cli.traffic import refuse_unused
from packer.errors import IncompatibleError

if TYPE_CHECKING:
    from packer.fit.pipeline import Calibration


ABOUT: Readers = {
    **dict.fromkeys(("model", "name", "note"), str),
    "generated-share": click.FloatRange(0.01, 1.0),
    "max-outstanding": click.IntRange(1),
}


@bundle
class Measurements:
    """Files of measurements, and facts that the files do not contain.

    profiling_dir: Micro-benchmarks: some or all of kv_capacity.csv, latency_backbone.csv, latency_adapters.csv,
        loading.csv.
    runs_path: Whole runs of the server: one row each, with its metrics.
    bench_paths: What improves an estimate given as --base: a result of vllm bench serve or GuideLLM on the base model,
        a scrape of a busy server's /metrics, or what vLLM's benchmark_lora.py printed; repeatable.
    base_name: Gives the identity of the server (model, GPU, engine settings) and whatever has no measurements;
        `packer profiles estimate` makes one.
    about: What the files do not say: model (in the tables), name (of the new profile), generated-share (generated /
        requested output tokens, 1), max-outstanding (ceiling of the client), note (who measured, how and when). --model
        NAME is the same; repeatable.
    cold_start: Whether adapters were on disk when the runs began. [default: the base profile's]
    no_cross_validation: Skip the errors on families left out.
    """

    profiling_dir: str | None = option("--profiling", metavar="DIR")
    runs_path: str | None = option("--runs", metavar="FILE")
    bench_paths: tuple[str, ...] = option("--bench", multiple=True, metavar="FILE")
    base_name: str = option("--base", default=DEFAULT_PROFILE, metavar="NAME|FILE.toml")
    about: dict[str, Any] = pairs("--about", names=ABOUT)
    cold_start: bool | None = option("--cold-start/--warm-start", default=None)
    no_cross_validation: bool = flag()
    output: str = common("output", help="Where to write the profile.", default="profile.toml")


@command
def fit(given: Measurements, out: Writing) -> None:
    """Fit a profile to micro-benchmarks, or to micro-benchmarks and a few dozen production runs.

    With runs of two or more families the error on families left out is measured and written into the profile;
    `packer solve --confidence` plans with it.

    \b
    Example:
      packer profiles fit --profiling measured/ --runs runs.csv -o profile.toml
      packer profiles fit --base l40s.toml --bench rate-2.json --bench rate-8.json -o improved.toml
      packer profiles fit --base l40s.toml --bench metrics.txt --bench lora-kernels.txt -o improved.toml
    """
    from packer.fit.pipeline import calibrate, with_provenance
    from packer.fit.tables import Profiling, read_profiling, read_runs

    tables = given.profiling_dir is not None or given.runs_path is not None
    if tables == bool(given.bench_paths):
        raise click.UsageError("Expected --profiling DIR, --runs FILE or both, or else --bench FILE.")
    out.check(given.output)
    base = packer.load_profile(given.base_name)
    if given.bench_paths:
        of_tables = ("model", "generated_share", "max_outstanding", "cold_start", "no_cross_validation")
        refuse_unused("--bench", of_tables)
        _improve(base, given, out)
        return
    if given.cold_start is not None:
        base = replace(base, loading=replace(base.loading, cold_start=given.cold_start))
    model, path = given.about.get("model", base.model.name), given.runs_path
    profiling = read_profiling(given.profiling_dir, model) if given.profiling_dir else Profiling()
    of_client = {"generated_share", "max_outstanding"} & given.about.keys()
    client = {name: given.about[name] for name in of_client}
    runs = read_runs(path, model, **client) if path else []
    if runs and not any(run.ok for run in runs):
        raise IncompatibleError(f"{path}: none of the {len(runs)} runs of {model} started.")
    with out.progress() as progress:
        whole = not given.no_cross_validation
        result = calibrate(base, profiling, runs, cross_validate=whole, progress=progress)
    profile = with_provenance(
        replace(result.profile, name=given.about.get("name", base.name)),
        method=f"packer profiles fit on micro-benchmarks {'and runs' if runs else 'only'}",
        measured_by=given.about.get("note", ""),
    )
    result = replace(result, profile=profile)
    errors = {"errors_micro_benchmarks_only": dict(result.micro_profile.errors)}
    errors["errors_held_out"] = dict(profile.errors)
    _finish(profile, errors, lambda: _tables(result), given, out)


def _improve(base: packer.Profile, given: Measurements, out: Writing) -> None:
    """Improve the base profile by results of load generators and write it."""
    from packer.fit.bench_results import improved, read_bench_results
    from packer.fit.pipeline import with_provenance

    found = improved(base, read_bench_results(given.bench_paths))
    profile = replace(found, name=given.about.get("name", base.name))
    profile = with_provenance(profile, measured_by=given.about.get("note", ""))
    _finish(profile, {"errors": dict(profile.errors)}, lambda: _laws(profile), given, out)


def _finish(
    profile: packer.Profile, errors: dict[str, Any], tables: Callable[[], list[Table]], given: Measurements,
    out: Writing,
) -> None:  # fmt: skip
    """Write the profile and print its step law, errors and fingerprint."""
    from packer.io.profiles import write_profile

    write_profile(profile, given.output, force=out.force)
    facts = {"profile": profile.name, "path": given.output, "fingerprint": profile.fingerprint}
    out.result({**facts, "coefficients": dict(profile.latency.coefficients), **errors}, tables)
    if not out.as_json:
        notes = [profile.provenance[key] for key in ("improved", "adapters") if key in profile.provenance]
        improved = ": " + "; ".join(notes) if given.bench_paths else ""
        out.note(f"Profile {profile.name} written to {given.output}{improved}.")


def _laws(profile: packer.Profile) -> list[Table]:
    terms = [(term, f"{value:.6g}") for term, value in profile.latency.coefficients.items()]
    return [Table("Step law", ("term", "value"), terms)]


def _tables(result: Calibration) -> list[Table]:
    profile, before = result.profile, result.micro_profile.errors
    found = _laws(profile)
    if profile.errors:
        known = {key: f"{value:.4g}" for key, value in before.items()}
        rows = [(key, known.get(key, "–"), f"{value:.4g}") for key, value in profile.errors.items()]
        columns = ("metric", "micro-benchmarks only", "held-out families")
        found.append(Table("Errors on runs (SMAPE in %, 0–200 form)", columns, rows))
    return found
