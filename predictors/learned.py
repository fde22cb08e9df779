"""A trained predictor."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np

from packer import checks
from packer.arrays import BoolArray, FloatArray
from packer.bin import Bin
from packer.checks import slot_rank_for
from packer.errors import IncompatibleError, ModelError
from packer.evaluation import Evaluations, unsimulated
from packer.io.profiles import load_profile, profile_names
from packer.memo import Memo
from packer.predictors.bin_table import BinTable
from packer.predictors.content import Factors
from packer.predictors.ensemble import Ensemble
from packer.predictors.families import family_of
from packer.predictors.features import COLUMN, FeatureExtractor
from packer.predictors.features_kernel import ROOM
from packer.predictors.store import Model, read_model, shipped_model
from packer.predictors.targets import LARGEST_CORRECTION, OUTPUTS, STABLE, STARVED, TARGETS, decoded, probability
from packer.predictors.trees_kernel import N_FIGURES, SHORT, evaluate_bins
from packer.profile import Profile
from packer.twin.engine.compile import begin
from packer.twin.engine_rules import caches_prefixes
from packer.twin.tuning.policy import trains
from packer.workload import Workload


class LearnedPredictor:
    """Evaluates bins with a trained model; memory errors are not learned but come from the memory model.

    `model`: from `packer.predictors.train` or a file.
    `profile`: the profile that the model was trained for.
    `transferred`: the model was trained for another profile: see `guide`.
    """

    kind = ""
    imitates_twin = True

    def __init__(
        self, model: Model, profile: Profile, *, where: str = "the predictor", transferred: bool = False
    ) -> None:
        if not transferred:
            model.check_profile(profile, where)
        self.model, self.profile = model, profile
        self.name = model.kind
        self.family = family_of(model)
        slack = 1e-6  # tolerance for rounding
        low, high = np.array(model.header["ranges"])
        self._ranges = (low - slack * np.abs(low), high + slack * np.abs(high))
        # what does not start has negative capacities where layers do not keep all tokens
        self._least = 0.0 if profile.model.kv_shape else float(profile.memory.min_kv_tokens)
        self._trees: tuple[Any, ...] | None = None
        if isinstance(self.family, Ensemble):
            # the parameters of `evaluate_bins` that belong to the model, in order
            slope, offset = map(float, model.header["calibration"])
            bases = np.array([0, *(COLUMN[target.base] for target in TARGETS), 0], dtype=np.int64)
            self._trees = (*self.family, bases, slope, offset, LARGEST_CORRECTION, *self._ranges, self._least)
        self.extractor = Memo[Workload, FeatureExtractor](partial(FeatureExtractor, profile=profile))
        """Extractors of the features of a fleet's bins, by workload."""

    @property
    def most_adapters(self) -> int:
        """Maximum number of adapters on a server of the training data."""
        return int(self._ranges[1][COLUMN["adapters"]])

    @classmethod
    def for_profile(cls, profile: Profile, *, seed: int = 0) -> LearnedPredictor:
        """Return the shipped predictor of this kind; nothing in it is random, so one object per profile is shared."""
        return cls._shipped(profile)

    @classmethod
    @cache
    def _shipped(cls, profile: Profile) -> LearnedPredictor:
        model, where = shipped_model(cls.kind, profile)
        return cls(model, profile, where=where)

    @classmethod
    @cache
    def guide(cls, profile: Profile) -> LearnedPredictor:
        """The shipped predictor of another profile, if possible of the same model, with this one's step law and memory.

        A model learns corrections of the equilibrium of its profile's step law. These transfer well enough to guide a
        search whose result the twin confirms, but not for other uses. Raises `ModelError` if no predictor is shipped.
        """
        alike = sorted(profile_names(), key=lambda name: name.rpartition("/")[2] != profile.model.name)
        for name in alike:
            try:
                model, where = shipped_model(cls.kind, load_profile(name))
            except ModelError:
                continue
            return cls(model, profile, where=where, transferred=True)
        raise ModelError(f"There is no trained {cls.kind!r} predictor of any profile.")

    @classmethod
    def read(cls, path: str | os.PathLike[str], profile: Profile) -> LearnedPredictor:
        """Read a predictor from a file; raises `ModelError` if it is damaged or belongs to another profile."""
        return cls(read_model(path), profile, where=os.fspath(path))

    def evaluate(self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0) -> Evaluations:
        """Figures of each bin at its rates times its factor; one row per bin, in order. Raises `IncompatibleError` for
        arrivals other than Poisson, and for traffic unlike the training data."""
        if workload.n_loras < len(workload):
            raise self._unlike("without requests to the base model (rank 0)")
        return self.evaluate_checked(workload, bins, factors)[0]

    def _unlike(self, trained: str) -> IncompatibleError:
        """Return the error for traffic unlike the training data."""
        return IncompatibleError(f"The predictor {self.name!r} was trained {trained}: take the predictor auto or twin.")

    def evaluate_checked(
        self, workload: Workload, bins: Sequence[Bin], factors: Factors = 1.0
    ) -> tuple[Evaluations, BoolArray]:
        """Evaluate as `evaluate` does; also return which bins have a feature outside the training range, bool (n,).
        Bins with requests to the base model count as outside. Raises `ModelError` for bins of another profile, and
        `ValidationError` for adapters on a bin without slots."""
        if not bins:
            return Evaluations.of([]), np.zeros(0, dtype=bool)
        if workload.arrivals.kind != "poisson":
            raise self._unlike(f"on Poisson arrivals, got {workload.arrivals.kind!r}")
        if trains(workload.fine_tuning):
            rule = "Trained predictors don't support servers that train beside their requests: take the twin."
            raise IncompatibleError(rule)
        for profile in (bins.profile,) if isinstance(bins, BinTable) else (item.profile for item in bins):
            if profile is not self.profile and profile.fingerprint != self.profile.fingerprint:
                rule = f"A bin is of the profile {profile.name}, but the predictor was trained for {self.profile.name}."
                raise ModelError(rule)
        if workload.has_sessions or caches_prefixes(workload, self.profile):
            raise self._unlike(f"without {'sessions' if workload.has_sessions else 'shared prefixes'}")
        table = BinTable.of(bins)
        if not table.max_loras.all():  # servers of the base model alone, which count as outside
            for item in (table[b] for b in np.flatnonzero(table.max_loras == 0).tolist()):
                if workload.ranks[list(item.adapters)].any():
                    checks.integer("max_loras of a server with adapters", item.max_loras, low=1)
            table = replace(table, max_loras=np.maximum(table.max_loras, 1.0))
        found, outside = self.evaluate_table(workload, table, factors)
        if workload.n_loras < len(workload):
            base = np.concatenate([[0], np.cumsum(workload.ranks[table.adapters] == 0)])
            outside = outside | (base[table.end] > base[table.start])
        return found, outside

    def evaluate_table(
        self, workload: Workload, table: BinTable, factors: Factors = 1.0
    ) -> tuple[Evaluations, BoolArray]:
        """Evaluate as `evaluate_checked` does, for a table of bins of the predictor's own profile."""
        extractor, n = self.extractor(workload), len(table)
        kv_tokens = extractor.kv_cache_tokens(table)
        if self._trees is None:
            features = extractor.matrix(table, factors)
            found = self.evaluate_features(features, kv_tokens, features[:, COLUMN["offered"]])
            return found, np.any(self.outside(features), axis=1)
        begin()  # compiles the engine, which simulates the plans that trees give
        figures, flags, rises = np.empty((N_FIGURES, n)), np.empty((4, n), dtype=bool), np.empty(n)
        rises[:] = factors
        evaluate_bins(
            table.start, table.end, table.adapters, table.share, rises, table.max_loras,
            table.max_lora_rank, kv_tokens, *extractor.arrays, *self._trees, figures, flags, np.empty(ROOM),
            np.empty(len(self._ranges[0]) + 1, dtype=np.float32), short=n <= SHORT,
        )  # fmt: skip
        columns: list[Any] = [*figures[:2], *flags[:2], *figures[2:], *unsimulated(n), flags[3]]
        return Evaluations(*columns), flags[2]

    def begin_compiling(self, workload: Workload) -> None:
        """Evaluate one adapter, so that the kernel of evaluations is compiled in the background if needed."""
        if self._trees is not None:
            alone = Bin((0,), self.profile.settings(1, slot_rank_for(int(workload.ranks[0]))), self.profile)
            self.evaluate_table(workload.subset([0]), BinTable.of([alone]))

    def evaluate_features(self, features: FloatArray, kv_tokens: FloatArray, offered_tok_s: FloatArray) -> Evaluations:
        """Evaluate bins by their features, float64 (n, F), KV capacity and offered load, (n,)."""
        outputs = self.outputs(features, OUTPUTS)
        figures = decoded(outputs, features)
        chance = probability(outputs[STARVED], *self.model.header["calibration"])
        failed = kv_tokens < self._least

        # Figures are learned separately and may contradict each other: no mean or median may exceed the p99.
        for name in ("ttft", "itl"):
            figures[f"p99_{name}_ms"] = np.maximum(figures[f"p99_{name}_ms"], figures[f"mean_{name}_ms"])
        figures["median_ttft_ms"] = np.minimum(figures["median_ttft_ms"], figures["p99_ttft_ms"])
        latencies = {name: np.where(failed, np.nan, each) for name, each in figures.items() if "_ms" in name}
        served = np.where(failed, 0.0, figures["served_share"] * offered_tok_s)
        return Evaluations(
            offered_tok_s, served, starved=failed | (chance >= 0.5), memory_error=failed, **latencies,
            kv_cache_tokens=kv_tokens, starvation_probability=np.where(failed, 1.0, chance),
            stable=~failed & (outputs[STABLE] > 0),
        )  # fmt: skip

    def outputs(self, features: FloatArray, names: Sequence[str]) -> dict[str, FloatArray]:
        """Raw outputs of the model (see `OUTPUTS`) for features float64 (n, F)."""
        x = np.ascontiguousarray(features, dtype=np.float32)
        return {name: self.family.rows(x, OUTPUTS.index(name)) for name in names}

    def features(self, workload: Workload, bins: Sequence[Bin]) -> FloatArray:
        """Features of these bins, float64 (n, F)."""
        return self.extractor(workload).matrix(BinTable.of(bins))

    def outside(self, features: FloatArray) -> BoolArray:
        """Return which features are outside the ranges of the training data, bool (n, F), for float64 (n, F). Outside,
        figures are those at the edge of the range: trees are flat beyond their last threshold."""
        low, high = self._ranges
        found: BoolArray = (features < low) | (features > high)
        return found


class ForestPredictor(LearnedPredictor):
    """A random forest, as in the paper."""

    kind = "forest"


class BoostingPredictor(LearnedPredictor):
    """Gradient-boosted trees (LightGBM)."""

    kind = "boosting"


class TreePredictor(LearnedPredictor):
    """One shallow tree for each figure, which can be read as rules."""

    kind = "tree"
