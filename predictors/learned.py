"""A trained predictor as a judge of bins."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from packer.bin import Bin, Evaluations
from packer.errors import IncompatibleError, ModelError
from packer.predictors.families import family_of
from packer.predictors.features import BinTable, FeatureExtractor
from packer.predictors.shipped import shipped_model
from packer.predictors.store import Model, read_model
from packer.predictors.targets import OUTPUTS, STARVED, decoded, probability
from packer.profile import Profile
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]
_KEEP_FLEETS = 16
_ROWS_PER_THREAD = 2048


class LearnedPredictor:
    """Judges bins with a trained model; memory errors come from the memory model, they are not learned.

    Bins of other profiles are judged by the shipped predictor of the same kind for that profile, if there is
    one.

    Parameters
    ----------
    model
        From `packer.predictors.train` or a file.
    profile
        The one that it was trained for.
    """

    kind = ""

    def __init__(self, model: Model, profile: Profile, *, where: str = "the predictor") -> None:
        model.check_profile(profile, where)
        self.model, self.profile = model, profile
        self.name = model.kind
        self.family = family_of(model)
        slack = 1e-6  # rounding is not another kind of server
        low, high = np.array(model.header["ranges"])
        self._ranges = (low - slack * np.abs(low), high + slack * np.abs(high))
        self._fleets: list[tuple[Workload, FeatureExtractor]] = []
        self._others: dict[str, LearnedPredictor] = {}

    @classmethod
    def for_profile(cls, profile: Profile, *, seed: int = 0) -> LearnedPredictor:
        """The shipped predictor of this kind; nothing in it is random."""
        del seed
        model, where = shipped_model(cls.kind, profile)
        return cls(model, profile, where=where)

    @classmethod
    def read(cls, path: str | os.PathLike[str], profile: Profile) -> LearnedPredictor:
        """The one in a file; raises `ModelError` if it is damaged or belongs to another profile."""
        return cls(read_model(path), profile, where=os.fspath(path))

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Judge each bin; one row per bin, in order. Raises `IncompatibleError` for other arrivals than Poisson."""
        if not bins:
            return Evaluations.of([])
        if workload.arrivals.kind != "poisson":
            raise IncompatibleError(
                f"The predictor {self.name!r} was trained on Poisson arrivals, got {workload.arrivals.kind!r}: "
                "take the predictor auto or twin."
            )
        parts = self._by_judge(bins)
        if len(parts) == 1:
            return parts[0][0].evaluate_table(workload, BinTable.of(bins))
        rows = [None] * len(bins)
        for judge, where in parts:
            found = judge.evaluate(workload, [bins[i] for i in where])
            for i, row in zip(where, found, strict=True):
                rows[i] = row  # type: ignore[call-overload]
        return Evaluations.of(rows)  # type: ignore[arg-type]

    def evaluate_table(self, workload: Workload, table: BinTable) -> Evaluations:
        """Judge bins given as arrays: for those who ask thousands of times."""
        extractor = self.extractor(workload)
        kv_tokens = extractor.kv_cache_tokens(table)
        features = extractor.matrix(table, kv_tokens)
        loads = workload.offered_tok_s_by_adapter[table.index] * table.share
        return self.evaluate_features(features, kv_tokens, np.add.reduceat(loads, table.indptr[:-1]))

    def evaluate_features(
        self, features: FloatArray, kv_tokens: FloatArray, offered_tok_s: FloatArray
    ) -> Evaluations:
        """Judge bins by their features, float64 (n, F), KV capacity and offered load, (n,)."""
        outputs = self.outputs(features, OUTPUTS)
        figures = decoded(outputs, features)
        chance = probability(outputs[STARVED], *self.model.header["calibration"])
        failed = kv_tokens < self.profile.memory.min_kv_tokens

        # Learned apart from each other, figures could contradict: a 99th percentile is the largest of its kind.
        p99_ttft = np.maximum(figures["p99_ttft_ms"], figures["mean_ttft_ms"])
        p99_itl = np.maximum(figures["p99_itl_ms"], figures["mean_itl_ms"])
        figures |= {"p99_ttft_ms": p99_ttft, "p99_itl_ms": p99_itl}
        figures["median_ttft_ms"] = np.minimum(figures["median_ttft_ms"], p99_ttft)

        def latency(name: str) -> FloatArray:
            return np.where(failed, np.nan, figures[name])

        return Evaluations(
            offered_tok_s=offered_tok_s,
            total_token_throughput=np.where(failed, 0.0, figures["served_share"] * offered_tok_s),
            starved=failed | (chance >= 0.5),
            memory_error=failed,
            mean_ttft_ms=latency("mean_ttft_ms"),
            median_ttft_ms=latency("median_ttft_ms"),
            p99_ttft_ms=latency("p99_ttft_ms"),
            mean_tpot_ms=latency("mean_tpot_ms"),
            mean_itl_ms=latency("mean_itl_ms"),
            p99_itl_ms=latency("p99_itl_ms"),
            kv_cache_tokens=kv_tokens,
            starvation_probability=np.where(failed, 1.0, chance),
        )

    def outputs(self, features: FloatArray, names: Sequence[str]) -> dict[str, FloatArray]:
        """Raw outputs of the model (see `OUTPUTS`) for features float64 (n, F)."""
        x = np.ascontiguousarray(features, dtype=np.float32)
        parts = np.array_split(x, min(os.cpu_count() or 1, max(1, len(x) // _ROWS_PER_THREAD)))

        def one(part: npt.NDArray[np.float32]) -> list[FloatArray]:
            return [self.family.rows(part, OUTPUTS.index(name)) for name in names]

        if len(parts) == 1:
            return dict(zip(names, one(x), strict=True))
        with ThreadPoolExecutor(len(parts)) as pool:
            found = list(pool.map(one, parts))
        return {name: np.concatenate([part[k] for part in found]) for k, name in enumerate(names)}

    def features(self, workload: Workload, bins: Sequence[Bin]) -> FloatArray:
        """What the model sees of these bins, float64 (n, F)."""
        return self.extractor(workload).matrix(BinTable.of(bins))

    def extrapolates(self, workload: Workload, bins: Sequence[Bin]) -> npt.NDArray[np.bool_]:
        """Which bins have a feature outside what the model learned from, bool (n,)."""
        found = np.zeros(len(bins), dtype=bool)
        for judge, where in self._by_judge(bins):
            features = judge.features(workload, [bins[i] for i in where])
            found[where] = judge.outside(features).any(axis=1)
        return found

    def outside(self, features: FloatArray) -> npt.NDArray[np.bool_]:
        """Which features lie outside what the model learned from, bool (n, F), for float64 (n, F).

        There it answers as at the edge: trees are flat beyond their last threshold.
        """
        low, high = self._ranges
        found: npt.NDArray[np.bool_] = (features < low) | (features > high)
        return found

    def extractor(self, workload: Workload) -> FeatureExtractor:
        """Features of the fleet's bins; kept for the last fleets asked about."""
        for known, extractor in self._fleets:
            if known is workload:
                return extractor
        extractor = FeatureExtractor(workload, self.profile)
        self._fleets = [*self._fleets[-_KEEP_FLEETS + 1 :], (workload, extractor)]
        return extractor

    def _by_judge(self, bins: Sequence[Bin]) -> list[tuple[LearnedPredictor, list[int]]]:
        """Who judges which of the bins."""
        profiles = {item.profile.fingerprint: item.profile for item in bins}
        return [
            (self._judge_of(profile), [i for i, b in enumerate(bins) if b.profile.fingerprint == fingerprint])
            for fingerprint, profile in profiles.items()
        ]

    def _judge_of(self, profile: Profile) -> LearnedPredictor:
        if profile.fingerprint == self.profile.fingerprint:
            return self
        if profile.fingerprint not in self._others:
            if not self.kind:
                raise ModelError(
                    f"A bin is of the profile {profile.name}, but the predictor was trained for "
                    f"{self.profile.name}."
                )
            self._others[profile.fingerprint] = type(self).for_profile(profile)
        return self._others[profile.fingerprint]


class ForestPredictor(LearnedPredictor):
    """A random forest, as in the paper."""

    kind = "forest"


class BoostingPredictor(LearnedPredictor):
    """Gradient-boosted trees (LightGBM)."""

    kind = "boosting"


class TreePredictor(LearnedPredictor):
    """One shallow tree for each figure, that people can read."""

    kind = "tree"


class SvmPredictor(LearnedPredictor):
    """Support vector machines, as in the paper."""

    kind = "svm"


class KnnPredictor(LearnedPredictor):
    """Nearest neighbours, as in the paper."""

    kind = "knn"
