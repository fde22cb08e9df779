"""Why fewer GPUs are not enough, and for which weaker goals they are, from the plans of a frontier."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy

import numpy as np

from packer.arrays import Float32Array
from packer.bin import Bin
from packer.lengths import each_at_normal
from packer.plan import Plan
from packer.planning.explore import Frontier
from packer.planning.frontier import FrontierPoint
from packer.planning.kept import DRAWN, NEARLY, Hour, KeptHours
from packer.planning.rarely import busy_hours
from packer.predictors.features import length_pairs
from packer.profile import ONE_TOKENIZER, Profile
from packer.twin.engine_rules import rules_of
from packer.twin.limits import BEFORE_TRAFFIC, starting
from packer.twin.memory.policy import least_kv_tokens
from packer.twin.memory.starts import CONTEXT_STEP, largest_max_loras
from packer.twin.override import with_engine
from packer.words import counted
from packer.workload import Workload

SHARES = (0.99, 0.95)  # Weaker goals: shares of the adapters that must keep their limits.
LONGER = (2.5, 5.0, 10.0)  # Weaker goals: TTFT limits that are wider by these factors; the narrowest is named.
WIDER = (1.25, 1.5, *LONGER)  # Factors of other limits than those of the default goal, if the goal has any.
SLO = "--slo "
USUAL = "p95_ttft_ms", "mean_itl_ms"
AFTER_START = "all but the first minutes after a start"
WARM = "--warm-start true plans for servers that have answered a request to each adapter"
SAVED = 0.1  # Share of the GPUs that a weaker goal must save to be named.
FULL = 0.75  # Share of the slots with which a server starts, from which on it has no room for many more.
LONG = 4.0  # Standard-normal score of long requests: one of 30,000 is longer.
SPAN_S = 900.0  # The minutes in which requests were late are shown if they span at most this time.


def latency(value_ms: float) -> str:
    """A TTFT in words."""
    if math.isnan(value_ms):
        return "without an answer"
    return f"{value_ms:.0f} ms" if value_ms < 999.5 else f"{value_ms / 1000:.1f} s"


def late_words(kept: KeptHours, point: FrontierPoint) -> str:
    """How long requests wait, and when, if a plan breaks TTFT limits, else how far it is beyond those of ITL, that a
    queue grows, or how much of its other limits a server uses; "" if none of these is the cause."""
    hours = kept.hours if point.broken_later else [kept.planned]
    for hour in hours:
        worst = max(kept.all(point.plan.bins, hour), key=lambda each: each.used)
        if 1.0 < worst.used < math.inf and worst.late.size:
            sent_s, waits_ms = worst.late
            of_log = " of the log, replayed," if hour in kept.others else ""
            return f": requests{of_log} wait up to {latency(waits_ms.max())}{_when(sent_s, hour.fleet)}"
    allowed_ms = kept.workload.slo.columns(kept.workload)[1]
    found = [kept.adapters(point.plan.bins, hour) for hour in hours]
    slow_ms = [each.mean_itl_ms[each.mean_itl_ms > allowed_ms] for each in found]
    if (most_ms := np.concatenate(slow_ms).max(initial=0.0)) > 0.0:
        return f": ITL up to {most_ms:.0f} ms"
    if any(np.isinf(each.slo_used).any() for each in found):
        return ": a queue grows"
    most = max(each.used for hour in hours for each in kept.all(point.plan.bins, hour))
    return f": a server uses {math.ceil(100.0 * most)} % of its limits" if most > 1.0 else ""


def _when(sent_s: Float32Array, fleet: Workload) -> str:
    """In which part of the hour requests were sent; "" if they are spread over it."""
    first_s, last_s = float(sent_s.min()), float(sent_s.max())
    if starting(sent_s, fleet).all():
        return f" in the first {10 * math.floor(last_s / 10.0 + 1.0)} s after a start"
    if last_s - first_s > SPAN_S:
        return ""
    first, last = (int(each // 60.0) + 1 for each in (first_s, last_s))
    return f" in minute {first}" if first == last else f" in minutes {first}–{last}"


def start_words(kept: KeptHours, bins: Sequence[Bin], number: int) -> tuple[str, ...]:
    """A sentence about the first minutes after a start, if requests wait for more than twice the limit only or mostly
    then."""
    if all(item.profile.engine.warm_start for item in bins):
        return ()
    hours = (*kept.hours, kept.given, *kept.fresh(bins, number))
    late = np.hstack([each.late for hour in hours for each in kept.all(bins, hour)])
    early = late[:, starting(late[0], kept.workload)]
    if 2 * early.shape[1] <= late.shape[1] or early[1].max() <= 2.0 * kept.workload.slo.limits.p95_ttft_ms:
        return ()
    return (f"Requests wait up to {latency(early[1].max())}{_when(early[0], kept.workload)}: {BEFORE_TRAFFIC}.",)


def busy_words(kept: KeptHours, plan: Plan, most: float = math.inf) -> tuple[str, ...]:
    """A sentence if busy hours break the goal on servers that keep it in fresh hours: how many of those drawn, and for
    how many adapters; and that a server more, if there is one of `most` GPUs, has more room. Servers whose rates may
    grow by more than a step of `LEVELS` seldom break it."""
    near, hours = busy_hours(kept, plan)
    broken = kept.broken_in(near, hours) if near else []
    if not broken:
        return ()
    used = np.array([kept.adapters(near, hour).slo_used for hour in broken])
    used = used[:, sorted({i for item in near for i in item.adapters})]
    late = int((np.nan_to_num(used, nan=np.inf).max(axis=0) > 1.0).sum())
    drawn = f"the busiest {len(hours)} of {DRAWN * len(hours)} hours {len(broken)} break{'s' * (len(broken) == 1)} it"
    told = f"Busy hours may break the goal: of {drawn}, for {late:,} of {counted(len(plan.workload), 'adapter')}."
    more = plan.n_gpus + plan.bins[0].gpus
    return (f"{told} --min-gpus {more} gives more room." if more <= most else told,)


def weaker_goals(job: Frontier, best: FrontierPoint) -> dict[str, int]:
    """Weaker goals, in words, that fewer servers keep in every hour that plans were made for and in fresh hours, as a
    plan for the weaker goal has to; with the number of servers. Such a plan may need fewer."""
    if job.spare:
        return {}
    most = (1.0 - SAVED) * best.n_gpus if best.holds else best.n_gpus
    if not best.holds and job.hopeless:  # such a plan may have too few GPUs for the weaker goals, too
        most = math.inf
    longer = list(_longer(job.workload))
    found, wider = dict[str, int](), list[str]()
    for point in job.points:
        if point.n_gpus > most or point.holds or job.over():  # no weaker goal is needed where the goal itself is kept
            break
        bins = point.plan.bins
        # This hour is simulated already. No wider limit than one that fewer keep is worth more hours.
        goals = _kept(job, bins, job.kept.given) - set(found) - set(wider)
        fresh = [] if job.replayed or not goals else job.kept.fresh(bins, job.number)
        for hour in (job.kept.planned, *reversed(job.kept.hours), *fresh):
            goals = goals and goals & _kept(job, bins, hour)
        narrowest = next((goal for goal in longer if goal in goals), None)
        wider = longer[longer.index(narrowest) :] if narrowest else wider
        found |= dict.fromkeys(sorted(goals - (set(longer) - {narrowest})), point.n_gpus)
    wide, narrow = (found.get(_share(share), math.inf) for share in sorted(SHARES))
    # The smaller share of adapters is only worth naming if it takes fewer GPUs.
    if wide >= narrow:
        found.pop(_share(min(SHARES)), None)
    return found


def by_splits(job: Frontier, found: Mapping[str, int]) -> dict[str, int]:
    """About the fewest servers that weaker goals take, by the fullest servers of even splits: `found` counts servers of
    plans for the goal itself, of which there are none on few servers where it takes far more than the load."""
    numbers = dict[str, int]()
    for goal, count in found.items():
        if goal.startswith(SLO) and count > job.fewest + 1 and not job.over():
            fleet, other = job.workload.held_to(goal.removeprefix(SLO)), copy(job)
            raised = fleet if job.replayed else job.hours.at(fleet, 1.0 + (job.margin or 0.0))
            other.workload, other.kept, other.apart = fleet, KeptHours(fleet, raised, job.seed, job.hours), ()
            numbers[goal] = other.first_even(max(2, job.fewest), count) or count
    return numbers


def _share(share: float) -> str:
    return f"{SLO}adapter_share={share:g}"


def _longer(fleet: Workload) -> dict[str, tuple[str, float]]:
    """Weaker goals, in words, with a limit and the factor by which it is wider, the narrowest first: of all limits that
    the default goal does not have, if there are any, else of the TTFT, then of the ITL."""
    limits = fleet.slo.limits.to_dict()
    others = [key for key in limits if key not in USUAL]
    ways = [(others, WIDER)] if others else [([USUAL[0]], LONGER), ([USUAL[1]], WIDER)]
    return {
        f"{SLO}{','.join(f'{key}={factor * limits[key]:g}' for key in keys)}": (keys[0], factor)
        for keys, factors in ways
        for factor in factors
        if limits.keys() >= set(keys) and not fleet.slo.classes
    }


def _kept(job: Frontier, bins: Sequence[Bin], hour: Hour) -> set[str]:
    """Which weaker goals servers keep in an hour, in words."""
    kept, slo = job.kept, job.workload.slo
    figures = kept.adapters(bins, hour)
    if not slo.of_adapters or not np.isfinite(figures.slo_used).all():
        return set()
    within = float((figures.slo_used <= 1.0).mean())
    goals = {_share(share) for share in SHARES if share < slo.adapter_share and within >= share}
    others, used = set(slo.every_key) - set(USUAL), max(kept.used(bins, [hour]))
    slow = (figures.mean_itl_ms > (slo.limits.mean_itl_ms if others else slo.columns(job.workload)[1])).any()
    late = (figures.p95_ttft_ms > slo.limits.p95_ttft_ms).any()
    # Wider limits, or a later start, do not help if others break, too.
    if others and (slow or late or used > max(1.0, figures.slo_used.max())):
        return goals
    # Servers that use nearly all of a limit at the rates as given may break it in another hour.
    part = NEARLY if hour == kept.given else 1.0
    for goal, (key, factor) in _longer(job.workload).items():
        if used <= part * factor and not (late if key == USUAL[1] else slow):
            goals.add(goal)
    if not others and not slow and all(starting(each.late[0], hour.fleet).all() for each in kept.all(bins, hour)):
        goals.add(AFTER_START)
    return goals


def version_words(found: Mapping[str, int], profile: Profile) -> str:
    """What would make the weaker goal `AFTER_START` unnecessary: a version of vLLM, or a request to each adapter before
    servers take traffic; "" if that does not apply."""
    took_ms = profile.frontend.first_use_ms
    if AFTER_START not in found or not took_ms or not rules_of(profile.engine).tokenizer_per_adapter:
        return ""
    later = ".".join(map(str, ONE_TOKENIZER))
    said = f"In vLLM {later} and later (--vllm-version) the first use of an adapter takes {took_ms:g} ms less"
    return said + ("." if profile.engine.warm_start else f"; {WARM}.")


def weaker_words(found: Mapping[str, int], size: int = 1, least: Mapping[str, int] | None = None) -> str:
    """A sentence that says how many GPUs, or fewer, are enough for which weaker goals; "" without one.
    `size`: GPUs of a server, which no plan has fewer of. `least`: about the fewest servers that a goal takes."""
    parts, pairs = [], {goal: (n, size * least[goal] if least and goal in least else n) for goal, n in found.items()}
    for count, few in sorted(set(pairs.values())):
        goals = [goal for goal, pair in pairs.items() if pair == (count, few)]
        named = " or ".join(filter(None, (", ".join(goals[:-1]), goals[-1])))
        gpus = f"{counted(count, 'GPU')}{' is' if count == 1 else ' are' if count == size else ' or fewer are'}"
        gpus = f"{few:,} to {count:,} GPUs are" if few < count else gpus
        parts.append(f"{gpus} enough for {named}")
    return f"{'; '.join(parts)}." if parts else ""


def context_words(fleet: Workload, profile: Profile, bins: Sequence[Bin]) -> str:
    """Which shorter context would make room for more slots, if most servers have as many as one of `max_model_len`
    leaves and the fleet's requests are far shorter; "" if none would."""
    if fleet.has_sessions or profile.memory.min_kv_tokens != least_kv_tokens(profile.model, profile.engine):
        return ""
    most = {rank: largest_max_loras(profile, rank) for rank in {item.max_lora_rank for item in bins}}
    full = [item for item in bins if item.max_loras > FULL * most[item.max_lora_rank]]
    if 2 * len(full) <= len(bins):
        return ""
    length = CONTEXT_STEP * math.ceil(_longest(fleet) / CONTEXT_STEP)
    if 2 * length > profile.engine.max_model_len:
        return ""
    rank = full[0].max_lora_rank
    more = largest_max_loras(with_engine(profile, max_model_len=length), rank)
    if more < 2 * most[rank]:
        return ""
    said = f"max_model_len {profile.engine.max_model_len} leaves room for {counted(most[rank], 'slot')} of rank {rank}:"
    return f"{said} --max-model-len {length} leaves {more}, and may take fewer GPUs."


def _longest(fleet: Workload) -> int:
    """Input + output tokens that hardly a request exceeds."""
    trace = fleet.arrivals.trace
    if trace is not None:
        return int((trace.input_tokens + trace.output_tokens).max(initial=0))
    pairs, _ = length_pairs(fleet)
    each, long = np.arange(len(pairs)), np.full(len(pairs), LONG)
    inputs, outputs = (each_at_normal(lengths, each, long) for lengths in zip(*pairs, strict=True))
    return int((inputs + outputs).max())
