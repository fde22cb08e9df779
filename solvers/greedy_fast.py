"""`greedy` for running processes: its first fit in one compiled call, for predictors that are trees.

The same bins as `packer.solvers.first_fit`, in well under a millisecond for hundreds of adapters, which an
autoscaler can ask every second. What `greedy` does besides is left out: the comparison with the paper's plan and
the evening out of load. Ctrl-C and time limits wait for the call to end: up to a second for 20,000 adapters.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from packer.bin import Bin
from packer.checks import SLOT_RANKS
from packer.predictors.base import Predictor
from packer.predictors.ensemble import Ensemble
from packer.predictors.features import COLUMN, NAMES
from packer.predictors.learned import LearnedPredictor
from packer.predictors.targets import LARGEST_CORRECTION, OUTPUTS, STARVED, TARGETS
from packer.profile import Profile
from packer.solvers.base import MAX_LORAS_CANDIDATES, Problem, Solution
from packer.solvers.cache import CachedPredictor
from packer.solvers.candidates import MAX_ADAPTERS_PER_GPU
from packer.solvers.counts import one_type
from packer.solvers.greedy_kernel import Judge, Room, first_fit
from packer.solvers.limit import within_limit
from packer.solvers.margin import MarginPredictor
from packer.solvers.order import paper_order
from packer.solvers.probe import Probe
from packer.solvers.reasons import largest_share, too_hot
from packer.twin.memory.policy import kv_cache_tokens_many
from packer.workload import Workload

FloatArray = npt.NDArray[np.float64]

ASKED = (STARVED, "served_share", "mean_ttft_ms", "mean_itl_ms")
"""Outputs that the search looks at, in the kernel's order."""

_BASES = {target.name: COLUMN[target.base] for target in TARGETS} | {STARVED: 0}
_RANKS = np.array(SLOT_RANKS, dtype=np.int64)


class GreedyFast:
    """First-fit decreasing with bisection, compiled; for the predictors tree, forest and boosting."""

    name = "greedy-fast"

    def supports(self, problem: Problem) -> str | None:
        """The objective "gpus" on one GPU type, adapters whole, and a predictor made of trees."""
        if problem.objective.name != "gpus":
            return "it knows the objective gpus only; greedy takes any that chooses the number of GPUs"
        if problem.max_replicas > 1:
            return "it does not split adapters over several GPUs (--max-replicas 1)"
        kind = problem.workload.arrivals.kind
        if kind != "poisson":
            return f"trees are trained on Poisson arrivals, got {kind!r}; take greedy with --predictor auto or twin"
        return one_type(problem) or _unfit_judge(problem)

    def solve(self, problem: Problem) -> Solution:
        """Bins in the order in which they were filled."""
        found = _trees(problem.predictor)
        assert found is not None, "supports() was not asked"
        learned, raised = found
        workload = problem.workload if raised is None else raised.raised(problem.workload)
        judge = _judge(learned, workload)
        bins, left = _packed(judge, problem, workload)
        solution = Solution(tuple(bins), tuple(left), tuple(_hot(problem, left)))
        return within_limit(problem, solution)


def _unfit_judge(problem: Problem) -> str | None:
    """Why the predictor can't be asked in compiled code, or None if it can."""
    found = _trees(problem.predictor)
    if found is None:
        return f"it asks tree, forest or boosting in compiled code, not {problem.predictor.name}"
    trained, asked = found[0].profile, problem.profile
    if trained.fingerprint != asked.fingerprint:  # the predictor would hand over to another; the kernel can't
        return (
            f"its predictor was trained for {trained.name} ({trained.fingerprint}), and the GPUs are "
            f"{asked.label} ({asked.fingerprint})"
        )
    return None


