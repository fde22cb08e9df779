"""Data sheets of GPUs, for estimated profiles."""

from __future__ import annotations

from dataclasses import dataclass

from packer.errors import UnknownNameError
from packer.io.shipped import table


@dataclass(frozen=True, slots=True)
class Datasheet:
    """One GPU.

    `memory_bytes` is what CUDA or ROCm shows as total. `bandwidth_bytes_s` and `bf16_flops` (dense) are peaks
    of the maker's data sheet. `price_per_hour` is a rough on-demand cloud price in USD, None where the GPU is
    not commonly rented. `link_bytes_s`: what one GPU sends to the others of its node, by NVLink or else PCIe, as half
    of the peak in both directions.
    """

    name: str
    title: str
    memory_bytes: float
    bandwidth_bytes_s: float
    bf16_flops: float
    price_per_hour: float | None = None
    link_bytes_s: float = 32e9


GPUS = {
    name: Datasheet(name, memory_bytes=row.pop("memory_gib") * 2.0**30, **row)
    for name, row in table("packer.twin", "datasheets.toml").items()
}


def datasheet(name: str) -> Datasheet:
    """The GPU of that name; raises `UnknownNameError`."""
    if name not in GPUS:
        raise UnknownNameError("GPU", name, GPUS)
    return GPUS[name]
