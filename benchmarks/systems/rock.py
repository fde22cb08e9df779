"""ROCK: adapters of image models on a cluster of four kinds of GPU."""

from __future__ import annotations

import numpy as np
from rock_cluster import LOADS, QPS, READINGS, SYSTEMS, Found, Reading, at, outcome
from rows import Constant, Row, Section, below, mean, of_seeds, shown, table

TABLE_3 = {"RROD": (61, 6.82, 0.0), "LRUMS": (45, 5.78, 39.2), "Proactive": (25, 5.48, 66.2), "ROCK": (14, 4.81, 84.1)}
GPUS = 64


def to_the_letter(found: Found) -> str:
    """Why Algorithm 1 can't be as fast as it is published, in figures."""
    waiting, idle = figure(found, "waiting")["ROCK"], GPUS - figure(found, "busy")["ROCK"]
    return (
        f"a queue's tasks of 90 s go to one server: {waiting:.0f} jobs wait on average while {idle:.0f} of {GPUS} "
        "GPUs are idle"
    )


LATENCY = {"RROD": 1.34, "LRUMS": 1.35, "Proactive": 1.20, "ROCK": 1.0}


def figure(found: Found, name: str) -> dict[str, float]:
    """System → mean of one figure over the seeds."""
    return {system: mean([float(getattr(each, name)) for each in of]) for system, of in found.items()}


def texts(found: Found, name: str, digits: int, factor: float = 1.0) -> str:
    """The figure of every system, with intervals."""
    return ", ".join(
        f"{system} {shown([factor * float(getattr(each, name)) for each in of], digits)}"
        for system, of in found.items()
    )


def lowest(found: Found, name: str) -> bool:
    """Whether ROCK has the lowest figure of all systems, by more than chance."""
    values = {system: [float(getattr(each, name)) for each in found[system]] for system in LATENCY}
    return all(below(values["ROCK"], of) for system, of in values.items() if system != "ROCK")


def quick(found: Found) -> bool:
    """The order of Figure 10: ROCK lowest, by more than chance, Proactive second."""
    means = figure(found, "latency_s")
    others = sorted((means[name], name) for name in LATENCY if name != "ROCK")
    return lowest(found, "latency_s") and others[0][1] == "Proactive"


def _falling(values: list[float]) -> bool:
    return values == sorted(values, reverse=True)


def cached(found: Found) -> bool:
    """The order of hit rates in Table 3."""
    hits = figure(found, "hit_rate")
    return hits["LRUMS"] < hits["Proactive"] < hits["ROCK"]


def table_rows(found: Found) -> list[Row]:
    """Table 3."""
    updates = figure(found, "updates")
    return [
        Row(
            "Table 3: hit rate of RROD, %",
            "0",
            shown([100.0 * each.hit_rate for each in found["RROD"]], 1),
            "0",
            figure(found, "hit_rate")["RROD"] == 0.0,
            "it keeps no adapters",
            "fitted",
        ),
        Row(
            "Table 3: size of the hit rate of Proactive and ROCK, %",
            "66.2, 84.1",
            ", ".join(shown([100.0 * each.hit_rate for each in found[name]], 1) for name in ("Proactive", "ROCK")),
            "within 10 points",
            all(
                abs(100.0 * figure(found, "hit_rate")[name] - TABLE_3[name][2]) <= 10.0
                for name in ("Proactive", "ROCK")
            ),
            "the rate depends on what a node caches: with one cache for a machine of 4 GPUs it is "
            + ", ".join(
                f"{100.0 * mean([outcome(SYSTEMS[name], QPS, k, Reading(gpus=4)).hit_rate for k in range(2)]):.1f}"
                for name in ("Proactive", "ROCK")
            ),
        ),
        Row(
            "Table 3: updates over RROD's, LRUMS / Proactive / ROCK",
            " / ".join(f"{TABLE_3[name][0] / TABLE_3['RROD'][0]:.2f}" for name in CACHING),
            " / ".join(f"{updates[name] / updates['RROD']:.2f}" for name in CACHING),
            "each within 0.1",
            all(
                abs(updates[name] / updates["RROD"] - TABLE_3[name][0] / TABLE_3["RROD"][0]) <= 0.1 for name in CACHING
            ),
            "the published counts over the misses by the published hit rates are of "
            + ", ".join(f"{TABLE_3[n][0] / (1.0 - TABLE_3[n][2] / 100.0):.0f}" for n in ("RROD", *CACHING))
            + " requests",
        ),
        Row(
            "Table 3: hit rate, %",
            ", ".join(f"{name} {row[2]:g}" for name, row in TABLE_3.items()),
            texts(found, "hit_rate", 1, 100.0),
            "LRUMS < Proactive < ROCK",
            cached(found),
            "LRUMS's weight of a cached adapter was fitted to its 39.2 %; the others are held out",
        ),
        Row(
            "Table 3: updates (loads that a task waits for)",
            ", ".join(f"{name} {row[0]}" for name, row in TABLE_3.items()),
            texts(found, "updates", 0),
            "ROCK < Proactive < LRUMS < RROD",
            updates["ROCK"] < updates["Proactive"] < updates["LRUMS"] < updates["RROD"],
            "of some 2,160 requests",
        ),
        Row(
            "Table 3: time of an update, s",
            ", ".join(f"{name} {row[1]:g}" for name, row in TABLE_3.items()),
            ", ".join(f"{system} {value:.2f}" for system, value in figure(found, "update_s").items()),
            "RROD > LRUMS > Proactive > ROCK",
            _falling([figure(found, "update_s")[name] for name in LATENCY]),
            "loads here do not share a link, so that they differ by the adapters' sizes alone, by some per cent",
        ),
    ]


