"""Distributions of token lengths."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from packer import checks
from packer.arrays import FloatArray, IntArray
from packer.errors import ValidationError, shown
from packer.gamma import normal_tail, unit_gamma
from packer.public import checked

Kind = Literal["constant", "lognormal", "gamma", "empirical"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_TOKENS = 10**9  # Largest accepted length of a request, tokens.
MIN_CV = 1e-4  # Smallest cv other than 0: below it a gamma quantile can't be computed.
_SMALL_SHIFT = 0.002
_NO_LIMIT = int(np.iinfo(np.int64).max)
_Z_MAX = 6.0
_Z_GRID = np.linspace(-_Z_MAX, _Z_MAX, 4097)
_ONES = np.ones(len(_Z_GRID))
_TABLES = 512  # Largest number of quantile tables that are made or concatenated at once: 16 MB.
_KEPT = 4096  # Largest number of tables that are cached, for fleets of a log, whose adapters have own cvs: 128 MB.
_GAMMA: dict[float, FloatArray] = {}  # Quantiles of gamma distributions with mean 1, by cv; at most `_KEPT` entries.


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts per request.

    Use the constructors `constant`, `lognormal`, `gamma` and `empirical`. Real lengths are heavy-tailed:
    constant ones double the twin's error, and a clipped normal inflates the mean by 10 %.

    `kind`: family of the distribution.
    `mean`: mean in tokens, before clipping.
    `cv`: standard deviation / mean.
    `low`, `high`: samples are clipped to [low, high] tokens; `high` None means no bound.
    `values`: the sorted sample of an empirical distribution, in tokens.
    """

    kind: Kind
    mean: float
    cv: float = 0.0
    low: int = 1
    high: int | None = None
    values: tuple[float, ...] = field(default=(), repr=False)

    @checked
    def __post_init__(self) -> None:
        checks.choice("kind", self.kind, KINDS)
        checks.keep_real(self, "mean", "mean length", low=0.0, high=MAX_TOKENS, open_low=True)
        checks.keep_real(self, "cv", "cv of lengths", low=0.0, high=100.0)
        if self.kind in ("gamma", "lognormal") and 0.0 < self.cv < MIN_CV:
            raise ValidationError(f"Expected cv of lengths to be 0 or >= {MIN_CV:g}, got {self.cv:g}.")
        checks.keep_integer(self, "low", low=1, high=MAX_TOKENS)
        if self.high is not None:
            checks.keep_integer(self, "high", low=self.low, high=MAX_TOKENS)
        if self.kind == "empirical" and not self.values:
            raise ValidationError("Expected an empirical distribution of lengths to have values, got none.")

    @classmethod
    def constant(cls, mean: float) -> Lengths:
        """A distribution in which every request has the same length."""
        return cls("constant", float(checks.real("mean length", mean, low=0.0, open_low=True)))

    @classmethod
    def lognormal(cls, mean: float, cv: float, *, low: int = 1, high: int | None = None) -> Lengths:
        """A log-normal distribution with this mean and coefficient of variation."""
        return cls("lognormal", mean, cv, low, high)

    @classmethod
    def gamma(cls, mean: float, cv: float, *, low: int = 1, high: int | None = None) -> Lengths:
        """A gamma distribution with this mean and coefficient of variation."""
        return cls("gamma", mean, cv, low, high)

    @classmethod
    def empirical(cls, sample: npt.ArrayLike, *, low: int = 1, high: int | None = None) -> Lengths:
        """An empirical distribution: each value of a measured sample is equally likely, and no other is drawn."""
        try:
            values = np.sort(np.asarray(sample, dtype=np.float64).ravel())
        except (TypeError, ValueError, OverflowError):
            values = np.zeros(0)
        if values.size == 0 or not np.all((values > 0) & (values <= MAX_TOKENS)):
            rule = f"Expected a sample of lengths > 0 and <= {MAX_TOKENS:,} tokens"
            raise ValidationError(f"{rule}, got {shown(sample)}.")
        mean = float(values.mean())
        return cls("empirical", mean, float(values.std() / mean), low, high, tuple(values.tolist()))

    def quantile_at_normal(self, z: FloatArray) -> FloatArray:
        """Lengths (float tokens, unclipped) at the standard-normal scores `z`; any shape."""
        if self.kind == "constant" or self.cv == 0.0:
            return np.full(np.shape(z), self.mean)
        if self.kind == "lognormal":
            sigma = math.sqrt(math.log1p(self.cv**2))
            return np.exp(sigma * z + math.log(self.mean) - 0.5 * sigma**2)
        position, left = _on_grid(z)
        if self.kind == "empirical":
            below = _between(_normal_cdf()[left], _normal_cdf()[left + 1], position - left)
            values = _sample(self.values)
            return values[np.minimum((below * len(values)).astype(np.int64), len(values) - 1)]
        table, scale = _table(self)
        return _between(table[left] * scale, table[left + 1] * scale, position - left)

    def at_normal(self, z: FloatArray) -> IntArray:
        """Whole lengths at the standard-normal scores `z`, clipped to [low, high]."""
        return self.clipped(self.quantile_at_normal(z))

    def clipped(self, tokens: FloatArray) -> IntArray:
        """Lengths rounded to whole tokens and clipped to [low, high]."""
        return np.clip(np.rint(tokens).astype(np.int64), self.low, self.high)

    @property
    def expected(self) -> float:
        """Mean of the rounded and clipped lengths, tokens; `mean` itself if they differ by at most 0.2 %."""
        found = length_moments(self)[0]
        return found if abs(found - self.mean) > _SMALL_SHIFT * self.mean else self.mean

    def sample(self, rng: np.random.Generator, n: int) -> IntArray:
        """Draw `n` lengths, int64 (n,), tokens."""
        return self.at_normal(rng.standard_normal(n))

    def scaled(self, mean: float) -> Lengths:
        """The same shape with another mean."""
        factor = mean / self.mean
        return Lengths(self.kind, mean, self.cv, self.low, self.high, tuple(value * factor for value in self.values))


