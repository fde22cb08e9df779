"""How far estimates are off, by kind of extrapolation: shares of the measured time per output token.

`base_tpot_p50` and `base_tpot_p90`: half and nine tenths of the rows of benchmarks/accuracy were off by less, each
predicted by shares that were fitted without the rows of its group; wider for GPUs without rows, by the spread between
kernels and rows. `adapters_tpot_p90`: with adapters, whose kernels no public table measures on other GPUs: the spread
of the two calibrated profiles, each estimated from the other one, and of the base model.
"""

from __future__ import annotations

from typing import Literal

from packer.fit.dimensions import ModelDimensions
from packer.io.shipped import table
from packer.profile import Profile
from packer.twin.datasheets import GPUS, Datasheet
from packer.twin.margin import QUANTILES, error_key

Kind = Literal["rows of this model and GPU", "rows of this GPU", "rows of this model", "rows of other servers",
               "kernels of this GPU", "data sheet alone", "data-parallel ranks"]  # fmt: skip

BANDS = table("packer.fit", "bands.toml")
"""Bands by kind of model and kind of extrapolation, and what was measured."""

BAND_KEYS = ("estimated_capacity_low", "estimated_capacity_high")
"""Keys of the band of a server's capacity, real / estimated, in the errors of an estimate."""

_NORMAL = {0.5: 0.0, 0.8: 0.842, 0.9: 1.282, 0.95: 1.645, 0.99: 2.326}
"""Quantiles of the normal distribution."""


def kind_of(model: ModelDimensions, sheet: Datasheet, ranks: int = 1) -> Kind:
    """What an estimate of this model on this GPU, with so many data-parallel ranks, extrapolates from."""
    models = "experts" if model.experts else "dense"
    if ranks > 1:
        return max("data-parallel ranks", kind_of(model, sheet), key=lambda kind: BANDS[models][kind][1])
    measured = BANDS["measured"][models]
    if sheet.name in measured["gpus"] and any(model.name.startswith(name) for name in measured["models"]):
        servers = measured["servers"].get(sheet.name, ())
        here = any(model.name.startswith(each) for each in servers)
        return "rows of this model and GPU" if here else "rows of this model"
    return _of_gpu(models, sheet)


def band_errors(kind: Kind, models: str = "dense") -> dict[str, float]:
    """`Profile.errors` of an estimate of that kind.

    The margins of capacity follow from a normal error that has the 95th percentile of adapters.
    """
    p50, p90, adapters = BANDS[models][kind]
    margins = {error_key(q): round(_NORMAL[q] / 1.645 * adapters, 4) for q in QUANTILES}
    low, high = 1.0 / (1.0 + adapters), 1.0 / (1.0 - adapters)
    capacity = dict(zip(BAND_KEYS, (round(low, 3), round(high, 3)), strict=True))
    return {"base_tpot_p50": p50, "base_tpot_p90": p90, "adapters_tpot_p90": adapters, **margins, **capacity}


def bands_in_words(profile: Profile) -> str:
    """The bands of an estimate, for people; empty for a profile without them."""
    keys, improved = (
        ("base_tpot_p50", "base_tpot_p90", "adapters_tpot_p90"),
        profile.provenance.get("improved"),
    )
    if not profile.errors.keys() >= {*keys}:
        return ""
    half, most, adapters = (f"{100 * profile.errors[key]:.0f} %" for key in keys)
    return (
        f"time per output token of the base model within {half} on half of the rows measured of such estimates, "
        f"within {most} on nine of ten; with adapters within {adapters}{f'; {improved}' if improved else ''}"
    )


def evidence() -> list[dict[str, str | float]]:
    """What estimates for each GPU rest on: "anchored" on rows of servers, on kernels or on the data sheet alone.

    The bands hold for a model without rows; dense models and mixtures of experts have their own.
    """
    found: list[dict[str, str | float]] = []
    for sheet in GPUS.values():
        row: dict[str, str | float] = {"name": sheet.name, "gpu": sheet.title, "kind": "estimated"}
        for models in ("dense", "experts"):
            kind = _of_gpu(models, sheet)
            servers = BANDS["measured"][models]["servers"].get(sheet.name, ())
            row["kind"] = "anchored" if servers or row["kind"] == "anchored" else "estimated"
            row[f"{models}_from"] = kind
            errors = band_errors(kind, models).items()
            row |= {f"{models}_{key}": value for key, value in errors if "tpot" in key}
        found.append(row)
    return sorted(found, key=lambda row: (row["kind"], row["dense_base_tpot_p90"], row["name"]))


def _of_gpu(models: str, sheet: Datasheet) -> Kind:
    """What an estimate of a model without rows extrapolates from on this GPU."""
    measured = BANDS["measured"]
    if sheet.name in measured[models]["gpus"]:
        return "rows of this GPU" if measured[models]["servers"].get(sheet.name) else "rows of other servers"
    return "kernels of this GPU" if sheet.name in measured["kernels"] else "data sheet alone"
