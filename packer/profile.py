"""A calibrated description of one (base model, GPU, engine version, engine settings). The arithmetic on these numbers
is in `packer.twin.law` and `packer.twin.memory`; files are read and written by `packer.io.profiles`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache
from itertools import count
from typing import Literal

from packer import checks
from packer.engine_spec import V1_RELEASE, EngineSpec
from packer.errors import ValidationError, shown
from packer.fingerprint import fingerprint
from packer.kv_shape import KvShape
from packer.public import checked
from packer.settings import Settings
from packer.terms import LINEAR_TERMS, PAPER_TERMS
from packer.words import money

_MOST_BYTES = 1e15
_MOST_MS = 1e9
DEFAULT_STARTUP_S = 120.0  # Start-up time of a server, s: weights, compilation and CUDA graphs for a model of a few GB.
WEIGHTS = "weights"  # Provenance key of the weights that a server needs, if not those of `ModelSpec.repository`.
RANK_1 = (0, 12)  # First version that takes `--max-lora-rank 1` (vllm/config/lora.py; 0.11.1, not 0.11.0).
ONE_TOKENIZER = (0, 11)  # First version without `vllm/transformers_utils/tokenizer_group.py` (pull request 24078).


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The base model.

    `kv_bytes_per_token`: bytes of keys and values of a token; `kv_shape`: what a request holds where this is not so
    much for each token. `lora_bytes_per_rank`: bytes of one adapter per unit of rank. `repository`: repository from
    which an engine loads the model, such as "meta-llama/Llama-3.1-8B-Instruct"; None: the same as `name`.
    """

    name: str
    weights_bytes: float
    kv_bytes_per_token: float
    lora_bytes_per_rank: float
    repository: str | None = None
    kv_shape: KvShape | None = None

    @checked
    def __post_init__(self) -> None:
        checks.keep_real(self, "model.weights_bytes", low=0, high=_MOST_BYTES)
        checks.keep_real(self, "model.kv_bytes_per_token", low=1, high=_MOST_BYTES)
        checks.keep_real(self, "model.lora_bytes_per_rank", low=0, high=_MOST_BYTES)


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """The GPUs of a server: `name` of one GPU, memory and price of all GPUs together."""

    name: str
    memory_bytes: float
    price_per_hour: float | None = None

    @checked
    def __post_init__(self) -> None:
        checks.keep_real(self, "gpu.memory_bytes", low=0, high=_MOST_BYTES, open_low=True)
        if self.price_per_hour is not None:
            checks.keep_real(self, "gpu.price_per_hour", low=0, high=1e9)


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """KV cache capacity as a function of the slots.

    `policy` "reserved", as in vLLM: tokens = (kv_budget_bytes − max_loras × (slot_bytes + max_lora_rank ×
    slot_bytes_per_rank)) / kv_bytes_per_token, corrected to be exact at the `measured` points (max_loras,
    max_lora_rank, tokens). "unified", as in S-LoRA: nothing is reserved, resident adapters are stored in the KV
    pool. A capacity below `min_kv_tokens` is a memory error.
    """

    kv_budget_bytes: float
    slot_bytes: float
    slot_bytes_per_rank: float
    min_kv_tokens: int
    policy: Literal["reserved", "unified"] = "reserved"
    measured: tuple[tuple[int, int, int], ...] = ()

    @checked
    def __post_init__(self) -> None:
        checks.keep_real(self, "memory.kv_budget_bytes", low=-_MOST_BYTES, high=_MOST_BYTES)
        checks.keep_real(self, "memory.slot_bytes", low=0, high=_MOST_BYTES)
        checks.keep_real(self, "memory.slot_bytes_per_rank", low=0, high=_MOST_BYTES)
        checks.keep_integer(self, "memory.min_kv_tokens", low=1)
        checks.choice("memory.policy", self.policy, ("reserved", "unified"))
        points = tuple(
            (
                checks.integer("memory.measured max_loras", loras, low=0, high=checks.MOST_COUNT),
                checks.integer("memory.measured max_lora_rank", rank, low=0, high=checks.MOST_COUNT),
                checks.integer("memory.measured tokens", tokens, low=0, high=10**15),
            )
            for loras, rank, tokens in self.measured
        )
        object.__setattr__(self, "measured", points)


