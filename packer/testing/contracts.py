"""Conformance tests for each kind of strategy: subclass a contract, define its fixture, run pytest, which is needed
(docs/write-your-own.md). packer's own strategies are tested with the same classes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from packer.adapter import Adapter
from packer.bin import Bin
from packer.cluster import Cluster, ServerKind
from packer.evaluation import SIMULATED, Evaluations
from packer.objectives.base import Objective
from packer.objectives.gpus import Gpus
from packer.objectives.latency import Latency
from packer.papers.lightllm.engine import LightLlm
from packer.planning.verify import check
from packer.profile import LoadingSpec, Profile
from packer.solvers.base import Problem, Solution, Solver
from packer.solvers.evaluator import Evaluator
from packer.strategies import Predictor
from packer.testing.analytic import AnalyticPredictor, random_fleet, small_profile
from packer.twin.cluster.caching import DROP, FIXED, LFU, LRU, NOTHING, CachePolicy, TickingPolicy
from packer.twin.cluster.routers.base import ReadingRouter, Router, ScoringRouter, StaticRouter
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.run import Run
from packer.workload import Workload

SIZES = (1, 7, 40)
Evaluated = tuple[Workload, list[Bin], Evaluations]


class ObjectiveContract:
    """Rules of an objective; give the fixture `objective`."""

    @pytest.fixture
    def evaluated(self) -> Evaluated:
        """Four small bins; the last two starve or do not start."""
        fleet = random_fleet(24, seed=1, rates=(0.2, 0.1))
        profile = small_profile(price_per_hour=3.5)
        parts = [tuple(range(k, 24, 4)) for k in range(4)]
        bins = [Bin(part, profile.settings(len(part), 32), profile) for part in parts]
        found = AnalyticPredictor().evaluate(fleet, bins)
        starved, failed = np.array([0, 0, 1, 1], dtype=bool), np.array([0, 0, 0, 1], dtype=bool)
        known = dict.fromkeys(SIMULATED, np.array([0.5, 0.9, np.nan, np.nan]))
        return fleet, bins, replace(found, starved=starved, memory_error=failed, **known)

    def test_is_an_objective(self, objective: Objective) -> None:
        """It inherits from `Objective`, has a name and says what it minimises."""
        assert isinstance(objective, Objective)
        assert objective.name
        assert objective.minimises

    def test_refuses_starved_and_failing_bins(self, objective: Objective, evaluated: Evaluated) -> None:
        """No objective admits a server that starves or does not start."""
        holds = objective.holds(evaluated[2])
        assert holds.shape == (4,)
        assert holds.dtype == np.bool_
        assert not holds[2:].any()

    def test_key_is_numbers_and_repeatable(self, objective: Objective, evaluated: Evaluated) -> None:
        """The key of a plan is a tuple of floats, the same every time."""
        fleet, bins, found = evaluated
        key = objective.key(fleet, bins, found)
        assert key == objective.key(fleet, bins, found) != ()
        assert all(isinstance(value, float) for value in key)

    def test_weights_add_up_to_the_key(self, objective: Objective, evaluated: Evaluated) -> None:
        """If the first key entry counts GPUs or adds prices, it is the sum of `weight`, on which bounds rely."""
        fleet, bins, found = evaluated
        if objective.minimises in ("gpus", "price"):
            total = sum(objective.weight(bin_.profile) for bin_ in bins)
            assert objective.key(fleet, bins, found)[0] == pytest.approx(total)


class PredictorContract:
    """Rules of a predictor; give the fixture `predictor`, and `profile` unless every profile is supported."""

    @pytest.fixture
    def profile(self) -> Profile:
        """The server that it evaluates."""
        return small_profile()

    @pytest.fixture
    def fleet(self) -> Workload:
        """A fleet that it can evaluate."""
        return random_fleet(24, seed=2, rates=(0.05, 0.02), ranks=(8, 16))

    @pytest.fixture
    def bins(self, fleet: Workload, profile: Profile) -> list[Bin]:
        """A few bins of different sizes and slots."""
        return [
            Bin((0,), profile.settings(1, 16), profile),
            Bin(tuple(range(8)), profile.settings(4, 16), profile),
            Bin(tuple(range(8, 24)), profile.settings(16, 16), profile),
        ]

    def test_one_row_per_bin(self, predictor: Predictor, fleet: Workload, bins: list[Bin]) -> None:
        """It answers with one row per bin, and each row has the offered load of its bin."""
        found = predictor.evaluate(fleet, bins)
        assert len(found) == len(bins)
        np.testing.assert_allclose(found.offered_tok_s, [b.offered_tok_s(fleet) for b in bins], rtol=1e-6)

    def test_figures_make_sense(self, predictor: Predictor, fleet: Workload, bins: list[Bin]) -> None:
        """Throughput lies in [0, offered × 1.2], probabilities in [0, 1], latencies are > 0 or NaN."""
        found = predictor.evaluate(fleet, bins)
        assert np.all(found.total_token_throughput >= 0)
        assert np.all(found.total_token_throughput <= 1.2 * found.offered_tok_s)
        assert np.all((found.starvation_probability >= 0) & (found.starvation_probability <= 1))
        assert np.all(np.isnan(found.mean_itl_ms) | (found.mean_itl_ms > 0))
        assert np.all(np.isnan(found.mean_ttft_ms) | (found.mean_ttft_ms > 0))

    def test_same_answer_alone_and_in_a_batch(self, predictor: Predictor, fleet: Workload, bins: list[Bin]) -> None:
        """Figures depend on the bin, not on what else was evaluated or when."""
        together = predictor.evaluate(fleet, bins)
        for k in reversed(range(len(bins))):
            alone = predictor.evaluate(fleet, [bins[k]])[0]
            assert alone.total_token_throughput == pytest.approx(together[k].total_token_throughput)
            assert alone.feasible == together[k].feasible

    def test_hopeless_bins_starve(self, predictor: Predictor, fleet: Workload, profile: Profile) -> None:
        """A server is infeasible if its offered load is thousands of times what any GPU serves."""
        hopeless = Bin(tuple(range(24)), profile.settings(24, 16), profile)
        assert not predictor.evaluate(fleet.scaled(1e4), [hopeless])[0].feasible

    def test_slots_beyond_memory_fail(self, predictor: Predictor, fleet: Workload, profile: Profile) -> None:
        """Slots that leave no room for the KV cache are infeasible."""
        too_large = Bin((0, 1), profile.settings(100_000, 512), profile)
        assert not predictor.evaluate(fleet, [too_large])[0].feasible


class RouterContract:
    """Rules of a router; give the fixture `router`."""

    @pytest.fixture(params=[1, 3])
    def cluster(self, request: pytest.FixtureRequest) -> Cluster:
        """Servers that each hold some of the adapters; every server holds the first one."""
        count = request.param
        placement = tuple(
            {f"a{i}": 1.0 / count if i == 0 else 1.0 for i in range(12) if i == 0 or i % count == s}
            for s in range(count)
        )
        return Cluster((ServerKind("small", small_profile(), 4, 64),), ("small",) * count, placement)

    @pytest.fixture
    def traffic(self) -> Workload:
        """Twelve adapters, busy enough to queue."""
        return Workload([Adapter(f"a{i}", 8 << i % 3, 1.0) for i in range(12)])

    def run(self, router: Router, cluster: Cluster, traffic: Workload) -> Run:
        """Simulate one minute; skip the test if the router does not support the cluster."""
        reason = router.supports(cluster, traffic)
        if reason is not None:
            assert len(reason) > 5
            pytest.skip(reason)
        return simulate_cluster(traffic, cluster, router=router, duration_s=60.0)

    def test_is_a_router(self, router: Router) -> None:
        """It has a name, and is of one of the three kinds."""
        assert isinstance(router, Router)
        assert router.name
        assert isinstance(router, StaticRouter | ScoringRouter | ReadingRouter)

    def test_requests_go_where_their_adapter_is(self, router: Router, cluster: Cluster, traffic: Workload) -> None:
        """Each request goes to a server of the placement, or waits at the router; none is lost."""
        run = self.run(router, cluster, traffic)
        assert cluster.placement is not None
        given = run.requests.drop_nulls("server")
        for adapter, server in zip(given["adapter"], given["server"], strict=True):
            assert adapter in cluster.placement[server]
        assert len(run.requests) == run.sent > 0

    def test_is_repeatable(self, router: Router, cluster: Cluster, traffic: Workload) -> None:
        """The same requests and seed go to the same servers, even if the router object is reused."""
        first = self.run(router, cluster, traffic).requests
        assert first.equals(self.run(router, cluster, traffic).requests)


class CachePolicyContract:
    """Rules of a cache policy; give the fixture `policy`."""

    def run(self, policy: CachePolicy, rate: float, servers: int = 3) -> Run:
        """Simulate 5 minutes on LightLLM's engine with more adapters than fit; each is on two servers, a0 on all."""
        profile = small_profile()
        room = replace(profile.memory, kv_budget_bytes=300e6, policy="unified")
        slow = replace(profile, memory=room, loading=LoadingSpec(20.0, 1.0))
        kind = ServerKind("small", slow, 12, 64, LightLlm())
        placement = tuple(
            {f"a{i}": 1.0 for i in range(12) if i == 0 or s in (i % servers, (i + 1) % servers)} for s in range(servers)
        )
        traffic = Workload([Adapter(f"a{i}", 8 << i % 3, rate / (1 + i)) for i in range(12)])
        cluster = Cluster((kind,), ("small",) * servers, placement)
        return simulate_cluster(traffic, cluster, router="most-idle", duration_s=300.0, cache=policy)

    def test_is_a_policy(self, policy: CachePolicy) -> None:
        """It has a name, one of the compiled rules, and a share of the memory as its limit."""
        assert isinstance(policy, CachePolicy)
        assert policy.name
        assert policy.rule in (LRU, LFU, DROP, NOTHING, FIXED)
        assert 0.0 < policy.high_water <= 1.0
        if isinstance(policy, TickingPolicy):
            assert policy.period_s > 0.0

    def test_loses_no_request(self, policy: CachePolicy) -> None:
        """Each request of the first half finishes, and the hit rate lies in [0, 1]."""
        run = self.run(policy, 1.0)
        assert run.status == "ok"
        early = run.requests.filter(run.requests["sent_s"] < run.duration_s / 2)
        assert len(early) > 100
        assert early["finish_s"].null_count() == 0
        assert 0.0 <= run.hit_rate <= 1.0

    def test_acts_without_requests(self, policy: CachePolicy) -> None:
        """It may keep adapters on more servers than there are requests."""
        run = self.run(policy, 0.005, servers=40)
        assert run.status == "ok"
        assert run.sent < 40

    def test_is_repeatable(self, policy: CachePolicy) -> None:
        """The same requests and seed give the same loads and times, even if the policy object is reused."""
        first, again = self.run(policy, 0.5), self.run(policy, 0.5)
        assert first.requests.equals(again.requests)
        assert first.adapter_loads == again.adapter_loads


