"""Data sets: servers simulated by the twin, their features and figures. `packer.predictors.build` makes them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.errors import FileFormatError, ValidationError, located, reader
from packer.evaluation import STARVATION_THRESHOLD
from packer.io.documents import parse_json
from packer.io.files import read_bytes
from packer.io.frames import pl
from packer.io.parquet import decoded
from packer.io.schema import parse
from packer.predictors.features import NAMES

FORMAT = "packer dataset 3"  # Changes also when seeds give other scenarios: their files must not mix.
MAX_ROWS = 4_000_000
TTFT_LABELS = ("mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms")
SHARES = ("served_share", "stable")  # Labels between 0 and 1.
LABELS = (*SHARES, "mean_itl_ms", "p99_itl_ms", "mean_tpot_ms", *TTFT_LABELS)


@dataclass(frozen=True, slots=True)
class Spec:
    """Specification of a data set, from which it can be built again, byte for byte."""

    profile: str
    fingerprint: str
    rows: int
    seed: int
    features: tuple[str, ...] = NAMES
    format: str = FORMAT

    def __post_init__(self) -> None:
        checks.integer("rows", self.rows, low=1, high=MAX_ROWS)
        checks.integer("seed", self.seed, low=0)

    def text(self) -> str:
        """Return the specification as JSON; equal specifications give equal texts."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory: features float64 (n, F), labels by name float64 (n,), family and group per row. TTFT labels
    are NaN if the run was too short for them."""

    spec: Spec
    features: npt.NDArray[np.float64]
    labels: dict[str, npt.NDArray[np.float64]]
    family: npt.NDArray[np.str_]
    group: npt.NDArray[np.str_]

    def __post_init__(self) -> None:
        n = self.spec.rows
        columns = (*self.labels.values(), self.family, self.group)
        if self.features.shape != (n, len(NAMES)) or any(len(column) != n for column in columns):
            raise ValidationError(f"Expected features and labels of {n} rows.")
        if not np.isfinite(self.features).all():
            raise ValidationError("Expected finite features.")
        unknown = np.isnan(self.labels["mean_ttft_ms"])
        for name in LABELS:
            known = self.labels[name][~unknown] if name in TTFT_LABELS else self.labels[name]
            most = 1.0 if name in SHARES else np.finfo(np.float64).max
            if not ((known >= 0.0) & (known <= most)).all():
                raise ValidationError(f"Expected {name} to be >= 0 and <= {most:g} in every row.")

    def __len__(self) -> int:
        return len(self.features)

    @property
    def digest(self) -> str:
        """Hash of the content: 16 hex digits."""
        content = hashlib.sha256(self.spec.text().encode())
        content.update(np.ascontiguousarray(self.features).tobytes())
        for name in LABELS:
            content.update(np.ascontiguousarray(self.labels[name]).tobytes())
        for texts in (self.family, self.group):
            content.update("\n".join(texts.tolist()).encode())
        return content.hexdigest()[:16]

    @property
    def starved(self) -> npt.NDArray[np.bool_]:
        """Served share below the threshold, bool (n,)."""
        return self.labels["served_share"] < STARVATION_THRESHOLD

    def summary(self) -> dict[str, Any]:
        """Summarise the data set, JSON-able: profile, scenarios by family, share of starved servers."""
        own = {name: self.starved[self.family == name] for name in sorted(set(self.family.tolist()))}
        families = {name: {"scenarios": len(each), "starved": int(each.sum())} for name, each in own.items()}
        return {
            **{name: getattr(self.spec, name) for name in ("profile", "fingerprint", "seed")},
            "scenarios": len(self),
            "starved_share": float(self.starved.mean()),
            "digest": self.digest,
            "families": families,
        }


def dataset_of(frame: pl.DataFrame, spec: Spec) -> Dataset:
    """The data set in a table; raises `FileFormatError`: a column or value is not one, or rows are missing."""
    texts = ("family", "group")
    for column in (*NAMES, *LABELS, *texts, "index"):
        if column not in frame.columns:
            raise FileFormatError("this column is missing.", column=column)
        kind = frame.schema[column]
        wanted = kind == pl.String if column in texts else kind.is_numeric()
        if not wanted or frame[column].null_count():
            what = "text" if column in texts else "numbers"
            raise FileFormatError(f"expected {what} in every row, got {kind}.", column=column)
    if frame.height != spec.rows or not (frame["index"] == pl.int_range(spec.rows, eager=True)).all():
        rule = f"expected rows 0 … {spec.rows - 1} once each, got {frame.height}: it was cut short or changed."
        raise FileFormatError(rule)
    with located():
        return Dataset(
            spec,
            frame.select(pl.col(name).cast(pl.Float64) for name in NAMES).to_numpy(),
            {name: frame[name].cast(pl.Float64).to_numpy() for name in LABELS},
            frame["family"].to_numpy().astype(np.str_),
            frame["group"].to_numpy().astype(np.str_),
        )


@reader
def read_dataset(path: str | os.PathLike[str]) -> Dataset:
    """What `build_dataset` wrote; raises `FileFormatError` if it is damaged or of another version."""
    frame, notes = decoded([read_bytes(path)])
    if "packer" not in notes or "digest" not in notes:
        raise FileFormatError("expected a data set written by packer predictor build.")
    spec = parse(Spec, parse_json(notes["packer"]))
    if spec.format != FORMAT:
        raise FileFormatError(f"expected the format {FORMAT!r}, got {spec.format[:80]!r}: build it again.")
    if spec.features != NAMES:
        unknown = ", ".join(sorted(set(spec.features) - set(NAMES)))[:200] or "none"
        absent = ", ".join(sorted(set(NAMES) - set(spec.features))) or "none"
        rule = f"its features are not this version's: unknown {unknown}; missing {absent}"
        raise FileFormatError(f"{rule}: build it again.")
    data = dataset_of(frame, spec)
    if data.digest != notes["digest"]:
        raise FileFormatError("the content does not match its hash: it was changed.")
    return data
