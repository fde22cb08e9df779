"""Data sheets of GPUs, for estimated profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from packer import checks
from packer.errors import UnknownNameError, ValidationError, reader
from packer.io.documents import parse_toml
from packer.io.files import read_text
from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class Datasheet:
    """The data sheet of a GPU.

    `memory_gib` (2^30 bytes) is what CUDA or ROCm shows as total. `bandwidth_bytes_s` and the arithmetic in FLOP/s
    (dense) are peaks of the maker's data sheet. `fp8_flops` and `fp4_flops` are None for a GPU without such units:
    weights are converted and multiplied in bf16. `sms`: streaming multiprocessors or compute units, `clock_mhz` their
    boost clock. `watts`: board power. `price_per_hour` in USD, None if the GPU is not commonly rented, with its source
    and date in `price_source`. `link_bytes_s`: bandwidth from one GPU to the others of its node, by NVLink or else
    PCIe: half of the peak in both directions.
    """

    name: str
    title: str
    memory_gib: float
    bandwidth_bytes_s: float
    bf16_flops: float
    sms: int
    clock_mhz: float
    watts: float
    fp8_flops: float | None = None
    fp4_flops: float | None = None
    price_per_hour: float | None = None
    price_source: str | None = None
    link_bytes_s: float = 32e9
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if isinstance(value := getattr(self, name), int | float):
                checks.real(name, value, low=0.0, open_low=True)

    @property
    def memory_bytes(self) -> float:
        """Memory in bytes."""
        return self.memory_gib * 2.0**30


def _sheets() -> dict[str, Datasheet]:
    found = {}
    data = table("packer.twin", "datasheets.toml")
    for name, row in data["gpus"].items():
        source, aliases = row.pop("price_source", None), tuple(row.pop("aliases", ()))
        found[name] = Datasheet(name, price_source=data["sources"].get(source), aliases=aliases, **row)
    return found


GPUS = _sheets()
_PARTS = re.compile(r"[a-z]{3,}(?=\d)|[a-z0-9]+")
"""Words of a name: letters and digits; digits after three letters or more are a word (rtx4090, gaudi2, sxm5)."""
_MAKERS = frozenset(("nvidia", "amd", "intel", "tesla", "geforce", "instinct", "habana"))


def datasheet(name: str) -> Datasheet:
    """The GPU of a name as people or drivers write it ("h200", "NVIDIA H100 80GB HBM3"), or of the data sheet X.toml.

    Raises `UnknownNameError`: no GPU fits the name; `ValidationError`: several GPUs do, as for "a100";
    `FileFormatError`: the file can't be read, or a value in it breaks a rule.
    """
    if name.endswith(".toml"):
        return _read_sheet(name)
    wanted = _words(name)
    said = set(wanted) if len(wanted) == len(set(wanted)) else set()
    named = [each for each in GPUS.values() if said in map(set, map(_words, _names(each)))]
    found = named or [each for each in GPUS.values() if _fits(said, each)]
    if not said or not found:
        raise UnknownNameError("GPU", name, GPUS, "Any other: give the path of its data sheet, FILE.toml.")
    if len(found) > 1:
        listed = ", ".join(each.name for each in found)
        raise ValidationError(f"Expected one GPU, got {name[:80]!r}, which may be any of {listed}.")
    return found[0]


@reader
def _read_sheet(path: str) -> Datasheet:
    from packer.io.schema import parse

    sheet = parse(Datasheet, {"name": path[:-5].rpartition("/")[2], **parse_toml(read_text(path))})
    # What was measured on a known GPU says nothing about another of its name.
    return replace(sheet, name=f"own-{sheet.name}") if sheet.name in GPUS else sheet


def _names(sheet: Datasheet) -> tuple[str, ...]:
    return sheet.name, sheet.title, *sheet.aliases


def _fits(said: set[str], sheet: Datasheet) -> bool:
    """Whether a GPU's names have all these words, and its own name at least one."""
    return said <= {word for name in _names(sheet) for word in _words(name)} and bool(said & {*_words(sheet.name)})


def _words(name: str) -> list[str]:
    """Return the words of a name, without its makers and the unit of its memory."""
    words = (word.removesuffix("gb") or word for word in _PARTS.findall(name.lower()))
    return [word for word in words if word not in _MAKERS]
