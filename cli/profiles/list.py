"""`packer profiles list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packer.cli.declare import command
from packer.cli.options import Output
from packer.cli.output import Table
from packer.words import number

if TYPE_CHECKING:
    from packer.profile import Profile

ERRORS = ("throughput", "itl", "ttft_queued")


@command
def list_(out: Output) -> None:
    """List the shipped profiles. Errors are SMAPE on runs not used for the fit (percent, 0–200).

    \b
    Example:
      packer profiles list
    """
    from packer.io.profiles import load_profile, profile_names

    found = [load_profile(name) for name in profile_names()]
    out.result([summary_of(profile) for profile in found], lambda: [_table(found)])


def summary_of(profile: Profile) -> dict[str, Any]:
    """What `--json` says of a profile."""
    return {
        "name": profile.name,
        "label": profile.label,
        "calibrated": profile.calibrated,
        "model": profile.model.name,
        "gpu": profile.gpu.name,
        "price_per_hour": profile.gpu.price_per_hour,
        "engine": f"{profile.engine.name} {profile.engine.version}",
        "errors": dict(profile.errors),
        "fingerprint": profile.fingerprint,
    }


def _table(found: list[Profile]) -> Table:
    rows = [
        [
            profile.label,
            profile.gpu.name,
            f"{profile.engine.name} {profile.engine.version}",
            number(profile.gpu.price_per_hour, 2),
            *(number(profile.errors.get(f"{key}_smape"), 1) for key in ERRORS),
        ]
        for profile in found
    ]
    columns = ["profile", "GPU", "engine", "price/h", "error %: tok/s", "ITL", "TTFT (queued)"]
    return Table(None, columns, rows, left=(0, 1, 2))
