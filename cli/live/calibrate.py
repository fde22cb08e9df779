"""`packer live calibrate`: measure a real vLLM server and fit its profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

import packer
from packer.cli.declare import Readers, bundle, command, option, pairs
from packer.cli.options import Writing, common
from packer.cli.output import Table
from packer.cli.traffic import refuse_unused
from packer.settings import Settings

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Type of an option: seconds, or a number with the unit s, m or h. Returns seconds."""
    number, unit = text.strip(), text.strip()[-1:]
    try:
        seconds = float(number[:-1] if unit in _UNITS else number) * _UNITS.get(unit, 1.0)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e7:
        raise click.BadParameter(f"expected a duration like 90s, 10m or 1h, got {text[:40]!r}")
    return seconds


def slots_of_servers(text: str) -> tuple[Settings, ...]:
    """Type of an option: max_loras and max_lora_rank of each server, `8x16,32x8`."""
    try:
        pairs = [part.lower().split("x") for part in text.split(",")]
        return tuple(Settings(int(loras), int(rank)) for loras, rank in pairs)
    except ValueError:
        raise click.BadParameter(f"expected SLOTSxRANK pairs like 8x16,32x8, got {text[:40]!r}") from None


RUNNING: Readers = {"profile": str, "max-loras": click.IntRange(1), "max-lora-rank": int}


@bundle
class CalibrationInput:
    """What is measured.

    launch_path: How to start the servers.
    url: A running server instead.
    api_key_env: Environment variable with its key, or a file of it as @FILE.
    running: With --url what runs there: profile (its settings), max-loras, max-lora-rank; --max-loras 8 is the same;
        repeatable.
    servers: max_loras x max_lora_rank of each.
    budget: Start no measurement after this.
    folder: Where measurements are kept; the same folder goes on where the last run stopped.
    """

    launch_path: str | None = option("--launch", metavar="FILE.toml")
    url: str | None = option(metavar="URL")
    api_key_env: str | None = option(metavar="NAME|@FILE")
    running: dict[str, Any] = pairs("--running", names=RUNNING)
    servers: tuple[Settings, ...] | None = option(type=slots_of_servers, metavar="8x16,…")
    budget: float | None = option(type=duration, metavar="10m")
    folder: str = option(default="live-results", metavar="DIR")
    output: str = common("output", help="The profile.", default="profile.toml")
    seed: int = common("seed")


@command
def calibrate(given: CalibrationInput, out: Writing) -> None:
    """Measure real vLLM servers and write the profile that the twin needs.

    Servers that packer starts itself log every engine step. A running one is measured from the outside, which
    needs a profile with its settings: an estimate (packer profiles estimate) will do.

    \b
    Examples:
      packer live calibrate --launch vllm-cpu/launch.toml --budget 10m -o tiny.toml
      packer live calibrate --url http://gpu-7:8000 --profile estimated.toml --max-loras 8 --max-lora-rank 16
    """
    from packer.io.profiles import profile_to_dict, write_profile
    from packer.io.web import address_of, key_of
    from packer.live import calibration
    from packer.live.launch import read_launch

    if (given.launch_path is None) == (given.url is None):
        raise click.UsageError("Give either --launch or --url.")
    if given.url is None:
        refuse_unused("--launch", ("running", "api_key_env"))
    elif len(given.running) < len(RUNNING):
        raise click.UsageError("--url needs --profile, --max-loras and --max-lora-rank.")
    else:
        refuse_unused("--url", ("servers",))
    out.check(given.output)
    with out.progress() as progress:
        common: dict[str, Any] = {"budget_s": given.budget, "seed": given.seed, "progress": progress}
        if given.launch_path is not None:
            servers = given.servers or calibration.SERVERS
            launch = read_launch(given.launch_path)
            found = calibration.calibrate(launch, Path(given.folder), servers=servers, **common)
        else:
            known = packer.load_profile(given.running["profile"])
            settings = known.settings(given.running["max_loras"], given.running["max_lora_rank"])
            where = address_of(given.url or "", key_of(given.api_key_env))
            found = calibration.calibrate_url(where, known, Path(given.folder), settings=settings, **common)
    profile, outcomes, late = found
    write_profile(profile, given.output, force=out.force)
    failures = {o.session.key: o.failure.message for o in outcomes if o.failure is not None}
    data = {"profile": profile_to_dict(profile), "output": given.output, "budget_spent": late}
    data |= {"measurements": len(outcomes), "failures": failures}
    data["reused"] = sum(each.reused for each in outcomes)
    out.result(data, lambda: _tables(profile))
    if out.as_json:
        return
    for key, message in failures.items():
        out.note(f"{key}: {message}")
    if late:
        out.note(calibration.BUDGET_ENDED)
    earlier = f", {reused} of them from {given.folder}" if (reused := data["reused"]) else ""
    out.note(f"wrote {given.output}: {profile.name}, {len(outcomes)} measurements{earlier}")


def _tables(profile: packer.Profile) -> list[Table]:
    terms = sorted(profile.latency.coefficients.items(), key=lambda item: -item[1])
    capacity = ("max_loras", "max_lora_rank", "tokens")
    return [
        Table("Step law", ("term", "ms"), [(name, f"{value:.5g}") for name, value in terms]),
        Table("Errors", ("measure", "%"), [(k, f"{v:.2f}") for k, v in profile.errors.items()]),
        Table("KV cache capacity", capacity, profile.memory.measured, left=()),
    ]
