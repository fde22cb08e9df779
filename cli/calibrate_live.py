"""`packer calibrate live`: measure a real vLLM server and fit its profile."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from packer.cli.options import force_option, json_option, output_option, quiet_option, seed_option

if TYPE_CHECKING:
    from packer.profile import Profile
    from packer.twin.live.campaign import Outcome

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Duration(click.ParamType[float]):
    """Seconds, or a number with s, m or h behind it."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds as a float."""
        if isinstance(value, (int, float)):
            return float(value)
        text = str(value).strip()
        factor = _UNITS.get(text[-1:], 1.0)
        try:
            seconds = float(text.rstrip("smh")) * factor
        except ValueError:
            seconds = -1.0
        if not 0 < seconds < 1e7:
            self.fail(f"expected a duration like 90s, 10m or 1h, got {text[:40]!r}", param, ctx)
        return seconds


class Servers(click.ParamType[tuple[tuple[int, int], ...]]):
    """`8x16,32x8`: max_loras and max_lora_rank of each server."""

    name = "servers"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[tuple[int, int], ...]:
        """Pairs (max_loras, max_lora_rank)."""
        if isinstance(value, tuple):
            return value
        try:
            pairs = [part.lower().split("x") for part in str(value).split(",")]
            return tuple((int(loras), int(rank)) for loras, rank in pairs)
        except ValueError:
            self.fail(f"expected SLOTSxRANK pairs like 8x16,32x8, got {str(value)[:40]!r}", param, ctx)


@click.command("live")
@click.option("--launch", "launch_path", default=None, metavar="FILE.toml", help="How to start the servers.")
@click.option("--url", default=None, metavar="URL", help="A running server instead.")
@click.option("--profile", "known", default=None, metavar="NAME|FILE.toml", help="With --url: its settings.")
@click.option("--max-loras", type=click.IntRange(1), default=None, metavar="N", help="With --url: its slots.")
@click.option("--max-lora-rank", type=int, default=None, metavar="RANK", help="With --url: their rank.")
@click.option(
    "--servers", type=Servers(), default=None, metavar="8x16,…", help="max_loras x max_lora_rank of each."
)
@click.option(
    "--budget", type=Duration(), default=None, metavar="10m", help="Start no measurement after this."
)
@click.option(
    "--folder",
    default="live-results",
    show_default=True,
    metavar="DIR",
    help="Where measurements are kept; the same folder goes on where the last run stopped.",
)
@output_option("The profile.", default="profile.toml")
@seed_option
@force_option
@json_option
@quiet_option
def live(
    launch_path: str | None,
    url: str | None,
    known: str | None,
    max_loras: int | None,
    max_lora_rank: int | None,
    servers: tuple[tuple[int, int], ...] | None,
    budget: float | None,
    folder: str,
    output: str,
    seed: int,
    force: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure real vLLM servers and write the profile that the twin needs.

    Servers that packer starts itself log every engine step. A running one is measured from the outside, which
    needs a profile with its settings: an estimate (packer profiles estimate) will do.

    \b
    Examples:
      packer calibrate live --launch vllm-cpu/launch.toml --budget 10m -o tiny.toml
      packer calibrate live --url http://gpu-7:8000 --profile estimated.toml --max-loras 8 --max-lora-rank 16
    """
    from pathlib import Path

    from packer.cli.output import check_output, progress_bar
    from packer.io.profiles import load_profile, write_profile
    from packer.twin.live.calibration import Grid, calibrate, calibrate_url
    from packer.twin.live.launch import read_launch

    if (launch_path is None) == (url is None):
        raise click.UsageError("Give either --launch or --url.")
    check_output(output, force=force)
    place = Path(folder)
    with progress_bar(quiet=quiet) as progress:
        if launch_path is not None:
            grid = Grid(servers) if servers else None
            launch = read_launch(launch_path)
            found = calibrate(launch, place, grid=grid, budget_s=budget, seed=seed, progress=progress)
        else:
            if known is None or max_loras is None or max_lora_rank is None:
                raise click.UsageError("--url needs --profile, --max-loras and --max-lora-rank.")
            assert url is not None
            found = calibrate_url(
                url.rstrip("/"),
                load_profile(known),
                place,
                max_loras=max_loras,
                max_lora_rank=max_lora_rank,
                budget_s=budget,
                seed=seed,
                progress=progress,
            )
    profile, outcomes, late = found
    write_profile(profile, output, force=force)
    _report(profile, outcomes, late, output, as_json=as_json, quiet=quiet)


def _report(
    profile: Profile, outcomes: list[Outcome], late: bool, output: str, *, as_json: bool, quiet: bool
) -> None:
    from packer.cli.output import note, print_json, show, table
    from packer.io.profiles import profile_to_dict

    failures = {o.session.key: o.failure.message for o in outcomes if o.failure is not None}
    if as_json:
        print_json(
            {
                "profile": profile_to_dict(profile),
                "output": output,
                "budget_spent": late,
                "measurements": len(outcomes),
                "failures": failures,
            }
        )
        return
    terms = sorted(profile.latency.coefficients.items(), key=lambda item: -item[1])
    show(
        table("Step law", ("term", "ms"), [(name, f"{value:.5g}") for name, value in terms]),
        table("Errors", ("measure", "%"), [(k, f"{v:.2f}") for k, v in profile.errors.items()]),
        table(
            "KV cache capacity",
            ("max_loras", "max_lora_rank", "tokens"),
            profile.memory.measured,
            left=(),
        ),
    )
    for key, message in failures.items():
        note(f"{key}: {message}", quiet=quiet)
    if late:
        note("the budget ended before the plan did; the same command goes on from here", quiet=quiet)
    note(f"wrote {output}: {profile.name}, {len(outcomes)} measurements", quiet=quiet)
