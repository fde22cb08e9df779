"""One fleet at the rates of several periods: the fewest servers of one kind that keep the goal in each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packer.arrays import FloatArray
from packer.bin import Bin
from packer.objectives.headroom import with_rates
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.frontier import Conditions
from packer.planning.kept import Hour, KeptHours
from packer.planning.loop import judged, planned
from packer.planning.recommend import Deployment
from packer.profile import Profile
from packer.twin.hours import Hours
from packer.workload import Workload


@dataclass(frozen=True, eq=False)
class Periods:
    """A fleet of one base model, on one kind of server, at the rates of some periods. `rates`: float64 (n,) for each
    period, req/s. `asked`: the parameters of the search; its margin raises the rates, as for `packer.recommend`."""

    fleet: Workload
    profile: Profile
    rates: Sequence[FloatArray]
    asked: Conditions

    @property
    def busiest(self) -> Workload:
        """The fleet in the period with the highest offered load."""
        tokens = self.fleet.mean_tokens
        return with_rates(self.fleet, max(self.rates, key=lambda vector: float(vector @ tokens)))

    def _others(self, busiest: Workload) -> list[Hour]:
        """One hour of each period in which some adapter has a higher rate than in the busiest period."""
        hotter = {each.tobytes(): each for each in self.rates if (each > busiest.rates).any()}
        return [Hour(self._raised(with_rates(self.fleet, each)), self.asked.seed) for each in hotter.values()]

    def _raised(self, fleet: Workload) -> Workload:
        """The fleet with its rates raised by the margin."""
        return fleet.scaled(1.0 + self.asked.margin_of(self.profile))

    def plan(self, max_gpus: int | None = None, running: Sequence[Bin] = ()) -> Plan | None:
        """The fewest servers that keep the goal in all periods, found as `packer.recommend` finds them. None: no plan
        on at most `max_gpus` keeps it. `running`: servers that the plan stays close to."""
        task = self._task(max_gpus, running)
        try:
            plan = judged(task)
            if plan is None or plan.verified is False:
                return None
            return task.near(plan) if running else plan
        finally:
            task.hours.forget()

    def missed(self, max_gpus: int | None) -> Plan:
        """If `plan` finds none: the plan that breaks the goal least, whose reasons say what would help."""
        return planned(self._task(max_gpus))

    def _task(self, max_gpus: int | None, running: Sequence[Bin] = ()) -> Deployment:
        fleet = self.busiest
        job = Frontier(fleet, self.profile, **vars(self.asked))
        job.kept = KeptHours(fleet, job.raised, job.seed, job.hours, others=self._others(fleet))
        return Deployment(job, max_gpus, tuple(running))

    def hold(self, bins: Sequence[Bin]) -> bool:
        """Whether these servers keep the goal in every period and in fresh hours of the busiest period."""
        kept = self._kept
        return kept.holds(bins) and not kept.broken_later(bins)

    def keeping(self, bins: Sequence[Bin]) -> list[bool]:
        """Which of these servers keep the limits of their adapters in every period."""
        kept = self._kept
        used = kept.used(bins, [*kept.hours, kept.given, *kept.others], [1.0] * len(bins))
        return [each <= 1.0 for each in used]

    @property
    def _kept(self) -> KeptHours:
        """The hours in which given servers are judged."""
        fleet, seed = self.busiest, self.asked.seed
        hours = Hours(seed, self.asked.stop)
        return KeptHours(fleet, self._raised(fleet), seed, hours, others=self._others(fleet))