def latency_rows(found: Found) -> list[Row]:
    """Figure 10."""
    means, p99 = figure(found, "latency_s"), figure(found, "p99_s")
    return [
        Row(
            f"Fig. 10: mean latency over ROCK's, {QPS:g} req/s",
            ", ".join(f"{name} {value:g}" for name, value in LATENCY.items()),
            ", ".join(f"{name} {value / means['ROCK']:.2f}" for name, value in means.items()),
            "ROCK lowest, beyond the interval, Proactive second",
            quick(found),
            to_the_letter(found),
        ),
        Row(
            f"Fig. 10: the same, sizes, {QPS:g} req/s",
            "as above",
            "as above",
            "each within 0.15",
            all(abs(means[name] / means["ROCK"] - value) <= 0.15 for name, value in LATENCY.items()),
            f"{to_the_letter(found)}; the paper's load and job times are not given",
        ),
        Row(
            f"Fig. 10: P99 of the latency, s, {QPS:g} req/s",
            "ROCK < 80, others near 100",
            texts(found, "p99_s", 0),
            "ROCK lowest, beyond the interval",
            lowest(found, "p99_s"),
            to_the_letter(found),
        ),
        Row(
            f"Fig. 10: P99 of the latency over ROCK's, {QPS:g} req/s",
            "at least 1.25",
            ", ".join(f"{name} {value / p99['ROCK']:.2f}" for name, value in p99.items()),
            "each other system at least 1.1",
            all(p99[name] >= 1.1 * p99["ROCK"] for name in LATENCY if name != "ROCK"),
            to_the_letter(found),
        ),
    ]


def kind_rows(found: Found, seeds: int) -> list[Row]:
    """Figure 11: text-to-image alone, and memory."""
    alone = at(QPS, seeds, Reading(classes=("text-to-image",)))
    means = figure(alone, "inference_s")
    memory = {name: [each.memory for each in found[name]] for name in CACHING}
    spread = {name: float(np.std(values)) for name, values in memory.items()}
    return [
        Row(
            "Fig. 11a, text-to-image alone: mean time of load and iterations over ROCK's",
            "RROD 1.2, LRUMS 1.24, Proactive 1.17, ROCK 1",
            ", ".join(f"{name} {value / means['ROCK']:.2f}" for name, value in means.items()),
            "each within 0.15",
            all(
                abs(means[name] / means["ROCK"] - value) <= 0.15
                for name, value in (("RROD", 1.2), ("LRUMS", 1.24), ("Proactive", 1.17))
            ),
            ", ".join(f"{name} {value:.1f} s" for name, value in means.items())
            + "; a load takes 4.8 s, and RROD uses slow GPUs as often as fast ones: 1.5 times an A100's time",
        ),
        Row(
            "Fig. 11b: memory for adapters in use, %",
            "ROCK and Proactive highest, ROCK steadiest",
            texts(found, "memory", 0, 100.0),
            "ROCK and Proactive above LRUMS, ROCK's spread the least",
            min(mean(memory["ROCK"]), mean(memory["Proactive"])) > mean(memory["LRUMS"])
            and min(spread, key=lambda name: spread[name]) == "ROCK",
            "ROCK's servers hold the adapters that they are sent, Proactive's all popular ones: spread over seeds "
            + ", ".join(f"{name} {100.0 * value:.1f}" for name, value in spread.items())
            + " points; the paper's memory is that of the whole GPU",
        ),
    ]


