"""`packer calibrate fit`: a profile from tables of measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.options import DEFAULT_PROFILE, force_option, json_option, quiet_option

if TYPE_CHECKING:
    from packer.profile import Profile
    from packer.twin.calibrate.pipeline import Calibration
    from packer.twin.calibrate.tables import Profiling, Run


@click.command()
@click.option(
    "--profiling",
    "profiling_dir",
    metavar="DIR",
    help="Micro-benchmarks: some or all of kv_capacity.csv, latency_backbone.csv, latency_adapters.csv, loading.csv.",
)
@click.option(
    "--runs", "runs_path", metavar="FILE", help="Whole runs of the server: one row each, with its metrics."
)
@click.option(
    "--base",
    "base_name",
    default=DEFAULT_PROFILE,
    show_default=True,
    metavar="NAME|FILE.toml",
    help="Gives the identity of the server (model, GPU, engine settings) and whatever has no measurements; "
    "`packer profiles estimate` makes one.",
)
@click.option("--model", help="Model name in the tables' model column [default: the base profile's].")
@click.option("--name", help="Name of the new profile [default: the base profile's].")
@click.option(
    "--generated-share",
    type=click.FloatRange(0.01, 1.0),
    default=1.0,
    show_default=True,
    help="Generated / requested output tokens of the runs.",
)
@click.option("--max-outstanding", type=click.IntRange(1), help="Ceiling of the client that made the runs.")
@click.option(
    "--cold-start/--warm-start",
    default=None,
    help="Whether adapters were on disk when the runs began [default: the base profile's].",
)
@click.option(
    "--note", "note_text", default="", help="Who measured, how and when; goes into the profile's provenance."
)
@click.option("--no-cross-validation", is_flag=True, help="Skip the errors on families left out.")
@click.option("-o", "--output", "output_path", default="profile.toml", show_default=True, metavar="FILE")
@force_option
@json_option
@quiet_option
def fit(
    profiling_dir: str | None, runs_path: str | None, base_name: str, model: str | None, name: str | None,
    generated_share: float, max_outstanding: int | None, cold_start: bool | None, note_text: str,
    no_cross_validation: bool, output_path: str, force: bool, as_json: bool, quiet: bool,
) -> None:  # fmt: skip
    """Fit a profile to micro-benchmarks, or to micro-benchmarks and a few dozen production runs.

    With runs of two or more families the error on families left out is measured and written into the profile;
    `packer solve --confidence` plans with it.

    \b
    Example:
      packer calibrate fit --profiling measured/ --runs runs.csv -o profile.toml
    """
    from dataclasses import replace

    from packer.cli.output import check_output
    from packer.errors import IncompatibleError
    from packer.io.profiles import load_profile, write_profile
    from packer.twin.calibrate.pipeline import with_provenance
    from packer.twin.calibrate.tables import Profiling, read_profiling, read_runs

    if profiling_dir is None and runs_path is None:
        raise click.UsageError("Nothing to fit: give --profiling DIR, --runs FILE, or both.")
    target = check_output(output_path, force=force)
    assert target is not None
    base = load_profile(base_name)
    if cold_start is not None:
        base = replace(base, loading=replace(base.loading, cold_start=cold_start))
    who = model or base.model.name
    profiling = read_profiling(profiling_dir, who) if profiling_dir else Profiling()
    runs = read_runs(runs_path, who, generated_share=generated_share) if runs_path else []
    if runs and not any(run.ok for run in runs):
        raise IncompatibleError(f"{runs_path}: none of the {len(runs)} runs of {who} started.")
    result = _calibrated(
        base, profiling, runs, max_outstanding, cross_validate=not no_cross_validation, quiet=quiet
    )
    method = "micro-benchmarks and runs" if runs else "micro-benchmarks only"
    profile = with_provenance(
        replace(result.profile, name=name or base.name, provenance={}),
        method=f"packer calibrate fit on {method}",
        measured_by=note_text,
    )
    write_profile(profile, target, force=force)
    _report(replace(result, profile=profile), str(target), as_json=as_json, quiet=quiet)


def _calibrated(
    base: Profile,
    profiling: Profiling,
    runs: list[Run],
    max_outstanding: int | None,
    *,
    cross_validate: bool,
    quiet: bool,
) -> Calibration:
    from packer.cli.output import progress_bar
    from packer.twin.calibrate.pipeline import calibrate

    with progress_bar(quiet=quiet) as update:
        return calibrate(
            base,
            profiling,
            runs,
            max_outstanding=max_outstanding,
            cross_validate=cross_validate,
            progress=update,
        )


def _report(result: Calibration, path: str, *, as_json: bool, quiet: bool) -> None:
    from packer.cli.output import note, print_json, show, table

    profile, before = result.profile, result.micro_profile.errors
    if as_json:
        print_json(
            {
                "profile": profile.name, "path": path, "fingerprint": profile.fingerprint,
                "coefficients": dict(profile.latency.coefficients),
                "errors_micro_benchmarks_only": dict(before), "errors_held_out": dict(profile.errors),
            }
        )  # fmt: skip
        return
    coefficients = profile.latency.coefficients
    show(
        table("Step law", ("term", "value"), [(term, f"{value:.6g}") for term, value in coefficients.items()])
    )
    if profile.errors:
        rows = [
            (key, f"{before[key]:.4g}" if key in before else "–", f"{value:.4g}")
            for key, value in profile.errors.items()
        ]
        title = "Errors on runs (SMAPE in %, 0–200 form)"
        show(table(title, ("metric", "micro-benchmarks only", "held-out families"), rows))
    note(f"Profile {profile.name} written to {path}.", quiet=quiet)
