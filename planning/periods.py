"""One fleet at the rates of several periods: the fewest servers of one kind that keep the goal in each of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from packer.arrays import FloatArray
from packer.arrival import Arrivals
from packer.bin import Bin
from packer.objectives.headroom import with_rates
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.frontier import Conditions
from packer.planning.kept import Hour, KeptHours
from packer.planning.loop import judged, planned
from packer.planning.recommend import Deployment
from packer.planning.starving import PlannedHours
from packer.profile import Profile
from packer.workload import Workload


class _Whole(Frontier):
    """The plans of a fleet of which a plan without split adapters keeps the goal: none is simulated alone."""

    def split(self, first: int = 0) -> None:
        """Split none."""


@dataclass(eq=False)
class Periods:
    """A fleet of one base model, on one kind of server, at the rates of some periods. `rates`: float64 (n,) for each
    period by its name, req/s. `asked`: the parameters of the search; its margin raises the rates, as for
    `packer.recommend`. `arrivals`: those of a period, by its name, where they are not the fleet's. Each hour is
    simulated once for all searches."""

    fleet: Workload
    profile: Profile
    rates: Mapping[str, FloatArray]
    asked: Conditions
    arrivals: Mapping[str, Arrivals] = field(default_factory=dict)
    _at: dict[tuple[bytes, Arrivals], Workload] = field(default_factory=dict, init=False)  # The fleet in a period.

    def __post_init__(self) -> None:
        self.hours = PlannedHours(self.asked.seed, self.asked.stop)

    def of(self, adapters: Sequence[int], profile: Profile) -> Periods:
        """The periods of some of the adapters, on another kind of server."""
        rates = {name: vector[adapters] for name, vector in self.rates.items()}
        return Periods(self.fleet.subset(adapters), profile, rates, self.asked, self.arrivals)

    def busiest(self, names: Collection[str]) -> Workload:
        """The fleet in the period, of these, with the highest offered load at its height."""
        return max(map(self._in, names), key=lambda fleet: fleet.offered_tok_s * fleet.arrivals.height)

    def key(self, name: str) -> tuple[bytes, Arrivals]:
        """The rates and arrivals of a period, by which periods are equal."""
        return self.rates[name].tobytes(), self.arrivals.get(name, self.fleet.arrivals)

    def _in(self, name: str) -> Workload:
        if (key := self.key(name)) not in self._at:
            self._at[key] = with_rates(self.fleet, self.rates[name]).with_arrivals(key[1])
        return self._at[key]

    def _raised(self, fleet: Workload) -> Workload:
        """The fleet with its rates raised by the margin."""
        return self.hours.at(fleet, 1.0 + self.asked.margin_of(self.profile))

    def _kept(self, names: Collection[str]) -> KeptHours:
        """The hours in which servers are judged: those of the busiest period, and one of each period in which some
        adapter has a higher rate, at its height or on the mean."""
        fleet, seed = self.busiest(names), self.asked.seed
        most = _rates(fleet)
        fleets = {self.key(name): self._in(name) for name in names}.values()
        hotter = [each for each in fleets if (_rates(each) > most).any()]
        others = [Hour(self._raised(each), seed) for each in hotter]
        return KeptHours(fleet, self._raised(fleet), seed, self.hours, others)

    def plan(
        self,
        names: Collection[str],
        max_gpus: int | None = None,
        running: Sequence[Bin] = (),
        known: Sequence[Bin] = (),
    ) -> Plan | None:
        """The fewest servers that keep the goal in these periods, found as `packer.recommend` finds them. None: no plan
        on at most `max_gpus` keeps it. `running`: servers that the plan stays close to; `known`: those that keep it."""
        whole = known and self.fleet.slo.adapter_share == 1.0 and not any(item.is_split for item in known)
        task = self._task(names, max_gpus, running, _Whole if whole else Frontier)
        try:
            plan = judged(task)
            if plan is None or plan.verified is False:
                return None
            return task.near(plan) if running else plan
        finally:
            self.hours.forget()

    def missed(self, names: Collection[str], max_gpus: int | None) -> Plan:
        """If `plan` finds none: the plan that breaks the goal least, whose reasons say what would help."""
        return planned(self._task(names, max_gpus))

    def _task(
        self, names: Collection[str], max_gpus: int | None, running: Sequence[Bin] = (), kind: type[Frontier] = Frontier
    ) -> Deployment:
        job = kind(self.busiest(names), self.profile, known=self.hours, **vars(self.asked))
        job.kept = self._kept(names)
        return Deployment(job, max_gpus, tuple(running))

    def hold(self, names: Collection[str], bins: Sequence[Bin]) -> bool:
        """Whether these servers keep the goal in these periods and in fresh hours of the busiest one."""
        kept = self._kept(names)
        return kept.holds(bins) and not kept.broken_later(bins)

    def keeping(self, names: Collection[str], bins: Sequence[Bin]) -> list[bool]:
        """Which of these servers keep the limits of their adapters in these periods."""
        kept = self._kept(names)
        used = kept.used(bins, [*kept.hours, kept.given, *kept.others], [1.0] * len(bins))
        return [each <= 1.0 for each in used]


def _rates(fleet: Workload) -> FloatArray:
    """The rates of each adapter on the mean and at their height, req/s, float64 (2, n)."""
    return fleet.rates * [[1.0], [fleet.arrivals.height]]