CACHING = ("LRUMS", "Proactive", "ROCK")


def queue_rows(loads: dict[float, Found]) -> list[Row]:
    """Figure 12: mean waiting jobs over the load."""
    waiting = {qps: figure(of, "waiting") for qps, of in loads.items()}
    top = waiting[LOADS[-1]]
    caching = {name: top[name] for name in CACHING}
    text = "; ".join(f"{qps:g}: " + " / ".join(f"{of[name]:.1f}" for name in SYSTEMS) for qps, of in waiting.items())
    return [
        Row(
            f"Fig. 12: waiting jobs by req/s ({' / '.join(SYSTEMS)})",
            "all but RROD fine below 4; above, LRUMS explodes",
            text,
            f"at {LOADS[-1]:g} req/s LRUMS worst of the caching ones",
            max(caching, key=lambda name: caching[name]) == "LRUMS",
            to_the_letter(loads[LOADS[-1]]),
        ),
        Row(
            "Fig. 12: shortest queue",
            "ROCK, also under high load",
            min(top, key=lambda name: top[name]) + f" at {LOADS[-1]:g} req/s",
            "ROCK",
            min(LATENCY, key=lambda name: top[name]) == "ROCK",
            to_the_letter(loads[LOADS[-1]]),
        ),
    ]


ONLY = {"status": ("LRUMS",), "proactive": ("Proactive",), "queues": ("ROCK", "ROCK per task"), "dispatch": ("ROCK",)}
"""Field of a reading → the systems that alone see it."""


def varied(reading: Reading, first: Found, seeds: int) -> Found:
    """Outcomes under another reading, of the systems that it changes."""
    changed = [name for name in vars(reading) if getattr(reading, name) != getattr(Reading(), name)]
    if not all(name in ONLY for name in changed):
        return at(QPS, seeds, reading)
    new = {system for name in changed for system in ONLY[name]}
    return {
        name: of_seeds(lambda k, s=system: outcome(s, QPS, k, reading), seeds) if name in new else first[name]
        for name, system in SYSTEMS.items()
    }


def readings_table(loads: dict[float, Found], seeds: int) -> str:
    """What the published orders depend on."""
    first = {system: of[:seeds] for system, of in loads[QPS].items()}
    found = {name: varied(reading, first, seeds) for name, reading in READINGS.items()}
    found |= {f"{qps:g} req/s": of for qps, of in loads.items() if qps != QPS}
    cells, words = [], {True: "yes", False: "no"}
    for name, of in found.items():
        means, hits = figure(of, "latency_s"), figure(of, "hit_rate")
        latencies = " / ".join(f"{means[system]:.1f}" for system in SYSTEMS)
        rates = " / ".join(f"{100 * hits[system]:.0f}" for system in SYSTEMS)
        cells.append([name, latencies, rates, words[quick(of)], words[cached(of)]])
    order = " / ".join(SYSTEMS)
    heads = ["reading", f"mean latency, s ({order})", "hit rate, %", "Fig. 10's order", "Table 3's order"]
    return table(f"Readings of the text, {QPS:g} req/s but for the last rows", heads, cells)