def expected_of(lengths: Sequence[Lengths]) -> FloatArray:
    """`Lengths.expected` of each distribution, tokens, float64 (n,)."""
    objects = {id(each): each for each in lengths}
    means = {id(each): each.expected for each in _tabled(list(objects.values()))}
    return np.array([means[id(each)] for each in lengths])


@lru_cache(maxsize=4096)
def length_moments(lengths: Lengths) -> tuple[float, float]:
    """E[L] and E[L²] of the rounded and clipped length L, tokens: of a sample's values, or by quadrature."""
    if lengths.kind == "empirical":
        each = lengths.clipped(_sample(lengths.values)).astype(np.float64)
        return float(each.mean()), float((each**2).mean())
    z, weight = normal_grid(801)
    tokens = lengths.at_normal(z).astype(np.float64)
    return float(weight @ tokens), float(weight @ tokens**2)


@lru_cache(maxsize=8)
def normal_grid(points: int) -> tuple[FloatArray, FloatArray]:
    """Standard-normal scores and their weights, which sum to 1, float64 (points,) each."""
    z = np.linspace(-5.0, 5.0, points)
    weight = np.exp(-0.5 * z * z)
    return z, weight / weight.sum()


def paired(first: Lengths, second: Lengths, correlation: float) -> tuple[IntArray, IntArray, FloatArray]:
    """First lengths, int64 (m, 1), and second ones, int64 (m, m), at scores with this correlation; weights (m,). The
    mean of f is `weight @ f(first, second) @ weight`."""
    z, weight = normal_grid(81)
    mixed = correlation * z[:, None] + np.sqrt(1.0 - correlation**2) * z[None, :]
    return first.at_normal(z)[:, None], second.at_normal(mixed), weight