def _trees(predictor: Predictor) -> tuple[LearnedPredictor, MarginPredictor | None] | None:
    """The trees behind a predictor, and who raises the rates on the way; None if there are none."""
    raised: MarginPredictor | None = None
    while isinstance(predictor, MarginPredictor | CachedPredictor):
        if isinstance(predictor, MarginPredictor):
            raised = predictor
        predictor = predictor.predictor
    trees = isinstance(predictor, LearnedPredictor) and isinstance(predictor.family, Ensemble)
    return (predictor, raised) if trees else None  # type: ignore[return-value]


def _judge(learned: LearnedPredictor, workload: Workload) -> Judge:
    """The model and the fleet as the kernel takes them."""
    trees = learned.family
    assert isinstance(trees, Ensemble)
    extractor = learned.extractor(workload)
    slope, offset = learned.model.header["calibration"]
    return Judge(
        extractor.fleet,
        extractor.law,
        extractor.paper,
        extractor.engine,
        np.searchsorted(_RANKS, workload.ranks).astype(np.int64),
        _RANKS.astype(np.float64),
        _kv_tokens(learned.profile),
        float(learned.profile.memory.min_kv_tokens),
        trees.feature,
        trees.threshold,
        trees.left,
        trees.roots,
        trees.depths,
        trees.starts,
        trees.bias,
        np.array([OUTPUTS.index(name) for name in ASKED], dtype=np.int64),
        np.array([_BASES[name] for name in ASKED], dtype=np.int64),
        float(slope),
        float(offset),
        LARGEST_CORRECTION,
        workload.offered_tok_s_by_adapter,
        np.array(MAX_LORAS_CANDIDATES, dtype=np.int64),
    )


@lru_cache(maxsize=16)
def _kv_tokens(profile: Profile) -> FloatArray:
    """KV capacity by slot rank and slots, float64 (r, p + 1), tokens."""
    slots = np.arange(MAX_ADAPTERS_PER_GPU + 1)
    return kv_cache_tokens_many(profile, np.maximum(slots, 1)[None, :], _RANKS[:, None])


def _room(adapters: int) -> Room:
    size = min(adapters, MAX_ADAPTERS_PER_GPU)
    options = len(MAX_LORAS_CANDIDATES) + 2
    x = np.full(len(NAMES) + 1, -np.inf, dtype=np.float32)
    return Room(
        np.zeros(size, dtype=np.int64),
        np.ones(size),
        np.zeros(2, dtype=np.int64),
        np.zeros((3, 1)),
        np.zeros((1, len(NAMES))),
        x,
        np.zeros(options, dtype=np.int64),
        np.zeros((options, 4)),
        np.zeros(options, dtype=np.int64),
        np.zeros(options, dtype=np.int64),
        np.zeros(2, dtype=np.int64),
    )


def _packed(judge: Judge, problem: Problem, workload: Workload) -> tuple[list[Bin], list[int]]:
    """The kernel's bins, and the adapters that an empty GPU can't serve."""
    n = len(workload)
    placed, ends, slots, left = (np.empty(n, dtype=np.int64) for _ in range(4))
    falling = np.lexsort((np.arange(n), -judge.load)).astype(np.int64)
    count, n_left = first_fit(judge, _room(n), paper_order(workload), falling, placed, ends, slots, left)
    done = int(ends[count - 1]) if count else 0  # those left are not among the placed
    tops = np.maximum.reduceat(judge.slot[placed[:done]], np.r_[0, ends[: count - 1]]) if count else ()
    bins, start = [], 0
    for end, chosen, top in zip(ends[:count].tolist(), slots.tolist(), tops, strict=False):
        settings = problem.profile.settings(chosen, SLOT_RANKS[top])
        bins.append(Bin(tuple(placed[start:end].tolist()), settings, problem.profile))
        start = end
    return bins, left[:n_left].tolist()


def _hot(problem: Problem, left: list[int]) -> list[str]:
    """Why each of these adapters has no place."""
    probe = Probe(replace(problem, max_gpus=None))
    return [too_hot(probe, i, largest_share(probe, i, problem.profile)) for i in left]
