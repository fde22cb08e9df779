"""How to start a real server: the content of `--launch FILE.toml`. Paths in the file are relative to the file. `packer
live setup-cpu` writes a launch file for the tiny model; docs/live.md has launch files for GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from packer import checks
from packer.engine_spec import EngineSpec
from packer.errors import FileFormatError, ValidationError, reader, shown
from packer.io.documents import parse_toml, toml_table
from packer.io.files import read_text
from packer.io.schema import parse
from packer.profile import GpuSpec, ModelSpec
from packer.settings import Settings
from packer.words import listed

DEFAULT_COMMAND = ("{python}", "-m", "vllm.entrypoints.openai.api_server")
"""`vllm serve` requires a distribution named vllm, but the CPU wheel has another name; the module always works."""


@dataclass(frozen=True)
class Emulation:
    """Emulate a GPU's memory rule on a back end that takes the KV cache's size as an option. KV bytes = kv_budget_bytes
    − max_loras × max_lora_rank × slot_bytes_per_rank; if nothing is left, the result is a memory error."""

    kv_budget_bytes: float
    slot_bytes_per_rank: float

    def kv_bytes(self, settings: Settings) -> int:
        """Bytes for the KV cache; 0 or less means a memory error."""
        return int(self.kv_budget_bytes - settings.max_loras * settings.max_lora_rank * self.slot_bytes_per_rank)


@dataclass(frozen=True)
class Launch:
    """How to start one server of a base model.

    `name`: name of the profile that a calibration writes.
    `command`: start of the command line; "{python}" stands for `python`, the interpreter of vLLM's environment.
    `adapter_path`: path of an adapter, which may contain "{name}" and "{rank}".
    `engine`, `model_spec`, `gpu`: as in a profile; `engine` determines the flags.
    `arguments`, `environment`: further flags and environment variables.
    `emulation`: emulated slot memory, for the CPU.
    `step_log`: whether to log every engine step.
    `server_cores`, `client_cores`: CPU cores to pin to; empty means any. Servers that run at once divide
    `server_cores` among them.
    `api_cores`: cores of the process that serves HTTP, if other than `server_cores`; on a GPU, this process never takes
    time from the model.
    `token_ids`: prompts are random token ids in [low, high[.
    `startup_timeout_s`: a server that is not healthy after this time has failed.
    `stall_timeout_s`: a server that sends nothing for this time, with requests outstanding, hangs.
    """

    name: str
    model: str
    adapter_path: str
    engine: EngineSpec
    model_spec: ModelSpec
    gpu: GpuSpec
    python: str = "python"
    command: tuple[str, ...] = DEFAULT_COMMAND
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    emulation: Emulation | None = None
    step_log: bool = True
    server_cores: tuple[int, ...] = ()
    client_cores: tuple[int, ...] = ()
    api_cores: tuple[int, ...] = ()
    token_ids: tuple[int, int] = (1000, 9000)
    startup_timeout_s: float = 600.0
    stall_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        checks.integer("token_ids[0]", self.token_ids[0], low=0)
        checks.integer("token_ids[1]", self.token_ids[1], low=self.token_ids[0] + 1)
        checks.real("startup_timeout_s", self.startup_timeout_s, low=0, open_low=True)
        checks.real("stall_timeout_s", self.stall_timeout_s, low=0, open_low=True)
        self.adapter_folder("name", 8)
        self.program()

    def adapter_folder(self, name: str, rank: int) -> str:
        """Path of an adapter."""
        return filled("adapter_path", self.adapter_path, name=name, rank=rank)

    def program(self) -> list[str]:
        """The words that start a server, without its flags."""
        return [filled("command", part, python=self.python) for part in self.command]


def filled(what: str, text: str, **values: object) -> str:
    """Replace names in braces by values; {{ is a brace. Raises `ValidationError`: the text has other names in braces.
    `what`: description of the text for the error message."""
    known = {"{{": "{", "}}": "}", **{f"{{{name}}}": str(value) for name, value in values.items()}}
    try:
        return re.sub(r"\{\{|\}\}|\{\w*\}|[{}]", lambda found: known[found[0]], text)
    except KeyError:
        names = listed([f"{{{name}}}" for name in values])
        raise ValidationError(f"Expected {what} with only {names} in braces, got {shown(text)}.") from None


@reader
def read_launch(path: str | os.PathLike[str]) -> Launch:
    """Read a launch file; raises `FileFormatError`."""
    data = parse_toml(read_text(path))
    model, engine = (data[key] if isinstance(data.get(key), dict) else {} for key in ("model", "engine"))
    if "model_spec" in data:
        raise FileFormatError("unknown key.", key="model_spec")
    spec = parse(ModelSpec, {key: value for key, value in model.items() if key != "path"}, "model")
    data = {
        **data,
        "model": parse(str, model.get("path"), "model.path"),
        "model_spec": asdict(spec),
        "engine": {"name": "vllm", "version": "unknown", **engine},
    }
    launch = parse(Launch, data)
    base = Path(path).resolve().parent
    return replace(
        launch,
        model=_beside(base, launch.model),
        adapter_path=_beside(base, launch.adapter_path, always=True),
        python=_beside(base, launch.python),
    )


def launch_text(launch: Launch) -> str:
    """Return the text of a launch file without default values; `read_launch` reads the same launch from it."""
    import tomlkit

    changed = [each.name for each in fields(Launch) if getattr(launch, each.name) != each.default]
    data = {name: value for name, value in asdict(launch).items() if name in changed}
    data["model"] = {"path": launch.model, **data.pop("model_spec")}
    return tomlkit.dumps(toml_table({name: value for name, value in data.items() if value != {}}))


def _beside(base: Path, name: str, *, always: bool = False) -> str:
    """Resolve a path relative to `base`; a name that is no file there (`python`, a hub name) is unchanged."""
    if Path(name).is_absolute():
        return name
    candidate = base / name
    return str(candidate) if always or os.path.exists(candidate) else name  # False for names too long
