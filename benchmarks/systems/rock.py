"""ROCK: adapters of image models on a cluster of four kinds of GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from rows import Constant, Row, Section, below, mean, of_seeds, shown, table

import packer
from packer.cluster import Cluster, ServerKind
from packer.engines import Jobs
from packer.lengths import Lengths
from packer.profile import EngineSpec, GpuSpec, LatencySpec, LoadingSpec, MemorySpec, ModelSpec, Profile
from packer.twin.cluster.system import load_system
from packer.twin.engine import state as rows
from packer.workload import Workload

KINDS = {"A100": 1.0, "A40": 1.3, "RTX 3090": 1.7, "V100": 2.0}
"""Kind of GPU → time of an iteration, in that of the A100."""
EACH = 16
ITERATION_MS = 229.0
STEPS = (20, 50)
ADAPTERS, EXPONENT = 200, 1.13
UNIT_BYTES = 3.1e6
"""Bytes of a unit of rank, as which adapters' sizes are given here."""
LOAD_BASE_MS, LOAD_BYTES_S = 3500.0, 40e6
CLASSES = {"text-to-image": 1.0, "inpainting": 0.93, "image-to-image": 1.12}
"""Kind of task → factor on its time."""
SYSTEMS = {"RROD": "rrod", "LRUMS": "lrums", "Proactive": "proactive", "ROCK": "rock"}
RUN_S = 720.0
QPS = 3.0
LOADS = (2.0, QPS, 4.0, 5.0)
COLD, COLD_QPS = 74, 0.8
"""Requests that Table 3's counts and rates of LRUMS and Proactive agree on; a load under which all servers are idle."""
TABLE_3 = {
    "RROD": (61, 6.82, 0.0),
    "LRUMS": (45, 5.78, 39.2),
    "Proactive": (25, 5.48, 66.2),
    "ROCK": (14, 4.81, 84.1),
}
LATENCY = {"RROD": 1.34, "LRUMS": 1.35, "Proactive": 1.20, "ROCK": 1.0}


