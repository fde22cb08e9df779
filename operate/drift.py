"""Compare measured traffic with the plan: which rates drifted, and whether the servers still hold."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

from packer import checks
from packer.adapter import IDLE_RATE, Adapter
from packer.arrival import Arrivals
from packer.errors import IncompatibleError
from packer.gpu import base_model, serves
from packer.operate.evaluate import PlanEvaluation, evaluate_plan, holds_routed
from packer.operate.observe import requests_to
from packer.plan import Plan
from packer.public import public
from packer.strategies import Predictor
from packer.traces.trace import Trace
from packer.twin.cluster.simulate import simulate_cluster
from packer.twin.verdict import RunVerdict, verdict_of
from packer.workload import Workload

Advice = Literal["keep", "watch", "replan"]


@dataclass(frozen=True)
class Drifted:
    """An adapter whose rate differs from the planned one; req/s."""

    adapter: str
    planned: float
    measured: float


@dataclass(frozen=True, eq=False)
class Drift:
    """What changed since the plan was made.

    `evaluation`: the plan's adapters at the measured rates and lengths, on their servers, and new adapters on the least
    loaded servers with large enough slots.
    `advice`: "keep"; "watch": the plan holds, but rates drifted or adapters are new; "replan": the plan does not hold,
    drawn or replayed requests alike, or new adapters have no server or more than the tolerated share of the load.
    `drifted`: adapters whose rate differs by more than the tolerance, the largest difference first.
    `new_adapters`, `silent_adapters`: adapters seen that the plan does not have; adapters of the plan with traffic that
    were not seen. `new_share`: share of the new adapters in the measured load.
    `planned_tok_s`, `measured_tok_s`: offered loads.
    `replayed`: whether the replayed requests keep the goal; None if the requests are not known.
    """

    evaluation: PlanEvaluation
    advice: Advice
    drifted: tuple[Drifted, ...]
    new_adapters: tuple[str, ...]
    silent_adapters: tuple[str, ...]
    planned_tok_s: float
    measured_tok_s: float
    new_share: float = 0.0
    replayed: RunVerdict | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what the evaluation says, and the drift."""
        return {
            **self.evaluation.to_dict(),
            "advice": self.advice,
            **({} if self.replayed is None else {"replayed": self.replayed.to_dict()}),
            "arrivals": self.evaluation.plan.workload.arrivals.kind,
            "offered_tok_s": {"planned": self.planned_tok_s, "measured": self.measured_tok_s},
            "new_adapters": self.new_adapters,
            "silent_adapters": self.silent_adapters,
            "drifted": [vars(row) for row in self.drifted],
        }


@public
def drift(
    plan: Plan,
    seen: Workload,
    *,
    tolerance: float = 0.25,
    predictor: str | Predictor = "twin",
    seed: int | None = None,
    in_log: bool = False,
    requests: tuple[Trace, float] | None = None,
) -> Drift:
    """Compare the measured fleet with a plan and evaluate the plan's servers at the measured rates.

    `plan`, `seen`: the running plan, and the fleet as measured (`packer.operate.observe`), with the ranks of adapters
    that the plan does not have. These are placed as `evaluate_plan` does, unless the plan has several base models and
    it is not clear to which of them they belong. Rank 0 is the base model (`with_base`).
    `tolerance`: a rate that differs by more than this share of the planned one counts as drifted; new adapters that
    have more than this share of the measured load need another plan.
    `predictor`, `seed`: as for `evaluate_plan`, as are the errors raised.
    `in_log`: whether the fleet was measured from requests. If so, its bursts and length correlation, which metrics do
    not show, replace those of the plan.
    `requests`: the requests from which the fleet was measured, with its names, and the length of their window, s. They
    are replayed on the plan's servers.
    """
    checks.real("tolerance", tolerance, low=0.0)
    planned = plan.workload
    known = set(planned.names)
    come = [_of_model(planned, each) for each in seen.adapters if each.name not in known]
    added = [each for each in come if each is not None]
    plain = [each for each in added if not each.rank]
    now = {adapter.name: adapter for adapter in seen.adapters}
    adapters = [
        replace(old, rate=IDLE_RATE)
        if (met := now.get(old.name)) is None
        else as_met(old, met, in_sessions=own is not None)
        for old, own in zip(planned.adapters, planned.sessions_by_adapter, strict=True)
    ]
    fleet = replace(unreplayed(planned), adapters=tuple(adapters))
    if in_log:
        fleet = replace(fleet, arrivals=seen.arrivals, length_correlation=seen.length_correlation)
    found = evaluate_plan(replace(plan, workload=fleet), predictor, add=added, seed=seed)
    measured = set(seen.names)
    rows = [
        Drifted(old.name, rate, new.rate if old.name in measured else 0.0)
        for old, rate, new in zip(planned.adapters, planned.given_rates.tolist(), fleet.adapters, strict=True)
        if abs(new.rate - old.rate) > tolerance * old.rate
    ]
    rows += [Drifted(each.name, 0.0, each.rate) for each in plain]
    rows.sort(key=lambda row: -abs(row.measured - row.planned))
    known |= {each.name for each in plain}
    new = tuple(name for name in seen.names if name not in known)
    load = dict(zip(seen.names, seen.offered_tok_s_by_adapter.tolist(), strict=True))
    replayed = None if requests is None else replayed_on(found.plan, *requests)
    kept = found.holds and (replayed is None or replayed.holds)
    share = sum(load[name] for name in new) / seen.offered_tok_s
    replan = not kept or share > tolerance or None in come  # those have no server
    advice: Advice = "replan" if replan else "watch" if rows or new else "keep"
    expected = {old.name for old in planned.adapters if old.rate > IDLE_RATE}
    silent, loads = tuple(sorted(expected - measured)), (planned.offered_tok_s, seen.offered_tok_s)
    return Drift(found, advice, tuple(rows), new, silent, *loads, share, replayed)


