"""The servers of a plan as every format needs them: names, addresses, flags and adapters. The flags are vLLM's;
`packer.export.hosts` has SGLang's."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packer import checks
from packer.bin import Bin
from packer.engine_spec import EngineSpec
from packer.errors import IncompatibleError, ValidationError, shown
from packer.export import quoting
from packer.export.makers import Maker, maker
from packer.export.nodes import node_labels
from packer.export.sources import vllm_path
from packer.gpu import model_names
from packer.plan import Plan
from packer.profile import WEIGHTS
from packer.words import counted, listed

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", re.ASCII)
_VERSION = re.compile(r"v?(\d+\.\d+)(\.\d+(\.post\d+)?)?", re.ASCII)
_ADDRESS = re.compile(r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f]*:[0-9A-Fa-f:.]+\]):\d{1,5}", re.ASCII)
_ALWAYS = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization", "dtype")
_NOT_DEFAULT = {"tensor_parallel_size": 1, "data_parallel_size": 1, "block_size": 16}
"""Engine settings that always become flags, and settings that do so only if they differ from vLLM's default."""
_LAST_PORT = 65_535
MANAGED = {"app.kubernetes.io/managed-by": "packer"}  # Label of every exported object, by which former ones are found.


def engine_flags(engine: EngineSpec) -> dict[str, object]:
    """vLLM's flags of these settings, by name; raises `ValidationError` for a block size that vLLM does not take."""
    engine.check_block_size()
    flags: dict[str, object] = {name.replace("_", "-"): getattr(engine, name) for name in _ALWAYS}
    for name, default in _NOT_DEFAULT.items():
        if (size := getattr(engine, name)) != default:
            flags[name.replace("_", "-")] = size
    flags |= {name if on else f"no-{name}": True for name, on in engine.switches.items()}
    return flags | engine.arguments


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the exported servers.

    `sources`: adapter → path or repository; empty: all adapters are in `adapters_dir`.
    `adapters_dir`: folder of the adapters on the servers; without `sources`, it has a subfolder for each adapter.
    `model`: path or repository of the base model; None takes the profile's repository, else the model's name.
    `image`: container image; None takes the format's image for the profile's version of vLLM.
    `prefix`: prefix of the servers' names, a DNS label that starts with a letter: `gpu` gives gpu-0, gpu-1, ….
    `namespace`: Kubernetes namespace; None uses the cluster's default.
    `port`: port of every server; on a shared host, port of the first server.
    `address`: address at which routers reach a server: host and port with `{name}`, `{index}` and `{port}` (on a shared
    host: `port` + index); None takes the server's name and `port`, which Compose and Kubernetes resolve.
    `adapters_claim`: Kubernetes PersistentVolumeClaim with the adapters, mounted at `adapters_dir`.
    `token_secret`: Kubernetes Secret whose key `token` is the Hugging Face token.
    `node_labels`: short name of a GPU, or "" for every GPU → key and value of the label of its nodes. In a plan with
    several kinds, kinds that are not given use the label of `packer.export.nodes`.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    adapters_dir: str = "/adapters"
    model: str | None = None
    image: str | None = None
    prefix: str = "gpu"
    namespace: str | None = None
    port: int = 8000
    address: str | None = None
    adapters_claim: str | None = None
    token_secret: str | None = None
    node_labels: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks.integer("the port", self.port, low=1, high=_LAST_PORT)
        names = {"prefix": self.prefix, "namespace": self.namespace}
        names |= {"claim": self.adapters_claim, "secret": self.token_secret}
        for what, name in names.items():
            most = 40 if what == "prefix" else quoting.DNS_LENGTH  # numbers and hashes follow the prefix
            if name is not None and (quoting.dns_name(name) != name or len(name) > most):
                rule = f"Expected the {what} to be up to {most} small letters, digits and '-'"
                raise ValidationError(f"{rule}, got {shown(name)}.")
        if not self.prefix[0].isalpha():  # RFC 1035, required for the names of Services
            raise ValidationError(f"Expected the prefix to start with a small letter, got {shown(self.prefix)}.")
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise ValidationError(f"Expected a container image like vllm/vllm-openai:v0.10.0, got {shown(self.image)}.")
        if not self.adapters_dir.startswith("/") or not self.adapters_dir.isprintable():
            raise ValidationError(f"Expected an absolute folder of adapters, got {shown(self.adapters_dir)}.")


@dataclass(frozen=True, slots=True)
class Module:
    """One adapter on one server. `share`: share of the adapter's requests that the server gets."""

    name: str
    source: str
    share: float

    def resource(self, server: ExportedServer) -> str:
        """Name of the adapter's Kubernetes resource for one server."""
        return quoting.dns_name(f"{server.name}.{self.name}")


