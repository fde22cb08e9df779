"""`packer profiles list`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packer.cli.declare import command
from packer.cli.options import Output
from packer.cli.output import Table
from packer.words import money, number

if TYPE_CHECKING:
    from packer.profile import Profile

ERRORS = ("throughput", "itl", "ttft_queued")


@command
def list_(out: Output) -> None:
    """List the measured profiles, and what estimates for each GPU rest on.

    Errors of measured profiles are SMAPE on runs not used for the fit (percent, 0–200). Bands of estimates are of the
    time per output token of a model without measurements of its own, %: the median and the 90th percentile. Anchored:
    servers of that GPU were measured.

    \b
    Example:
      packer profiles list
    """
    from packer.fit.bands import evidence
    from packer.io.profiles import load_profile, profile_names

    found = [load_profile(name) for name in profile_names()]
    data = [{**summary_of(profile), "kind": "measured"} for profile in found]
    out.result(lambda: [*data, *evidence()], lambda: [_table(found), _estimates(evidence())])


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


def _estimates(rows: list[dict[str, Any]]) -> Table:
    def band(row: dict[str, Any], models: str) -> str:
        half, most = (row[f"{models}_base_tpot_p{q}"] for q in (50, 90))
        return f"{100 * half:.0f}, {100 * most:.0f}"

    lines = [
        [
            row["name"], row["kind"], row["dense_from"], band(row, "dense"), band(row, "experts"),
            f"{100 * row['dense_adapters_tpot_p90']:.0f}",
        ]
        for row in rows
    ]  # fmt: skip
    columns = ["GPU", "kind", "from", "dense %: p50, p90", "experts", "adapters: p90"]
    return Table("Estimates (packer profiles estimate, packer solve --gpu)", columns, lines, left=(0, 1, 2))


def _table(found: list[Profile]) -> Table:
    rows = [
        [
            profile.label,
            profile.gpu.name,
            f"{profile.engine.name} {profile.engine.version}",
            money(profile.gpu.price_per_hour),
            *(number(profile.errors.get(f"{key}_smape"), 1) for key in ERRORS),
        ]
        for profile in found
    ]
    columns = ["profile", "GPU", "engine", "price/h", "error %: tok/s", "ITL", "TTFT (queued)"]
    return Table(None, columns, rows, left=(0, 1, 2))