@dataclass(frozen=True)
class LatencySpec:
    """The step law: `form` "linear" or "paper", and coefficients by the names in `packer.terms`.

    `graph_max_tokens`: largest batch with a CUDA graph. `ridge_tokens`: tokens of a step above which arithmetic takes
    longer than reading the weights; 0: the law has no such point. `expert_share`: share of a layer's experts that
    process a token; 0: the model has no experts.
    """

    form: Literal["linear", "paper"]
    coefficients: Mapping[str, float]
    graph_max_tokens: int = 512
    ridge_tokens: float = 0.0
    expert_share: float = 0.0

    @checked
    def __post_init__(self) -> None:
        checks.choice("latency.form", self.form, ("linear", "paper"))
        known = LINEAR_TERMS if self.form == "linear" else PAPER_TERMS
        checked = {}
        for key, value in self.coefficients.items():
            if key not in known:
                raise ValidationError(f"Expected latency coefficients among {', '.join(known)}, got {shown(key)}.")
            checked[key] = checks.real(f"latency.coefficients.{key}", value, low=0.0, high=_MOST_MS)
        object.__setattr__(self, "coefficients", checked)
        checks.keep_integer(self, "latency.graph_max_tokens", low=0)
        checks.keep_real(self, "latency.ridge_tokens", low=0.0, high=_MOST_MS)
        checks.keep_real(self, "latency.expert_share", low=0.0, high=1.0)


@dataclass(frozen=True, slots=True)
class LoadingSpec:
    """Time to load an adapter into a slot, ms: base + rank × per_rank from host memory, plus the same from disk.

    `cold_start` True: all adapters start on disk, and the first request of each waits for the load. False: all were
    loaded once, in order, and the last `max_cpu_loras` are in host memory; but in a cluster, servers whose host
    memory can't hold all adapters start with none. `spares_batch`: loading an adapter never evicts one whose requests
    are running; vLLM's LRU may do so (`packer.twin.engine.slots`). `EngineSpec.warm_start` replaces `cold_start`.
    """

    host_base_ms: float = 0.0
    host_per_rank_ms: float = 0.0
    disk_base_ms: float = 0.0
    disk_per_rank_ms: float = 0.0
    cold_start: bool = False
    spares_batch: bool = False

    @checked
    def __post_init__(self) -> None:
        for item in fields(self)[:4]:
            checks.keep_real(self, f"loading.{item.name}", low=0.0, high=_MOST_MS)


@dataclass(frozen=True, slots=True)
class FrontEndSpec:
    """The API server between client and engine: one event loop that accepts requests and streams tokens.

    Times for which the loop is blocked, ms: `request_ms` per request; `first_use_ms` more for the first request of an
    adapter (to load a tokenizer, before vLLM 0.11); `output_ms` per streamed token; `scrape_base_ms` to render
    /metrics, plus `scrape_per_series_ms` per time series of `vllm:lora_requests_info` and `scrape_per_name_ms` per
    adapter named in their labels. `scrape_interval_s`: time between scrapes; None: /metrics is not read.
    """

    scrape_interval_s: float | None = None
    scrape_base_ms: float = 0.0
    scrape_per_series_ms: float = 0.0
    scrape_per_name_ms: float = 0.0
    request_ms: float = 0.0
    first_use_ms: float = 0.0
    output_ms: float = 0.0

    @checked
    def __post_init__(self) -> None:
        if self.scrape_interval_s is not None:
            checks.keep_real(self, "frontend.scrape_interval_s", low=1e-3, high=_MOST_MS)
        for item in fields(self)[1:]:
            checks.keep_real(self, f"frontend.{item.name}", low=0.0, high=_MOST_MS)