class SolverContract:
    """Rules of a solver; give the fixture `solver`. Problems that it refuses by `supports` are skipped."""

    def problem(self, n: int, **changes: object) -> Problem:
        """A problem with `n` adapters and the objective "gpus", or with `fixed=True` "latency" on 3 GPUs."""
        fixed = bool(changes.pop("fixed", False))
        objective: Objective = Latency() if fixed else Gpus()
        fleet = random_fleet(n, seed=n, rates=(0.4, 0.2, 0.1))
        evaluator = Evaluator(AnalyticPredictor(), objective)
        known = Problem(fleet, (small_profile(),), objective, evaluator, max_gpus=3 if fixed else None)
        return replace(known, **changes)  # type: ignore[arg-type]

    def solved(self, solver: Solver, problem: Problem) -> Solution:
        """The solution; skips the test if the solver does not support the problem."""
        reason = solver.supports(problem)
        if reason is not None:
            assert len(reason) > 5
            pytest.skip(reason)
        return solver.solve(problem)

    def test_is_a_solver(self, solver: Solver) -> None:
        """It has a name and the methods of `Solver`."""
        assert isinstance(solver, Solver)
        assert solver.name

    @pytest.mark.parametrize("n", SIZES)
    @pytest.mark.parametrize("fixed", [False, True])
    def test_keeps_the_rules_of_a_plan(self, solver: Solver, n: int, fixed: bool) -> None:
        """Every adapter is placed once or unplaced, ranks fit the slots, limits are kept."""
        problem = self.problem(n, fixed=fixed)
        check(problem, self.solved(solver, problem))

    @pytest.mark.parametrize("fixed", [False, True])
    def test_is_repeatable(self, solver: Solver, fixed: bool) -> None:
        """The same problem and seed give the same bins."""
        problem = self.problem(30, fixed=fixed)
        assert self.solved(solver, problem).bins == solver.solve(problem).bins

    @pytest.mark.parametrize("fixed", [False, True])
    def test_keeps_the_limit_on_gpus(self, solver: Solver, fixed: bool) -> None:
        """A solver keeps `max_gpus`: with too much load, adapters are unplaced with reasons, or bins starve."""
        problem = self.problem(60, fixed=fixed, max_gpus=1)
        found = self.solved(solver, problem)
        check(problem, found)
        assert len(found.bins) <= 1
        if found.unplaced:
            assert found.reasons

    def test_a_bound_is_no_more_than_the_plan(self, solver: Solver) -> None:
        """A lower bound never exceeds the value of the plan that comes with it."""
        problem = self.problem(40)
        found = self.solved(solver, problem)
        if found.lower_bound is not None and not found.unplaced:
            rows = problem.evaluator.evaluate(problem.workload, found.bins)
            assert found.lower_bound <= problem.objective.key(problem.workload, found.bins, rows)[0] + 1e-9

    @pytest.mark.parametrize("fixed", [False, True])
    def test_returns_when_stopped(self, solver: Solver, fixed: bool) -> None:
        """A solver that is stopped from the start still returns a solution that keeps the rules."""
        problem = self.problem(40, fixed=fixed, stop=lambda: True)
        check(problem, self.solved(solver, problem))