def each_at_normal(lengths: Sequence[Lengths], which: IntArray, z: FloatArray) -> IntArray:
    """`lengths[which[i]].at_normal(z[i])` for each i, int64 (n,); `which`, `z`: (n,)."""
    tokens = np.empty(len(z))
    curved = [each.kind in ("lognormal", "empirical") and each.cv > 0.0 for each in lengths]
    for k in np.flatnonzero(curved).tolist():
        of_one = np.flatnonzero(which == k)
        tokens[of_one] = lengths[k].quantile_at_normal(z[of_one])
    tables: list[FloatArray] = []
    numbers: dict[int, int] = {}
    scale, place = np.ones(len(lengths)), np.full(len(lengths), -1)
    position, left = _on_grid(z)

    def interpolate() -> None:
        some = place >= 0
        rows: Any = slice(None) if some.all() else np.flatnonzero(some[which])
        owner, at, joined = which[rows], left[rows], np.concatenate(tables)
        start, factor = at + (place * len(_Z_GRID))[owner], scale[owner]
        tokens[rows] = _between(joined[start] * factor, joined[start + 1] * factor, position[rows] - at)

    plain = np.flatnonzero(~np.array(curved)).tolist()
    for k, each in zip(plain, _tabled([lengths[k] for k in plain]), strict=True):
        table, scale[k] = _table(each)
        if len(tables) == _TABLES and id(table) not in numbers:
            interpolate()
            tables.clear()
            numbers.clear()
            place[:] = -1
        place[k] = numbers.setdefault(id(table), len(tables))
        tables += [table] if place[k] == len(tables) else []
    if tables:
        interpolate()
    least = [each.low for each in lengths]
    most = [_NO_LIMIT if each.high is None else each.high for each in lengths]
    low, high = (np.array(ends)[which if len(set(ends)) > 1 else 0] for ends in (least, most))
    whole: IntArray = np.maximum(np.rint(tokens).astype(np.int64), low)
    return whole if all(each.high is None for each in lengths) else np.minimum(whole, high)


def _on_grid(z: FloatArray) -> tuple[FloatArray, IntArray]:
    """Positions of scores on the grid, in grid steps, and the indices of the grid points to their left."""
    # SciPy's gamma quantile is 30 times slower than the whole twin, so quantiles are interpolated on a grid. The grid
    # is uniform, so that a direct index replaces a search.
    position = (np.clip(z, -_Z_MAX, _Z_MAX) + _Z_MAX) * ((len(_Z_GRID) - 1) / (2 * _Z_MAX))
    return position, np.minimum(position.astype(np.int64), len(_Z_GRID) - 2)


def _between(low: FloatArray, high: FloatArray, share: FloatArray) -> FloatArray:
    return low + share * (high - low)


def _table(lengths: Lengths) -> tuple[FloatArray, float]:
    """Table of quantiles on the grid, and the factor that scales it; lengths of one shape share a table."""
    if lengths.kind == "constant" or lengths.cv == 0.0:
        return _ONES, lengths.mean
    while (table := _GAMMA.get(lengths.cv)) is None:
        _make_tables({lengths.cv})
    return table, lengths.mean


@lru_cache(maxsize=_TABLES)
def _sample(values: tuple[float, ...]) -> FloatArray:
    return np.array(values)


@lru_cache(maxsize=1)
def _normal_cdf() -> FloatArray:
    """Probability that a standard-normal variable is below each score of the grid."""
    return normal_tail(-_Z_GRID)


def _tabled(lengths: Sequence[Lengths]) -> Iterator[Lengths]:
    """Yield the distributions, whose tables are made for `_TABLES` of them together."""
    for k, each in enumerate(lengths):
        if k % _TABLES == 0:
            _make_tables({some.cv for some in lengths[k : k + _TABLES] if some.kind == "gamma"} - {0.0})
        yield each


def _make_tables(cvs: set[float]) -> None:
    """Add tables for these cvs, and drop the oldest ones. Many tables at once take as long as a few."""
    new = sorted(cvs - _GAMMA.keys())
    made = dict(zip(new, unit_gamma(1.0 / np.array(new) ** 2, _Z_GRID), strict=True)) if new else {}
    for old in list(_GAMMA)[: max(0, len(_GAMMA) + len(new) - _KEPT)]:
        _GAMMA.pop(old, None)
    _GAMMA.update(made)
