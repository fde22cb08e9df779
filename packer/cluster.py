"""Many servers behind one router: which kinds there are, how many, and which adapters each may serve. Files are read by
`packer.io.clusters`; `packer.twin.cluster` simulates them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from packer import checks
from packer.engines import VLLM
from packer.errors import IncompatibleError, UnknownNameError, ValidationError, shown
from packer.goal import Goal
from packer.job import FineTuning
from packer.profile import Profile
from packer.public import check_fields, checked
from packer.settings import MAX_LORAS
from packer.strategies import Engine

MOST_SERVERS = 1_000_000  # Largest number of servers in a cluster.


@dataclass(frozen=True)
class ServerKind:
    """One way to run a server. `max_lora_rank` None: the smallest value that vLLM accepts and that holds every adapter
    of the fleet. `engine`: vLLM or another (`packer.engines`); a system may replace it."""

    name: str
    profile: Profile
    max_loras: int
    max_lora_rank: int | None = None
    engine: Engine = VLLM

    @checked
    def __post_init__(self) -> None:
        checks.instance("a server", self.profile, Profile, "packer.load_profile(NAME)")
        checks.integer("max_loras", self.max_loras, low=0, high=MAX_LORAS)
        if self.max_lora_rank is not None:
            checks.slot_rank("max_lora_rank", self.max_lora_rank)
        check_fields(self)


@dataclass(frozen=True)
class Node:
    """A machine whose host memory is shared by the next `servers` of the cluster; `host_bytes` of it hold adapters."""

    servers: int = 1
    host_bytes: float = math.inf

    @checked
    def __post_init__(self) -> None:
        checks.integer("servers of a node", self.servers, low=1, high=MOST_SERVERS)
        if self.host_bytes != math.inf:
            checks.real("host_bytes", self.host_bytes, low=0.0, open_low=True)


@dataclass(frozen=True)
class Store:
    """The store from which adapters are loaded that no host holds.

    A transfer takes `latency_ms`, then the time to send its bytes. At most `concurrent` transfers run at once, each
    with the whole bandwidth; further ones wait. 0: any number of transfers run at once and share the bandwidth equally.
    """

    bandwidth_bytes_s: float
    latency_ms: float = 0.0
    concurrent: int = 0

    @checked
    def __post_init__(self) -> None:
        checks.real("bandwidth_bytes_s", self.bandwidth_bytes_s, low=0.0, open_low=True)
        checks.real("latency_ms", self.latency_ms, low=0.0)
        checks.integer("concurrent", self.concurrent, low=0, high=100_000)


@dataclass(frozen=True)
class Cluster:
    """Servers in a fixed order; a router sends each request to one of them.

    `kinds`: the kinds of server, with unique names.
    `servers`: the kind of each server, by name.
    `placement`: for each server, the adapters it may serve, with the share of each adapter's requests that the router
    `plan` sends to the server, in ]0, 1]; None: every server may serve every adapter.
    `slo`: default limits of the latency goal, ms, by their keys (`packer.goal`), such as ttft_ms and tpot_ms.
    `nodes`: the machines, in the order of the servers; empty: each server has its own, whose host memory holds all
    adapters.
    `store`: the store of adapters that no host holds; required if some host memory is limited.
    `network_ms`: network time each way, from the router to a server and back: the TTFT is longer by twice as much.
    `fine_tuning`: fine-tuning job of each server, if the workload has none.
    """

    kinds: tuple[ServerKind, ...]
    servers: tuple[str, ...]
    placement: tuple[Mapping[str, float], ...] | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()
    store: Store | None = None
    network_ms: float = 0.0
    fine_tuning: FineTuning | None = None

    @checked
    def __post_init__(self) -> None:
        checks.keep_tuple(self, "kinds", "servers", "nodes", *["placement"] * (self.placement is not None))
        names = [kind.name for kind in self.kinds]
        if len(set(names)) != len(names):
            repeated = Counter(names).most_common(1)[0][0]
            raise ValidationError(f"Expected kinds of server with unique names, got {shown(repeated)} twice.")
        for name in self.servers:
            if name not in names:
                raise UnknownNameError("kind of server", name, names)
        if not self.servers:
            raise ValidationError("Expected a cluster to have at least one server, got 0.")
        if self.placement is not None and len(self.placement) != len(self.servers):
            rule = f"Expected one placement per server ({len(self.servers)})"
            raise ValidationError(f"{rule}, got {len(self.placement)}.")
        for placed in self.placement or ():
            for name, share in placed.items():
                checks.real(f"the share of {shown(name)}", share, low=0.0, high=1.0, open_low=True)
        object.__setattr__(self, "slo", Goal.only(self.slo).limits.to_dict())
        on_nodes = sum(node.servers for node in self.nodes)
        if self.nodes and on_nodes != len(self.servers):
            raise ValidationError(f"Expected the nodes to have {len(self.servers)} servers together, got {on_nodes}.")
        if self.store is None and any(node.host_bytes != math.inf for node in self.nodes):
            raise ValidationError("Expected a store where the host memory of a node is limited, got None.")
        checks.real("network_ms", self.network_ms, low=0.0)
        check_fields(self)

    def __len__(self) -> int:
        return len(self.servers)

    @classmethod
    def of(cls, profile: Profile, n: int, *, max_loras: int, max_lora_rank: int | None = None) -> Cluster:
        """A cluster of `n` equal servers; each may serve every adapter."""
        checks.instance("a server", profile, Profile, "packer.load_profile(NAME)")
        checks.integer("the number of servers", n, low=1, high=MOST_SERVERS)
        return cls((ServerKind(profile.name, profile, max_loras, max_lora_rank),), (profile.name,) * n)

    def resized(self, n: int) -> Cluster:
        """This cluster with `n` servers; all servers must be of one kind. Raises `IncompatibleError`: its servers or
        nodes differ, it has a placement, or a node has several servers."""
        if len(set(self.servers)) > 1 or self.placement is not None:
            raise IncompatibleError("Only a cluster of equal servers without a placement can be resized.")
        if len(set(self.nodes)) > 1 or any(node.servers > 1 for node in self.nodes):
            raise IncompatibleError("Only a cluster of equal nodes with one server each can be resized.")
        checks.integer("the number of servers", n, low=1, high=MOST_SERVERS)
        return replace(self, servers=self.servers[:1] * n, nodes=self.nodes[:1] * n)

    def kind(self, server: int) -> ServerKind:
        """The kind of a server."""
        return next(kind for kind in self.kinds if kind.name == self.servers[server])