def section(seeds: int) -> Section:
    """The whole comparison."""
    loads = {qps: at(qps, seeds) for qps in LOADS}
    found = loads[QPS]
    return Section(
        "rock",
        "ROCK: adapters of image models on four kinds of GPU",
        "ROCK: Serving Multimodal Models in Cloud with Heterogeneous-Aware Resource Orchestration",
        CONSTANTS,
        [*table_rows(found), *latency_rows(found), *kind_rows(found, seeds), *queue_rows(loads)],
        (
            "ROCK is Algorithm 1 to the letter: a matching of the last 90 s' tasks holds for 90 s. It keeps the order "
            "of hit rates but can't give that of latencies, which follows by hand: by the paper's own Table 3 ROCK "
            "saves 0.338 · 5.48 − 0.159 · 4.81 = 1.1 s of loads per task over Proactive; but at the 57 % load of "
            "3 req/s a task of 12 s waits 3.0 s even before three servers and none before 64 (Erlang's C formula, "
            "without loads).",
            "One server for a queue: the most popular adapter (23 % of the requests) alone needs 8 servers at 3 req/s; "
            "equation (5) gives it 11 replicas, which such a router can't use.",
            "ROCK per task is a reading of ours, `rock-per-task`: a queue's tasks are those that wait, so that as long "
            "as GPUs are free equation (1) compares them for the task that has just come. With it the published "
            "orders of latency come out. It stands beside the others and no rule counts it.",
            "In equation (1) the term of latency is at most 0.1 / 8 s = 0.013 for a task of the mean length, against "
            "0.6 for a cached adapter: ROCK hardly sees the speed of a GPU, and its gain is of hits, not of matching "
            "tasks with hardware.",
            "LRUMS's published 39.2 % is the rate of a router that does not look for the adapter: with either weight "
            "in the table it finds idle GPUs that hold the adapter and has more hits than Proactive. So the weight is "
            "0 here, though the text names the status as one of three criteria. Proactive, for which the text names no "
            "criterion of routing, sends to the fewest requests.",
            "Figure 11a is of the inference latency, Figure 10 of the response: the first is read as the load and the "
            "iterations of a task, without its queue. This reading was chosen after runs.",
            "The text does not decide the rest: the number of GPUs of each kind, the load, the times of jobs. 64 GPUs "
            "with Table 1's 28 s serve 2.3 req/s, so that Fig. 12's 4 req/s need 16 s at most: 12 s here.",
            "Table 3's counts are not of the same requests: 61, 45 / 0.608 = 74, 25 / 0.338 = 74, 14 / 0.159 = 88. "
            "Times the relative latency that is 82, 100, 89 and 88: as if all had run for the same time with the same "
            "number of users. From empty caches 74 requests can't have 66 % or 84 % hits without foresight (they are "
            "for 35 adapters); here caches fill during the run.",
            "Base models (three in the paper) are not simulated: every GPU holds all.",
        ),
        tables=[readings_table(loads, min(seeds, 3))],
    )


CONSTANTS = (
    Constant("cluster", "64 GPUs of four kinds on 16 machines; 1 job at a time each", "T"),
    Constant("GPUs of each kind", "16", "A"),
    Constant("GPU node", "a GPU, with its own cache", "A", "effect in the table"),
    Constant("iteration on an A100", "229 ms; A40 × 1.3, RTX 3090 × 1.7, V100 × 2.0", "A", "mean job 12 s"),
    Constant("iterations", "20 to 50, equally likely; classes × 1, 0.93, 1.12", "D", "Table 1's means"),
    Constant("adapters", "200 of 5 to 200 MB, log-uniform", "T", "the distribution is assumed; effect in the table"),
    Constant("popularity", "power law of exponent 1.13", "D", "20 % of the adapters take 80 % of the requests"),
    Constant("load of an adapter", "3.5 s + bytes / 40 MB/s", "F", "to the range of Table 3's update times"),
    Constant("memory for adapters", "1 GB of each GPU", "D", "24 GB less three models of 17 GB and work space"),
    Constant("LRUMS: weight of a cached adapter", "0", "F", "to its hit rate; effect in the table"),
    Constant("Proactive: router, adapters kept", "fewest requests; 8", "A", "effect in the table"),
    Constant("ROCK", "eviction at 85 %, replicas by eq. (5) every 45 s, matching every 90 s, best 3 servers", "T"),
    Constant("queues; threshold of clustering anew", "32; 0.1 nats", "A", "effect of the first in the table"),
    Constant("partitions of adapters", "4, by size", "A"),
    Constant("score of a server for a replica", "mean of bandwidth, free memory and nearness", "A", "see `replicas`"),
    Constant("weights of the baselines", "see the router `matching-score`", "A"),
)
