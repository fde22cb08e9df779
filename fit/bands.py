"""Errors of estimates by kind of extrapolation, as shares of the measured time per output token (TPOT).

`base_tpot_p50`, `base_tpot_p90`: median and 90th percentile over the rows of benchmarks/accuracy, each predicted by
shares fitted without the rows of its group. Bands of GPUs without rows are wider by the spread between kernels and
rows. `adapters_tpot_p90`: the same with adapters. No public table measures LoRA kernels on other GPUs, so it combines
the spread of the two calibrated profiles, each estimated from the other, with the spread of the base model.
"""

from __future__ import annotations

from typing import Literal

from packer.fit.dimensions import ModelDimensions
from packer.io.shipped import table
from packer.profile import Profile
from packer.twin.datasheets import GPUS, Datasheet
from packer.twin.margin import BAND_KEYS, QUANTILES, error_key

Kind = Literal["rows of this model and GPU", "rows of this GPU", "rows of this model", "rows of other servers",
               "kernels of this GPU", "data sheet alone", "data-parallel ranks"]  # fmt: skip

BANDS = table("packer.fit", "bands.toml")  # Bands by kind of model and kind of extrapolation, and what was measured.
_NORMAL = {0.5: 0.0, 0.8: 0.842, 0.9: 1.282, 0.95: 1.645, 0.99: 2.326}  # Quantiles of the normal distribution.


def kind_of(model: ModelDimensions, sheet: Datasheet, ranks: int = 1) -> Kind:
    """Return the kind of extrapolation of an estimate of this model on this GPU with `ranks` data-parallel ranks."""
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
    """Return `Profile.errors` of an estimate of this kind. The capacity margins assume a normal error whose 95th
    percentile is `adapters_tpot_p90`."""
    p50, p90, adapters = BANDS[models][kind]
    margins = {error_key(q): round(_NORMAL[q] / 1.645 * adapters, 4) for q in QUANTILES}
    low, high = 1.0 / (1.0 + adapters), 1.0 / (1.0 - adapters)
    capacity = dict(zip(BAND_KEYS, (round(low, 3), round(high, 3)), strict=True))
    return {"base_tpot_p50": p50, "base_tpot_p90": p90, "adapters_tpot_p90": adapters, **margins, **capacity}


def bands_in_words(profile: Profile) -> str:
    """Return the bands of an estimate as text; empty for a profile without bands."""
    keys, improved = (("base_tpot_p50", "base_tpot_p90", "adapters_tpot_p90"), profile.provenance.get("improved"))
    if not profile.errors.keys() >= {*keys}:
        return ""
    half, most, adapters = (f"{100 * profile.errors[key]:.0f} %" for key in keys)
    said = f"time per output token of the base model within {half} on half of the rows measured of such estimates,"
    return f"{said} within {most} on nine of ten; with adapters within {adapters}{f'; {improved}' if improved else ''}"


def evidence() -> list[dict[str, str | float]]:
    """Return the evidence for estimates of each GPU: "anchored" with measured rows of servers, else "estimated". The
    bands are those of a model without rows, separately for dense models and mixtures of experts."""
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
    """Return the kind of extrapolation for a model without rows on this GPU."""
    measured = BANDS["measured"]
    if sheet.name in measured[models]["gpus"]:
        return "rows of this GPU" if measured[models]["servers"].get(sheet.name) else "rows of other servers"
    return "kernels of this GPU" if sheet.name in measured["kernels"] else "data sheet alone"
