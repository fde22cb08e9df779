"""Data sheets of GPUs, for estimated profiles."""

from __future__ import annotations

import re
from dataclasses import dataclass

from packer.errors import UnknownNameError, ValidationError
from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class Datasheet:
    """One GPU.

    `memory_bytes` is what CUDA or ROCm shows as total. `bandwidth_bytes_s` and the arithmetic in FLOP/s (dense) are
    peaks of the maker's data sheet; `fp8_flops` and `fp4_flops` None: without such units, so that weights are
    converted and multiplied in bf16. `sms`: streaming multiprocessors or compute units, `clock_mhz` their boost clock.
    `watts`: board power. `price_per_hour` in USD, None where the GPU is not commonly rented, with its source and date
    in `price_source`. `link_bytes_s`: what one GPU sends to the others of its node, by NVLink or else PCIe, as half of
    the peak in both directions.
    """

    name: str
    title: str
    memory_bytes: float
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


def _sheets() -> dict[str, Datasheet]:
    found = {}
    data = table("packer.twin", "datasheets.toml")
    for name, row in data["gpus"].items():
        memory, source = row.pop("memory_gib") * 2.0**30, row.pop("price_source", None)
        aliases = tuple(row.pop("aliases", ()))
        said = data["sources"][source] if source else None
        found[name] = Datasheet(name, memory_bytes=memory, price_source=said, aliases=aliases, **row)
    return found


GPUS = _sheets()


def datasheet(name: str) -> Datasheet:
    """The GPU of that name, as people type it: "h200", "A100-80GB", "NVIDIA L40S", "RTX 4090".

    Raises `UnknownNameError`: there is no such GPU; `ValidationError`: there are several, as of "a100".
    """
    if name in GPUS:
        return GPUS[name]
    wanted = _plain(name)
    exact = [each for each in GPUS.values() if wanted in _names(each)]
    if exact:
        return exact[0]
    words = re.findall(r"[a-z]+\d*|\d+[a-z]*", name.lower().removeprefix("nvidia "))
    once = 0 < len(words) == len(set(words))
    several = [each for each in GPUS.values() if once and set(words) <= set(re.split(r"[-_ ]", each.name))]
    if len(several) == 1:
        return several[0]
    if several:
        listed = ", ".join(each.name for each in several)
        raise ValidationError(f"Expected one GPU, got {name[:80]!r}, which may be any of {listed}.")
    raise UnknownNameError("GPU", name, GPUS)


def _names(sheet: Datasheet) -> set[str]:
    """All names of a GPU, plain."""
    return {_plain(each) for each in (sheet.name, sheet.title, *sheet.aliases)}


def _plain(name: str) -> str:
    """A name without case, separators and maker."""
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    for maker in ("nvidia", "geforce", "amd", "intel", "tesla"):
        text = text.removeprefix(maker)
    return text.removesuffix("gb")
