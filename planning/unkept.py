"""Say which goal no number of GPUs keeps, for which adapters, and what would help."""

from __future__ import annotations

import math
from collections.abc import Sequence

from packer.bin import Bin
from packer.plan import Plan
from packer.planning.beyond import others_kept
from packer.planning.explore import Frontier
from packer.planning.lone import needs, unreachable
from packer.planning.replicas import least_parts, most_parts, part
from packer.planning.shortfall import latency
from packer.twin.hours import ServerHour
from packer.words import listed

NEAR = 0.8  # If an idle server uses this share of the limits, chance breaks them with any number of servers.
WORTH = 0.5  # If an idle server uses this share of the limits, it is named where no plan was found.
MOST_ASKED = 10_000  # Largest number that --max-replicas takes.


def apart_words(job: Frontier, plan: Plan, late: Sequence[int], max_gpus: int | None) -> list[str]:
    """A sentence on the adapters that are apart from those that keep the goal, if any are."""
    if not late:
        return []
    names = listed(job.workload.names[i] for i in late)
    own = [k + job.before for k, item in enumerate(plan.bins) if set(item.adapters) <= set(late)]
    kept = job.kept.breaking(plan.bins) <= len(late)
    rest = " All others keep it." if kept else ""
    if job.spare:
        rest = " The loss of a GPU is judged for the servers of the others alone."
    elif max_gpus is not None and not job.over() and not (kept and plan.evaluations.feasible.all()):
        servers, _ = others_kept(job, None)
        gpus = len(servers) * job.size
        rest += f" {gpus} GPUs serve all, and all others keep the goal: --gpus {gpus}." if gpus > max_gpus else ""
    return [f"Adapters that cannot keep the goal, apart on server{'s' * (len(own) > 1)} {listed(own)}: {names}.{rest}"]


def unreachable_words(job: Frontier) -> str:
    """What the first adapter that breaks the goal even on GPUs of its own gets there, and what would help."""
    i = job.parts.too_hot[0]
    adapter = job.workload.adapters[i]
    if cannot := cannot_words(job):
        said = f"{'; '.join(cannot)} for adapter {adapter.name!r}, one request at a time. What would help:"
        return f"{said} a faster GPU, or a wider --slo."
    least = least_parts(job.raised, job.profile, i)
    allowed = most_parts(least, job.max_replicas)
    alone = part(job.workload, job.profile, i, allowed)
    hours = job.kept.hours
    worst = max(hours, key=lambda each: job.kept.used([alone], [each])[0]) if hours[1:] else hours[0]
    # A part is judged in as many hours as there are parts, in which a queue grows further than in one.
    whole, own = Bin((0,), alone.settings, job.profile), alone.workload(worst.fleet)
    (hour,) = job.hours.all([whole], own, seed=job.kept.job(alone, worst)[2])
    if all(hour.holds[1:]):
        (hour,) = job.kept.all([alone], worst)
    where = "on a GPU of its own" if allowed == 1 else f"even in {allowed:,} equal parts on GPUs of their own"
    said = f"Adapter {adapter.name!r} with {adapter.rate:g} req/s breaks the goal {where}: {_given(hour, allowed)}"
    near = [words for _, words in needs(job.kept.lone(part(job.workload, job.profile, i, 1)), NEAR)]
    said += f"; for one request at a time {', '.join(near)}." if near else "."
    return f"{said} What would help: {more_parts(job)}a faster GPU, or a wider --slo."


def not_found_words(job: Frontier) -> str:
    """What limits servers if each adapter keeps the goal on GPUs of its own, and all of them together never do."""
    fleet, most = job.workload, job.most(None) * job.size
    hot = int(fleet.offered_tok_s_by_adapter.argmax())
    near = list(needs(job.kept.lone(part(fleet, job.profile, hot, 1)), WORTH))
    said = f"No plan that keeps the goal was found on up to {most} GPUs"
    for limit, needed in near[:1]:
        said += f", where adapters break it by chance: of {limit}, {needed} for adapter {fleet.names[hot]!r}"
    return f"{said}. What would help: a wider --slo, --slo adapter_share=0.99, or a faster GPU."


def more_parts(job: Frontier) -> str:
    """What would divide the first adapter that breaks the goal further, in words; "" if more parts hardly help."""
    least = least_parts(job.raised, job.profile, job.parts.too_hot[0])
    allowed = most_parts(least, job.max_replicas)
    if least > MOST_ASKED:
        return "a lower rate, "
    if least > allowed:
        return f"--max-replicas {least} or more, "
    return "--max-replicas, " if allowed < most_parts(least, None) else ""


def cannot_words(job: Frontier) -> list[str]:
    """The limits that the first adapter that breaks the goal breaks even one request at a time, in words."""
    return list(unreachable(job.kept.lone(part(job.workload, job.profile, job.parts.too_hot[0], 1))))


def _given(hour: ServerHour, parts: int) -> str:
    """What a server with one of the parts of an adapter gives in an hour, in words. If its queue grows, latencies only
    depend on how long it is simulated, and the load that it serves is given."""
    figures, (_, stable, served) = hour.figures, hour.holds
    share = figures.served_share
    if not (stable and served):
        some = f"{share:.0%}" if share >= 0.01 else "less than 1%"
        queues = "queues ever longer" if served else "starves"
        return f"{'it' if parts == 1 else 'each'} {queues} and serves {some} of its load"
    itl = "" if math.isnan(figures.mean_itl_ms) else f", ITL {figures.mean_itl_ms:.0f} ms"
    return f"p95 TTFT {latency(float(hour.adapters.p95_ttft_ms[0]))}{itl} there"