def replayed_on(plan: Plan, requests: Trace, window_s: float) -> RunVerdict | None:
    """Whether a plan's servers keep the limits that the plan was made for when these requests are replayed.

    `window_s`: minimum simulated time. It is longer than a short log, so that all of its requests end.
    Requests of adapters without a server are left out; None if there are no other requests.
    """
    served = plan.workload.subset(sorted({i for item in plan.bins for i in item.adapters}))
    trace = requests_to(served.names, requests, window_s)
    if trace is None:
        return None
    run = simulate_cluster(served.replaying(trace), plan.cluster(), router="plan", seed=plan.seed)
    found = verdict_of(run)
    if "slo_used" in plan.limits or run.status != "ok":
        return found
    return replace(found, holds=not run.starved and holds_routed(plan, run))


def with_base(plan: Plan, seen: Workload, names: Collection[str] = ()) -> Workload:
    """The measured fleet; its base model, by `names` or its own, gets rank 0 and the plan's name, if there is one."""
    specs = {item.profile.model for item in plan.bins}
    own = {each for each in seen.names if each in names or any(serves(spec, each) for spec in specs)}
    own -= set(plan.workload.names)
    left = [each.name for each in plan.workload.adapters if not each.rank and each.name not in seen.names]
    to = dict(zip(own, left, strict=True)) if len(own) == len(left) == 1 else {}
    adapters = (replace(a, name=to.get(a.name, a.name), rank=0) if a.name in own else a for a in seen.adapters)
    return replace(seen, adapters=tuple(adapters))


def _of_model(planned: Workload, seen: Adapter) -> Adapter | None:
    """An adapter, or requests to the base model, with its base model; None if it is not clear which one that is."""
    models = {base_model(model): model for model in planned.models}
    model = models.get(base_model(seen.name), planned.models[0] if len(models) == 1 else None)
    return replace(seen, model=model) if model or not models else None


def unreplayed(fleet: Workload) -> Workload:
    """The fleet with rates instead of a trace, whose replayed requests would ignore measured rates."""
    return fleet if fleet.arrivals.trace is None else fleet.with_arrivals(Arrivals())


def followed(fleet: Workload) -> Workload:
    """The fleet for `packer live follow`: `unreplayed`, and without a trend, because its rates are measured anew.
    Raises `IncompatibleError`: its adapters are of several base models."""
    if len(fleet.models) > 1:
        rule = f"Expected adapters of one base model to follow, got those of {', '.join(fleet.models)}:"
        raise IncompatibleError(f"{rule} follow a plan of each, with a file of its servers.")
    fleet = unreplayed(fleet)
    return fleet.with_arrivals(fleet.arrivals.following(()))


def as_met(old: Adapter, met: Adapter, *, in_sessions: bool) -> Adapter:
    """The adapter as measured; of one in sessions the rate only, if the log has no sessions to tell first prompts."""
    if in_sessions and met.sessions is None:
        return replace(old, rate=met.rate)
    shared = met.shared_prefix_tokens or old.shared_prefix_tokens
    found = replace(old, rate=met.rate, input_tokens=met.input_tokens, output_tokens=met.output_tokens)
    return replace(found, shared_prefix_tokens=shared, sessions=met.sessions)
