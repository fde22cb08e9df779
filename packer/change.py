"""Changes to a running cluster and their times, for schedules, replays, rehearsals and real servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from packer import checks
from packer.errors import ValidationError, shown
from packer.public import check_fields, checked


@dataclass(frozen=True)
class Change:
    """Changes that are made at one time. Servers are numbers in the cluster, adapters are names.

    `time_s`: time from the start of the run, s.
    `start`: servers that start. They get requests once their start-up time is over.
    `stop`: servers that get no new requests. They finish the requests that they have, then shut down.
    `fail`: servers that fail immediately. The router resends their unfinished requests from the beginning.
    `load`, `unload`: (server, adapter) pairs: the server may serve the adapter from now on, or no longer. A load blocks
    vLLM's engine while the adapter is read from disk.
    `route`: adapter → server → share of the adapter's requests. With the router `plan`, other servers get none.
    """

    time_s: float
    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()
    fail: tuple[int, ...] = ()
    load: tuple[tuple[int, str], ...] = ()
    unload: tuple[tuple[int, str], ...] = ()
    route: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @checked
    def __post_init__(self) -> None:
        checks.real("time_s of a change", self.time_s, low=0.0)
        for name, shares in self.route.items():
            for server, share in shares.items():
                checks.real(f"the share of {shown(name)} on server {server}", share, low=0.0, high=1.0)
            if not sum(shares.values()) > 0.0:
                raise ValidationError(f"Expected shares of {shown(name)} with a sum above 0, got none.")
        check_fields(self)

    @property
    def servers(self) -> set[int]:
        """All servers that the change names."""
        named = {*self.start, *self.stop, *self.fail, *(s for s, _ in (*self.load, *self.unload))}
        return named.union(*self.route.values())


@runtime_checkable
class Controller(Protocol):
    """Decides on changes every `period_s` seconds of a run: an autoscaler, or the loop that follows traffic."""

    period_s: float

    def act(self, now_s: float, view: Any) -> Iterable[Change]:
        """Changes at or after `now_s`; `view`: the servers now (`packer.twin.cluster.view.ClusterView`)."""