@dataclass(frozen=True, slots=True)
class ExportedServer:
    """One vLLM server of the plan.

    `base`: names under which the base model is requested, that is the server's adapters of rank 0, as modules without a
    source.
    `fleet`: number of LoRA adapters of the plan, any of which the server may get when another one is lost.
    `nodes`: key of a label → values, of which a node must have one. Empty: any node.
    """

    index: int
    name: str
    port: int
    address: str
    model: str
    image: str
    bin: Bin
    fleet: int
    modules: tuple[Module, ...]
    base: tuple[Module, ...] = ()
    nodes: Mapping[str, list[str]] = field(default_factory=dict)

    @property
    def maker(self) -> Maker:
        """The maker of the server's GPUs."""
        return maker(self.bin.profile.gpu.name)

    @property
    def max_cpu_loras(self) -> int:
        """Number of adapters that host memory holds: all unless the profile has a limit, and at least `max_loras`."""
        limit = self.bin.profile.engine.max_cpu_loras
        return max(self.bin.max_loras, self.fleet if limit is None else limit)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the server's Kubernetes resources, unique among the plan's servers."""
        return {"app.kubernetes.io/name": "vllm", **MANAGED, "app.kubernetes.io/instance": self.name}

    def settings(self) -> dict[str, object]:
        """vLLM's flags by name, without `--lora-modules`."""
        flags = engine_flags(self.bin.profile.engine)
        if not self.modules:
            return {name: each for name, each in flags.items() if "lora" not in name}
        flags |= {"enable-lora": True, "max-loras": self.bin.max_loras}
        return flags | {"max-lora-rank": self.bin.max_lora_rank, "max-cpu-loras": self.max_cpu_loras}

    @property
    def served_names(self) -> dict[str, object]:
        """The flag that sets further names of the base model; empty if it has none."""
        names = [item.name for item in self.base if item.name != self.model]
        return {"served-model-name": [self.model, *names]} if names else {}

    def lora_modules(self) -> list[str]:
        """Values of --lora-modules, as JSON, as `name=path` allows few names; raises `IncompatibleError`."""
        paths = {item.name: vllm_path(item.name, item.source) for item in self.modules}
        return [quoting.json_text({"name": name, "path": path}) for name, path in paths.items()]

    def command(self, port: int) -> list[str]:
        """The whole command line."""
        start = ["vllm", "serve", self.model, "--port", str(port), *quoting.words(self.served_names)]
        modules = ["--lora-modules", *self.lora_modules()] if self.modules else []
        return [*start, *self.flags(), *modules]

    def requested(self, name: str) -> str:
        """The `model` of requests: SGLang takes what follows the first colon for an adapter, else its base model."""
        if self.bin.profile.engine.name.lower() != "sglang":
            return name
        base = self.model.partition(":")[0]  # SGLang does not read it
        return base if name in {item.name for item in self.base} else f"{base}:{name}"

    def flags(self) -> list[str]:
        """`settings` as words of a command line."""
        return quoting.words(self.settings())


def servers(plan: Plan, options: Options, numbers: Sequence[int] | None = None) -> tuple[ExportedServer, ...]:
    """The servers of a plan. `numbers`: numbers of the servers in names, addresses and ports; None: from 0.

    Raises `IncompatibleError`: the plan has no servers or unplaced adapters, or the base model is ambiguous;
    `ValidationError`: an adapter has no source although a table was given, the model can't be named on a command line,
    or an address is invalid.
    """
    if not plan.bins or plan.unplaced:
        why = f" {plan.reasons[0]}" if plan.reasons else ""
        left = f"{counted(len(plan.unplaced), 'adapter')} without a server"
        raise IncompatibleError(f"The plan is infeasible ({left}): nothing to run.{why}")
    models = model_names(item.profile for item in plan.bins)
    if options.model is not None and len(models) > 1:
        rule = f"Expected no --model for a plan of several base models ({', '.join(models)})"
        raise IncompatibleError(f"{rule}: their profiles name them.")
    paths = _sources(plan, options)
    placed = zip(plan.bins, numbers or range(len(plan.bins)), strict=True)
    found = tuple(_server(plan, item, index, options, paths) for item, index in placed)
    if len({server.address for server in found}) < len(found):
        rule = f"Expected an address with {{name}}, {{index}} or {{port}}, in which the {len(found):,} servers differ"
        raise ValidationError(f"{rule}, got {shown(options.address)}.")
    return found


