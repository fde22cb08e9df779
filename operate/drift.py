"""Compare measured traffic with the plan: which rates drifted, and whether the servers still hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from packer.adapter import IDLE_RATE, Adapter
from packer.arrival import Arrivals
from packer.operate.evaluate import PlanEvaluation, evaluate_plan
from packer.plan import Plan
from packer.strategies import Predictor
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

    `evaluation`: the plan's adapters at the measured rates and lengths, on their servers.
    `advice`: "keep"; "watch": the plan holds, but rates drifted or adapters are new; "replan": it does not hold, or new
    adapters have more than the tolerated share of the load.
    `drifted`: adapters whose rate differs by more than the tolerance, the largest difference first.
    `new_adapters`, `silent_adapters`: adapters seen that have no server; adapters of the plan that were not seen.
    `planned_tok_s`, `measured_tok_s`: offered loads.
    """

    evaluation: PlanEvaluation
    advice: Advice
    drifted: tuple[Drifted, ...]
    new_adapters: tuple[str, ...]
    silent_adapters: tuple[str, ...]
    planned_tok_s: float
    measured_tok_s: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-able: what the evaluation says, and the drift."""
        return {
            **self.evaluation.to_dict(),
            "advice": self.advice,
            "arrivals": self.evaluation.plan.workload.arrivals.kind,
            "offered_tok_s": {"planned": self.planned_tok_s, "measured": self.measured_tok_s},
            "new_adapters": self.new_adapters,
            "silent_adapters": self.silent_adapters,
            "drifted": [vars(row) for row in self.drifted],
        }


def drift(
    plan: Plan,
    seen: Workload,
    *,
    tolerance: float = 0.25,
    predictor: str | Predictor = "twin",
    seed: int | None = None,
) -> Drift:
    """Compare the measured fleet with a plan and evaluate the plan's servers at the measured rates.

    Parameters
    ----------
    plan
        The running plan.
    seen
        The fleet as measured (`packer.operate.observe`); its ranks do not count.
    tolerance
        A rate that differs by more than this share of the planned one counts as drifted; adapters without a server
        that have more than this share of the measured load need another plan.
    predictor, seed
        As for `evaluate_plan`, as are the errors raised.
    """
    planned = plan.workload
    now = {adapter.name: adapter for adapter in seen.adapters}
    adapters = [
        replace(old, rate=IDLE_RATE)
        if (met := now.get(old.name)) is None
        else as_met(old, met, in_sessions=own is not None)
        for old, own in zip(planned.adapters, planned.sessions_by_adapter, strict=True)
    ]
    fleet = replace(unreplayed(planned), adapters=tuple(adapters))
    found = evaluate_plan(replace(plan, workload=fleet), predictor, seed=seed)
    known, measured = set(planned.names), set(seen.names)
    rows = [
        Drifted(old.name, old.rate, new.rate if old.name in measured else 0.0)
        for old, new in zip(planned.adapters, fleet.adapters, strict=True)
        if abs(new.rate - old.rate) > tolerance * old.rate
    ]
    rows.sort(key=lambda row: -abs(row.measured - row.planned))
    new = tuple(name for name in seen.names if name not in known)
    load = dict(zip(seen.names, seen.offered_tok_s_by_adapter.tolist(), strict=True))
    holds = found.holds and sum(load[name] for name in new) <= tolerance * seen.offered_tok_s
    advice: Advice = "replan" if not holds else "watch" if rows or new else "keep"
    silent, loads = tuple(sorted(known - measured)), (planned.offered_tok_s, seen.offered_tok_s)
    return Drift(found, advice, tuple(rows), new, silent, *loads)


def unreplayed(fleet: Workload) -> Workload:
    """The fleet with rates in place of a trace, whose requests would come at its own rates, whatever was measured."""
    return fleet if fleet.arrivals.trace is None else fleet.with_arrivals(Arrivals())


def as_met(old: Adapter, met: Adapter, *, in_sessions: bool) -> Adapter:
    """The adapter as measured; a log without sessions has prompts of all turns, which say nothing of first ones."""
    if in_sessions and met.sessions is None:
        return replace(old, rate=met.rate)
    shared = met.shared_prefix_tokens or old.shared_prefix_tokens
    found = replace(old, rate=met.rate, input_tokens=met.input_tokens, output_tokens=met.output_tokens)
    return replace(found, shared_prefix_tokens=shared, sessions=met.sessions)
