"""Clusters as TOML files (docs/reference/formats.md, "Clusters")."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from packer.cluster import MOST_SERVERS, Cluster, Node, ServerKind, Store
from packer.engines import engine_of
from packer.errors import FileFormatError, located, reader
from packer.io.documents import parse_toml
from packer.io.files import read_text
from packer.io.profiles import load_profile
from packer.io.schema import FileTable, parse
from packer.io.workload_schema import FineTuningTable


class KindTable(FileTable):
    """`[[kinds]]`. `profile`: a shipped one, or a .toml file, relative to the cluster's. `engine`: with parameters, as
    in "lightllm:max_wait_tokens=1"."""

    name: str
    profile: str
    max_loras: int
    max_lora_rank: int | None = None
    engine: str = "vllm"


class NodeTable(FileTable):
    """`[[nodes]]`: `count` machines, each with `servers`, and with `host_gb` for adapters; None: unlimited."""

    servers: Annotated[list[str], Field(min_length=1)]
    count: Annotated[int, Field(ge=1, le=MOST_SERVERS)] = 1
    host_gb: float | None = None


class StoreTable(FileTable):
    """`[store]`: where adapters come from that no host holds. `concurrent` 0: transfers share the bandwidth."""

    bandwidth_gb_s: float
    latency_ms: float = 0.0
    concurrent: int = 0


class ClusterFile(FileTable):
    """The whole file. `fine_tuning`: job of each server."""

    schema_version: Literal[1] = Field(alias="schema")
    kinds: Annotated[list[KindTable], Field(min_length=1)]
    nodes: Annotated[list[NodeTable], Field(min_length=1)]
    slo: dict[str, float] = Field(default_factory=dict)
    store: StoreTable | None = None
    network_ms: float = 0.0
    fine_tuning: FineTuningTable | None = None


@reader
def read_cluster(path: str | os.PathLike[str]) -> Cluster:
    """The cluster in a TOML file.

    Raises `FileFormatError`: the file can't be read, or a value in it breaks a rule; names the key.
    """
    text = read_text(path)
    if text.lstrip().startswith("{"):
        rule = "expected a cluster in TOML; that of a plan (n_gpus, solver) is packer.load_plan(FILE).cluster()."
        raise FileFormatError(rule)
    file = parse(ClusterFile, parse_toml(text))
    kinds = tuple(_kind(k, table, path) for k, table in enumerate(file.kinds))
    count = sum(node.count * len(node.servers) for node in file.nodes)
    if count > MOST_SERVERS:
        raise FileFormatError(f"expected at most {MOST_SERVERS:,} servers, got {count:,}.", key="nodes")
    each = [node for node in file.nodes for _ in range(node.count)]
    servers = tuple(name for node in each for name in node.servers)
    with located():
        host_bytes = (math.inf if node.host_gb is None else node.host_gb * 1e9 for node in each)
        nodes = tuple(Node(len(node.servers), most) for node, most in zip(each, host_bytes, strict=True))
        store = None
        if file.store is not None:
            store = Store(file.store.bandwidth_gb_s * 1e9, file.store.latency_ms, file.store.concurrent)
        job = None if file.fine_tuning is None else file.fine_tuning.job()
        return Cluster(
            kinds, servers, slo=file.slo, nodes=nodes, store=store, network_ms=file.network_ms, fine_tuning=job
        )


def _kind(k: int, table: KindTable, path: str | os.PathLike[str]) -> ServerKind:
    """The kind of a table; the path of a profile is relative to the cluster file."""
    name = table.profile
    beside = Path(path).parent / name
    with located(f"kinds.{k}"):
        profile = load_profile(beside if name.endswith(".toml") else name)
        return ServerKind(table.name, profile, table.max_loras, table.max_lora_rank, engine_of(table.engine))
