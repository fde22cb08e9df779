"""Turn the servers of a cluster at the end of a run into tables of requests, for all servers and for each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from packer.arrays import BoolArray, FloatArray, IntArray, Record
from packer.arrival import RequestTrace
from packer.twin.cluster.state import REFUSED, Servers, refused_of
from packer.twin.cluster.transit import NETWORK_S, Transit
from packer.twin.engine import state as rows
from packer.twin.drafts import DraftTotals
from packer.twin.server import Raw

if TYPE_CHECKING:
    from packer.twin.run import Run


def raw_of(state: Servers, transit: Transit | None, duration_s: float) -> Raw:
    """Return the requests of all servers, with sums over servers; clients see tokens after they crossed the network."""
    raw = _raw(state, None, duration_s, (refused_of(state), []))
    if transit is not None and (back_s := float(transit.rates[NETWORK_S])):
        seen_s = raw.finish_s + back_s
        done = raw.finished & (seen_s <= duration_s)
        raw = replace(raw, first_s=raw.first_s + back_s, finish_s=seen_s, finished=done)
    return raw


def sent_only(state: Servers, sent: int) -> Servers:
    """Return the servers after a run with rows for the first `sent` requests only."""
    columns = ("requests", "sent_s", "adapter", "prompt", "output", "server")
    kept = {key: getattr(state, key)[:sent] for key in columns}
    if state.ahead is not None:
        pool = state.ahead.pool
        kept["ahead"] = state.ahead._replace(pool=pool._replace(found=pool.found[:sent]))
    return state._replace(**kept)


def with_held_back(state: Servers, time_s: FloatArray) -> Servers:
    """Mark the requests that the client still holds back after a run as refused. `time_s` (n,): earliest time to send
    each request. The requests held back are the last ones."""
    sent = int(np.count_nonzero(np.isfinite(state.sent_s)))
    state.server[sent:] = REFUSED
    state.sent_s[sent:] = np.maximum(time_s[sent:], state.sent_s[:sent].max(initial=0.0))
    return state


def server_view(run: Run, s: int) -> Run:
    """See `Run.server`."""
    setup, workload = run.setups[s], run.workload
    raw = Raw.nothing(len(workload))
    if run.state is not None:
        raw = _raw(run.state, s, run.duration_s, run.rows_of_servers)
        workload = workload.replaying(raw.requests)
        if len(setup.workload) < len(workload):
            number = {name: i for i, name in enumerate(workload.names)}
            workload = workload.subset([number[name] for name in setup.workload.names])
            assert workload.arrivals.trace is not None
            refused = np.zeros(len(workload), dtype=np.int64)
            raw = replace(raw, requests=workload.arrivals.trace, refused=refused)
    return replace(
        run, workload=workload, profile=setup.profile, settings=setup.settings, raw=raw,
        kv_cache_tokens=setup.kv_cache_tokens, cluster=None, setups=(), state=None, transit=None, spans=None,
    )  # fmt: skip


def rows_by_server(state: Servers) -> tuple[BoolArray, list[IntArray]]:
    """Which requests were refused, bool (n,), and the requests of each server in order of arrival there, without those
    on their way."""
    refused = refused_of(state)
    here = np.flatnonzero((state.server >= 0) & (refused | (state.requests["status"] > 0)))
    here = here[np.lexsort((state.requests["sent_s"][here], state.server[here]))]
    return refused, np.split(here, np.searchsorted(state.server[here], np.arange(1, len(state.servers))))


def _raw(state: Servers, server: int | None, end_s: float, known: tuple[BoolArray, list[IntArray]]) -> Raw:
    """Return the requests of one server with its totals; None: of all, with sums over servers. `known`: see
    `rows_by_server`."""
    refused, of = known[0], slice(None) if server is None else known[1][server]
    requests = state.requests[of]
    arrived, given = requests["status"] > 0, requests["prompt"] > 0
    # A server cuts requests that are too long; those given to none count as if cut by the one that cuts least.
    longest = state.longest.max()
    prompt = np.where(given, requests["prompt"], np.minimum(state.prompt[of], longest - 1))
    output = np.where(given, requests["output"], np.minimum(state.output[of], longest - prompt))
    one = slice(None) if server is None else slice(server, server + 1)
    servers, total = state.servers[one], _sums(state.servers[one])[0]
    total["sent"], total["taken"] = len(requests), int(arrived.sum())
    total["peak_running"] = servers["peak_running"].max()
    total["busy_s"] = np.minimum(servers["busy_s"], end_s).mean()
    timeline, sizes = _sums(state.timeline[one]), servers["block_size"]
    timeline["busy"] /= len(servers)
    if (sizes != sizes[0]).any():  # blocks of the first server's size
        timeline["kv_blocks"] = sizes @ state.timeline["kv_blocks"] / sizes[0]
    # Requests of one server count from their arrival there, those of the cluster from their arrival at the router.
    sent_s = state.sent_s[of] if server is None else requests["sent_s"]
    each, none = None if state.ahead is None else state.ahead.each, np.zeros(len(state.ranks), dtype=np.int64)
    return Raw(
        RequestTrace(sent_s, state.adapter[of], prompt, output, end_s=end_s),
        none,  # refused requests are among the rows
        float((prompt + output).sum()),
        np.where(arrived, requests["first_seen_s"], np.nan),
        np.where(arrived, requests["finish_seen_s"], np.nan),
        (requests["status"] == rows.FINISHED) & (requests["finish_seen_s"] <= end_s),
        total, state.histogram[one].sum(axis=0), timeline, np.zeros(0), requests,
        _sums(state.tuning.job[one])[0], _found(state, of),
        None if each is None else DraftTotals.of(each.whole[one]), refused[of],
    )  # fmt: skip


def _sums(records: Record) -> Record:
    """Return the sums of each field over the first axis, added in order; records (n,) give (1,)."""
    records = records.reshape(len(records), -1)
    total = np.zeros(records.shape[1], dtype=records.dtype)
    for name in records.dtype.names:
        total[name] = np.add.accumulate(records[name], axis=0)[-1]
    return total


def _found(state: Servers, of: slice | IntArray) -> IntArray | None:
    """As `Raw.found`."""
    if state.ahead is None or not state.ahead.pool.all["caching"].any():
        return None
    found: IntArray = state.ahead.pool.found[of].astype(np.int64)
    return found
