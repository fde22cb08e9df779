"""The lengths of each adapter's requests, quickly where there are a million adapters."""

from __future__ import annotations

from array import array
from operator import attrgetter

import numpy as np

from packer.arrays import FloatArray, IntArray, in_parts
from packer.lengths import Lengths, each_at_normal
from packer.workload import Workload


def own_lengths(workload: Workload, side: str) -> list[Lengths]:
    """Return the lengths of each adapter: its own, or the workload's."""
    own, shared = list(map(attrgetter(side), workload.adapters)), getattr(workload, side)
    return [each or shared for each in own] if any(own) else [shared] * len(own)


def identities(objects: list[Lengths]) -> bytes:
    """Return the ids of the objects, for fast comparisons of a million objects."""
    return array("q", map(id, objects)).tobytes()


def at_normal(lengths: list[Lengths], adapter: IntArray, z: FloatArray) -> IntArray:
    """Return lengths at normal scores, with the lengths of each request's adapter."""
    objects = dict(zip(map(id, lengths), lengths, strict=True))  # hashing each object would take longest
    number: dict[Lengths, int] = {}
    place = {key: number.setdefault(each, len(number)) for key, each in objects.items()}
    if len(number) == 1:
        return in_parts(lambda part: lengths[0].at_normal(z[part]), len(z))
    group = np.array([place[id(each)] for each in lengths], dtype=np.int64)
    return in_parts(lambda part: each_at_normal(list(number), group[adapter[part]], z[part]), len(z))