@dataclass(frozen=True)
class Reading:
    """What the text leaves open.

    `gpus`: of a "GPU node", which has one cache. `queues`, `dispatch`: of the router `rock`. `pool_bytes`: of a
    GPU, for adapters. `sizes`: of adapters, in units of rank; none: log-uniform on 2 to 64.
    """

    gpus: int = 4
    queues: int = 64
    dispatch: str = "fastest"
    pool_bytes: float = 2.5e9
    sizes: tuple[int, ...] = ()

    @property
    def router(self) -> str:
        """ROCK's."""
        return f"rock:queues={self.queues},dispatch={self.dispatch}"

    def profile(self, kind: str) -> Profile:
        """SDXL on a GPU of this kind: a job takes its iterations one after the other."""
        return Profile(
            f"{kind}/sdxl",
            ModelSpec("sdxl", 7e9, 1e6, UNIT_BYTES),
            GpuSpec(kind, 24 * 2**30),
            EngineSpec("job", "0", 4096, 4096, 16, block_size=1),
            MemorySpec(self.gpus * self.pool_bytes, 0.0, 0.0, 1, "unified"),
            LatencySpec("linear", {"per_decode_ms": ITERATION_MS * KINDS[kind]}),
            LoadingSpec(LOAD_BASE_MS, UNIT_BYTES / LOAD_BYTES_S * 1e3),
        )

    def cluster(self) -> Cluster:
        """64 GPUs, 16 of each kind."""
        kinds = tuple(ServerKind(k, self.profile(k), ADAPTERS, 64, Jobs(self.gpus)) for k in KINDS)
        return Cluster(kinds, tuple(kind for kind in KINDS for _ in range(EACH // self.gpus)))

    def fleet(self, qps: float, seed: int) -> Workload:
        """Adapters by a power law; a size, a class and its factor on the iterations for each."""
        rng = np.random.default_rng((seed, 3))
        weights = 1.0 / np.arange(1, ADAPTERS + 1) ** EXPONENT
        rates = qps * weights / weights.sum()
        factors = rng.choice(list(CLASSES.values()), ADAPTERS)
        drawn = np.rint(np.exp(rng.uniform(np.log(1.6), np.log(64.0), ADAPTERS))).astype(int)
        sizes = rng.choice(self.sizes, ADAPTERS) if self.sizes else drawn
        spread = np.arange(STEPS[0], STEPS[1] + 1)
        members = [
            packer.Adapter(
                f"a{i}", int(sizes[i]), rates[i], Lengths.constant(1), Lengths.empirical(spread * f)
            )
            for i, f in enumerate(factors)
        ]
        return Workload(members, length_correlation=0.0)


LITERAL = Reading(gpus=1, queues=32, dispatch="single")
READINGS = {
    "machine of 4 GPUs, 64 queues, fastest of the three (all rows above)": Reading(),
    "… 32 queues": Reading(queues=32),
    "… one server of the three for the whole queue, to the letter": Reading(dispatch="single"),
    "… adapters of four sizes, ranks 8 to 64": Reading(sizes=(8, 16, 32, 64)),
    "… 0.4 GB for adapters on each GPU": Reading(pool_bytes=0.4e9),
    "one GPU, 128 queues, fastest of the three": Reading(gpus=1, queues=128),
    "one GPU, 32 queues, one server for the whole queue": LITERAL,
}
"""Name → what a GPU node, a queue and an adapter are."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    hit_rate: float
    updates: int
    update_s: float
    latency_s: float
    p99_s: float
    waiting: float


def outcome(system: str, qps: float, seed: int, reading: Reading, run_s: float = RUN_S) -> Outcome:
    """The system at this load."""
    how = replace(load_system(system), engine=None)  # the kind's engine, which knows the GPUs of a machine
    router = reading.router if system == "rock" else None
    run = packer.simulate_cluster(
        reading.fleet(qps, seed), reading.cluster(), how, router, duration_s=run_s, seed=seed
    )
    assert run.raw is not None
    latency = (run.raw.finish_s - run.raw.requests.time_s)[run.raw.finished]
    awaited = run.adapter_loads - int(run.raw.ints[rows.UNAWAITED])
    return Outcome(
        run.hit_rate,
        awaited,
        float(run.raw.floats[rows.LOAD_S]) / max(awaited, 1),
        float(latency.mean()),
        float(np.quantile(latency, 0.99)),
        run.mean_waiting,
    )


Found = dict[str, list[Outcome]]


def at(qps: float, seeds: int, reading: Reading | None = None, run_s: float = RUN_S) -> Found:
    """System → an outcome of each seed."""
    own = Reading() if reading is None else reading
    return {
        name: of_seeds(lambda k, s=system: outcome(s, qps, k, own, run_s), seeds)
        for name, system in SYSTEMS.items()
    }


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
    values = {system: [float(getattr(each, name)) for each in of] for system, of in found.items()}
    return all(below(values["ROCK"], of) for system, of in values.items() if system != "ROCK")


def quick(found: Found) -> bool:
    """The order of Figure 10: ROCK lowest, by more than chance, Proactive second."""
    means = figure(found, "latency_s")
    others = sorted((value, name) for name, value in means.items() if name != "ROCK")
    return lowest(found, "latency_s") and others[0][1] == "Proactive"


def cached(found: Found) -> bool:
    """The order of hit rates in Table 3."""
    hits = figure(found, "hit_rate")
    return hits["LRUMS"] < hits["Proactive"] < hits["ROCK"]


HELD = (
    "each queue holds the adapters of many tasks, so that ROCK's servers see more adapters than those of LRUMS and "
    "Proactive; no reading below gives the published order"
)


TIED = (
    "ROCK chooses among three machines for 90 s, Proactive among all for each task: a tie at best, under the "
    "reading that favours ROCK most"
)


def table_rows(found: Found, seeds: int) -> list[Row]:
    """Table 3."""
    updates = figure(found, "updates")
    cold = at(COLD_QPS, seeds, run_s=COLD / COLD_QPS)
    return [
        Row(
            "Table 3: hit rate of RROD, %",
            "0",
            shown([100.0 * each.hit_rate for each in found["RROD"]], 1),
            "0",
            figure(found, "hit_rate")["RROD"] == 0.0,
        ),
        Row(
            "Table 3: hit rate, %",
            ", ".join(f"{name} {row[2]:g}" for name, row in TABLE_3.items()),
            texts(found, "hit_rate", 1, 100.0),
            "LRUMS < Proactive < ROCK",
            cached(found),
            HELD,
        ),
        Row(
            "Table 3: updates (loads that a task waits for)",
            ", ".join(f"{name} {row[0]}" for name, row in TABLE_3.items()),
            texts(found, "updates", 0),
            "ROCK < Proactive < LRUMS < RROD",
            updates["ROCK"] < updates["Proactive"] < updates["LRUMS"] < updates["RROD"],
            "as for the hit rates",
        ),
        Row(
            f"Table 3 of about {COLD} requests from empty caches, {COLD_QPS:g} req/s: hit rate, %; updates",
            "as above: 45 and 25 updates at 39.2 % and 66.2 % are those of 74 requests",
            f"{texts(cold, 'hit_rate', 0, 100.0)}; {texts(cold, 'updates', 0)}",
            note="policies begin without a history",
        ),
        Row(
            "Table 3: time of an update, s",
            ", ".join(f"{name} {row[1]:g}" for name, row in TABLE_3.items()),
            ", ".join(f"{system} {value:.2f}" for system, value in figure(found, "update_s").items()),
            note="loads here do not share a link, so that they differ by the adapters' sizes alone",
        ),
    ]


def latency_rows(found: Found) -> list[Row]:
    """Figure 10."""
    means = figure(found, "latency_s")
    return [
        Row(
            f"Fig. 10: mean latency over ROCK's, {QPS:g} req/s",
            ", ".join(f"{name} {value:g}" for name, value in LATENCY.items()),
            ", ".join(f"{name} {value / means['ROCK']:.2f}" for name, value in means.items()),
            "ROCK lowest, beyond the interval, Proactive second",
            quick(found),
            TIED,
        ),
        Row(
            f"Fig. 10: P99 of the latency, s, {QPS:g} req/s",
            "ROCK < 80, others near 100",
            texts(found, "p99_s", 0),
            "ROCK lowest, beyond the interval",
            lowest(found, "p99_s"),
            "under the reading that favours ROCK most",
        ),
    ]


def queue_rows(seeds: int, found: Found) -> list[Row]:
    """Figure 12: mean waiting jobs over the load."""
    waiting = {qps: figure(found if qps == QPS else at(qps, seeds), "waiting") for qps in LOADS}
    top = waiting[LOADS[-1]]
    caching = {name: top[name] for name in ("LRUMS", "Proactive", "ROCK")}
    text = "; ".join(
        f"{qps:g}: " + " / ".join(f"{of[name]:.1f}" for name in SYSTEMS) for qps, of in waiting.items()
    )
    return [
        Row(
            f"Fig. 12: waiting jobs by req/s ({' / '.join(SYSTEMS)})",
            "all but RROD fine below 4; above, LRUMS explodes",
            text,
            f"at {LOADS[-1]:g} req/s LRUMS worst of the caching ones",
            max(caching, key=lambda name: caching[name]) == "LRUMS",
            "three servers for a queue, held for 90 s, wait while others idle",
        ),
        Row(
            "Fig. 12: shortest queue",
            "ROCK, also under high load",
            min(top, key=lambda name: top[name]) + f" at {LOADS[-1]:g} req/s",
            "ROCK",
            min(top, key=lambda name: top[name]) == "ROCK",
            "likewise; Proactive sends each task to the shortest queue of the cluster",
        ),
    ]


def readings_table(found: Found, seeds: int) -> str:
    """What the published orders depend on."""
    cells, same = [], dict[Reading, Found]()
    first = {system: of[:seeds] for system, of in found.items()}
    words = {True: "yes", False: "no"}
    for name, reading in READINGS.items():
        plain = replace(reading, queues=Reading.queues, dispatch=Reading.dispatch)
        if plain not in same:
            same[plain] = first if plain == Reading() else at(QPS, seeds, plain)
        of = dict(same[plain])
        if reading != plain:
            of["ROCK"] = of_seeds(lambda k, r=reading: outcome("rock", QPS, k, r), seeds)
        means, hits = figure(of, "latency_s"), figure(of, "hit_rate")
        cells.append(
            [
                name,
                " / ".join(f"{means[system]:.1f}" for system in SYSTEMS),
                " / ".join(f"{100 * hits[system]:.0f}" for system in SYSTEMS),
                words[quick(of)],
                words[cached(of)],
            ]
        )
    order = " / ".join(SYSTEMS)
    heads = [
        "a GPU node is …",
        f"mean latency, s ({order})",
        "hit rate, %",
        "Fig. 10's order",
        "Table 3's order",
    ]
    return table(f"Readings of the text, {QPS:g} req/s", heads, cells)


def section(seeds: int) -> Section:
    """The whole comparison."""
    found = at(QPS, seeds)
    return Section(
        "rock",
        "ROCK: adapters of image models on four kinds of GPU",
        "ROCK: Serving Multimodal Models in Cloud with Heterogeneous-Aware Resource Orchestration",
        CONSTANTS,
        [*table_rows(found, seeds), *latency_rows(found), *queue_rows(seeds, found)],
        (
            "The text does not say what a GPU node is, how many queues there are, and which of a queue's three "
            "candidates serves a task: Algorithm 1 has one for the whole queue. The rows are those of the reading "
            "under which ROCK does best, chosen after the runs; the table has the others. None gives the published "
            "orders: all systems but RROD keep most adapters that they need, and what is left is waiting.",
            "Only orders are compared: the paper gives neither the number of GPUs of each kind, nor the load, nor the "
            "times of jobs, and its Table 3 is not consistent with itself: 61 updates without a hit and 14 at 84.1 % "
            "are not of 74 requests.",
            "Figure 11 (time by kind of task, memory in use) is not simulated: a job's time has one factor per class.",
        ),
        tables=[readings_table(found, min(seeds, 3))],
    )


CONSTANTS = (
    Constant("cluster", "64 GPUs of four kinds on 16 machines; 1 job at a time each", "T"),
    Constant("GPUs of each kind", "16", "A"),
    Constant("GPU node", "a machine with 4 GPUs of one kind and one cache", "A", "effect in the table"),
    Constant("iteration on an A100", "229 ms; A40 × 1.3, RTX 3090 × 1.7, V100 × 2.0", "A", "mean job 12 s"),
    Constant("iterations", "20 to 50, equally likely; classes × 1, 0.93, 1.12", "D", "Table 1's means"),
    Constant("adapters", "200 of 5 to 200 MB, log-uniform", "T", "the distribution is assumed; effect in the table"),
    Constant("popularity", "power law of exponent 1.13", "D", "20 % of the adapters take 80 % of the requests"),
    Constant("load of an adapter", "3.5 s + bytes / 40 MB/s", "F", "to the range of Table 3's update times"),
    Constant("memory for adapters", "2.5 GB of each GPU", "A", "sets the hit rates; effect in the table"),
    Constant("ROCK", "eviction at 85 %, replicas by eq. (5) every 45 s, matching every 90 s, best 3 servers", "T"),
    Constant("queues; server of a task", "64; of three the one that ends it first", "A", "effects in the table"),
    Constant("reclustering, weights of the baselines", "see the routers `rock` and `matching-score`", "A"),
)  # fmt: skip