def _sources(plan: Plan, options: Options) -> dict[str, str]:
    fleet = plan.workload
    used = sorted({fleet.names[i] for each in plan.bins for i in each.adapters if fleet.ranks[i]})
    if not options.sources:
        folder = options.adapters_dir.rstrip("/")
        return {name: f"{folder}/{quoting.file_name(name)}" for name in used}
    missing = [name for name in used if name not in options.sources]
    if missing:
        rule = f"Expected a source for each of the {len(used)} adapters, got none for {len(missing)}"
        raise ValidationError(f"{rule}: {listed(map(shown, missing), 5)}.")
    return {name: options.sources[name] for name in used}


def _server(plan: Plan, item: Bin, index: int, options: Options, paths: Mapping[str, str]) -> ExportedServer:
    profile = item.profile
    model = options.model or profile.model.repository or profile.model.name
    if not model.strip() or model.startswith("-") or not model.isprintable():
        raise ValidationError(f"Expected the base model to be a path or repository, got {shown(model)}.")
    names = plan.workload.names
    placed = sorted(zip((names[i] for i in item.adapters), item.shares, strict=True))
    base = {names[i] for i in item.adapters if not plan.workload.ranks[i]}
    modules = tuple(Module(name, paths[name], share) for name, share in placed if name not in base)
    plain = tuple(Module(name, "", share) for name, share in placed if name in base)
    for each in modules if profile.engine.name.lower() == "sglang" else ():
        if each.name != each.name.strip():
            rule = "Expected names of adapters without spaces at their ends, which SGLang takes off in requests"
            raise ValidationError(f"{rule}, got {shown(each.name)}: rename it in the fleet.")
    release = _VERSION.fullmatch(profile.engine.version)
    tag = f"v{release[1]}{release[2] or '.0'}" if release else "latest"  # images of 0.11 are tagged v0.11.0
    return ExportedServer(
        index, f"{options.prefix}-{index}", options.port, address_of(index, options), model,
        options.image or f"vllm/vllm-openai:{tag}", item, plan.workload.n_loras, modules, plain,
        node_labels(profile.gpu.name, len({each.profile.gpu.name for each in plan.bins}), options.node_labels),
    )  # fmt: skip


def check_models(all_servers: tuple[ExportedServer, ...], options: Options) -> None:
    """Raise `IncompatibleError` if a base model has other weights than those planned for, or an adapter's name."""
    for server in all_servers:
        profile = server.bin.profile
        if options.model is None and (wanted := profile.provenance.get(WEIGHTS)):
            raise IncompatibleError(f"The plan is for weights in {wanted}: --model names the repository that has them.")
        if profile.engine.name.lower() == "vllm" and server.model in {item.name for item in server.modules}:
            rule = "Expected names of adapters other than the base model's, which vLLM answers without an adapter,"
            raise IncompatibleError(f"{rule} got {shown(server.model)}: rename it in the fleet, or give it rank 0.")


def host_port(index: int, options: Options) -> int:
    """Port of a server on a host that all servers share: the first server's port plus the index."""
    port = options.port + index
    if port > _LAST_PORT:
        rule = f"Expected the port of every server, the first one's plus its index, to be at most {_LAST_PORT},"
        raise ValidationError(f"{rule} got {options.port} + {index}: give a smaller port.")
    return port


def address_of(index: int, options: Options) -> str:
    """Address at which routers reach a server; raises `ValidationError`."""
    address = options.address if options.address is not None else f"{{name}}:{options.port}"
    if "{port}" in address:
        address = address.replace("{port}", str(host_port(index, options)))
    address = address.replace("{name}", f"{options.prefix}-{index}").replace("{index}", str(index))
    if not _ADDRESS.fullmatch(address) or not 1 <= int(address.rpartition(":")[2]) <= _LAST_PORT:
        rule = "Expected an address like {name}:8000 or 127.0.0.1:{port}"
        raise ValidationError(f"{rule}, got {shown(options.address)}.")
    return address


def base_by_its_name(all_servers: tuple[ExportedServer, ...], stack: str) -> None:
    """Raise `IncompatibleError` if the base model is requested under another name, for which `stack` has no route."""
    for server, item in ((each, item) for each in all_servers for item in each.base):
        if item.name != server.model:
            rule = f"Expected requests without an adapter under the base model's name {shown(server.model)}, by which"
            raise IncompatibleError(f"{rule} {stack} routes them, got {shown(item.name)}: rename it in the fleet.")


def routes(all_servers: tuple[ExportedServer, ...]) -> dict[str, list[tuple[ExportedServer, float]]]:
    """Adapter → its servers with their shares, which sum to 1; sorted by name of the adapter."""
    table: dict[str, list[tuple[ExportedServer, float]]] = {}
    for server in all_servers:
        for item in (*server.modules, *server.base):
            table.setdefault(item.name, []).append((server, item.share))
    return {
        name: [(server, share / sum(part for _, part in places)) for server, share in places]
        for name, places in sorted(table.items())
    }