@dataclass(frozen=True)
class Profile:
    """One combination of base model, GPU, engine and settings, with the parameters that the twin needs.

    `calibrated` False marks an estimate from datasheets. `errors` are held-out errors of the calibration
    (SMAPE in percent, 0–200 form, unless the key says otherwise). `provenance`: who measured, how, when.
    `startup_s`: start-up time of a server; not part of the fingerprint.
    `measured_adapters`: largest number of adapters on one server in the measurements; plans that exceed it are marked.
    """

    name: str
    model: ModelSpec
    gpu: GpuSpec
    engine: EngineSpec
    memory: MemorySpec
    latency: LatencySpec
    loading: LoadingSpec = field(default_factory=LoadingSpec)
    calibrated: bool = False
    provenance: Mapping[str, str] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    frontend: FrontEndSpec = field(default_factory=FrontEndSpec)
    startup_s: float = DEFAULT_STARTUP_S
    measured_adapters: int = 384

    @checked
    def __post_init__(self) -> None:
        checks.keep_real(self, "startup_s", low=0.0, high=1e6)
        checks.keep_integer(self, "measured_adapters", low=1)

    def __repr__(self) -> str:
        return f"<Profile {self.label}>"

    @cached_property
    def fingerprint(self) -> str:
        """Hash of everything that changes the twin's result: 16 hex digits; see `packer.fingerprint`."""
        terms = {key: value for key, value in self.latency.coefficients.items() if value != 0.0}
        return fingerprint(
            model=replace(self.model, repository=None), engine=self.engine, memory=self.memory,
            latency=replace(self.latency, coefficients=terms), loading=self.loading, frontend=self.frontend,
        )  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Profile) and (self is other or self._content == other._content)

    @cached_property
    def _content(self) -> tuple[object, ...]:
        return (
            self.name, self.fingerprint, self.model.repository, self.gpu, self.calibrated,
            dict(self.provenance), dict(self.errors), self.startup_s, self.measured_adapters,
        )  # fmt: skip

    @property
    def label(self) -> str:
        """Name for display, followed by the reasons to expect large errors, if any."""
        return f"{self.name} ({self.doubts})" if self.doubts else self.name

    @property
    def doubts(self) -> str:
        """Reasons to expect large errors: an estimate, or an engine whose scheduler is not simulated; "" if none."""
        old = f"vLLM {self.engine.version} simulated with the schedule of V1"
        reasons = {"estimated, not calibrated": not self.calibrated, old: self.engine.release < V1_RELEASE}
        return "; ".join(reason for reason, holds in reasons.items() if holds)

    def facts(self) -> list[tuple[str, str]]:
        """Description of the server and of the source of its numbers, for display: name and text of each fact."""
        model, engine, memory, gpu = self.model, self.engine, self.memory, self.gpu
        several = f"{engine.gpus} × " if engine.gpus > 1 else ""
        ranks = f", {engine.data_parallel_size} data-parallel ranks" if engine.data_parallel_size > 1 else ""
        price = gpu.price_per_hour
        settings = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        unused = ", not in this version of vLLM" if engine.release >= ONE_TOKENIZER else ""
        slot = f"{memory.slot_bytes / 1e6:.2f} MB + {memory.slot_bytes_per_rank / 1e6:.2f} MB × max_lora_rank"
        slot += f", {', '.join(engine.lora_target_modules)} alone" if engine.lora_target_modules else ""
        return [
            ("profile", self.label),
            ("base model", f"{model.name}, {model.weights_bytes / 1e9:.1f} GB of weights"),
            ("adapter", f"{model.lora_bytes_per_rank / 1e6:.2f} MB per unit of rank"),
            ("GPU", f"{several}{gpu.name}, {gpu.memory_bytes / engine.gpus / 2**30:.1f} GiB{ranks}"),
            ("price per hour", "no price known" if price is None else money(price)),
            ("engine", f"{engine.name} {engine.version}, {engine.dtype}"),
            ("settings", ", ".join(f"{name} {getattr(engine, name)}" for name in settings)),
            ("slot", slot),
            ("memory points", f"{len(memory.measured)} measured"),
            ("step law", f"{self.latency.form}, {len(self.latency.coefficients)} terms"),
            ("first use of an adapter", f"{self.frontend.first_use_ms:g} ms{unused}"),
            ("fingerprint", self.fingerprint),
            *self.provenance.items(),
        ]

    def settings(self, max_loras: int, max_lora_rank: int) -> Settings:
        """Settings with `max_loras` slots of `max_lora_rank`, or of the least rank that the version of vLLM takes."""
        return _settings(max_loras, self.least_slot_rank if max_lora_rank == 1 else max_lora_rank)

    @cached_property
    def least_slot_rank(self) -> int:
        """The smallest `max_lora_rank` that the engine takes."""
        return 8 if self.engine.name == "vllm" and self.engine.release < RANK_1 else 1

    def with_coefficients(self, **coefficients: float) -> Profile:
        """The same profile with some latency coefficients replaced."""
        merged = {**self.latency.coefficients, **coefficients}
        return replace(self, latency=replace(self.latency, coefficients=merged))


_settings = lru_cache(maxsize=4096, typed=True)(Settings)
"""Settings, cached so that they are checked once: a search uses the same settings for very many bins."""


def labelled(profiles: Iterable[Profile]) -> dict[Profile, str]:
    """The label of each profile in a plan: its name, with a number if several profiles share the name."""
    labels: dict[Profile, str] = {}
    for profile in profiles:
        if profile not in labels:
            numbered = (f"{profile.name} ({k})" if k > 1 else profile.name for k in count(1))
            labels[profile] = next(label for label in numbered if label not in labels.values())
    return labels
