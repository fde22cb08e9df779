"""A predictor: a fixed throughput per GPU, less a little for each adapter."""

from __future__ import annotations

from collections.abc import Sequence

from packer.bin import Bin
from packer.evaluation import STARVATION_THRESHOLD, Evaluation, Evaluations
from packer.profile import Profile
from packer.twin.memory.policy import memory_error
from packer.workload import Workload


class RuleOfThumb:
    """`tok_s` tokens a second, 0.1 % less for each adapter; latencies grow as the server fills up."""

    name = "rule-of-thumb"
    monotone = True

    def __init__(self, tok_s: float) -> None:
        self.tok_s = tok_s

    @classmethod
    def for_profile(cls, profile: Profile, *, seed: int = 0) -> RuleOfThumb:
        """The predictor for a server: 1,000 tok/s for every 10 GB of its memory."""
        return cls(profile.gpu.memory_bytes / 1e10 * 1000.0)

    def evaluate(self, workload: Workload, bins: Sequence[Bin]) -> Evaluations:
        """Figures of each bin; one row per bin, in order."""
        return Evaluations.of([self._one(workload, bin_) for bin_ in bins])

    def _one(self, workload: Workload, bin_: Bin) -> Evaluation:
        offered = bin_.offered_tok_s(workload)
        failed = memory_error(bin_.profile, bin_.settings) is not None
        capacity = 0.0 if failed else self.tok_s * max(0.1, 1.0 - 0.001 * len(bin_.adapters))
        throughput = min(offered, capacity)
        starved = throughput < STARVATION_THRESHOLD * offered
        busy = min(0.99, offered / capacity) if capacity else 0.99
        itl_ms = float("nan") if failed else 10.0 / (1.0 - 0.8 * busy)
        ttft_ms = float("nan") if failed else 50.0 / (1.0 - busy)
        return Evaluation(
            offered_tok_s=offered,
            total_token_throughput=throughput,
            starved=starved,
            memory_error=failed,
            mean_ttft_ms=ttft_ms,
            median_ttft_ms=ttft_ms,
            p99_ttft_ms=4.0 * ttft_ms,
            mean_tpot_ms=itl_ms,
            mean_itl_ms=itl_ms,
            p99_itl_ms=2.0 * itl_ms,
            kv_cache_tokens=float("nan"),
            starvation_probability=float(starved),
        )
