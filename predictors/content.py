"""What a bin holds, apart from names and order: equal content gets equal answers."""

from __future__ import annotations

import hashlib

from packer.bin import Bin
from packer.workload import Workload


def canonical(workload: Workload, item: Bin) -> tuple[tuple[object, ...], Bin]:
    """A hashable key of the bin's content, and the same bin with its adapters in an order of their own.

    Two bins have the same key if their adapters agree in rank, rate here and lengths, and their servers in
    slots and profile. A replayed trace makes each adapter unique, so that there the indices are the key.
    """
    shares = item.shares
    trace = workload.arrivals.trace
    server = (item.profile.fingerprint, item.settings)
    if trace is not None:
        order = sorted(range(len(item.adapters)), key=lambda k: item.adapters[k])
        held: tuple[object, ...] = tuple((item.adapters[k], shares[k]) for k in order)
        traffic: tuple[object, ...] = (_trace_hash(workload),)
    else:
        who = [workload.adapters[i] for i in item.adapters]
        keys = [
            (a.rank, a.rate * share, repr(a.input_tokens), repr(a.output_tokens))
            for a, share in zip(who, shares, strict=True)
        ]
        order = sorted(range(len(keys)), key=keys.__getitem__)
        held = tuple(keys[k] for k in order)
        traffic = (
            workload.input_tokens,
            workload.output_tokens,
            workload.length_correlation,
            workload.arrivals,
        )
    ordered = Bin(
        tuple(item.adapters[k] for k in order),
        item.settings,
        item.profile,
        tuple(shares[k] for k in order),
    )
    return (server, held, traffic), ordered


def _trace_hash(workload: Workload) -> str:
    trace = workload.arrivals.trace
    assert trace is not None
    digest = hashlib.sha256()
    for column in (trace.time_s, trace.adapter, trace.input_tokens, trace.output_tokens):
        digest.update(column.tobytes())
    digest.update(repr((trace.span_s, workload.ranks.tolist())).encode())
    return digest.hexdigest()
