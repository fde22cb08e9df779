"""GPUs as their makers describe them, for estimated profiles."""

from __future__ import annotations

from dataclasses import dataclass

from packer.errors import UnknownNameError


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


_GIB = 2.0**30

GPUS = {
    sheet.name: sheet
    for sheet in (
        Datasheet("a10", "NVIDIA A10", 22.1 * _GIB, 0.600e12, 125e12, 0.75),
        Datasheet("a100-40gb", "NVIDIA A100 40GB", 39.4 * _GIB, 1.555e12, 312e12, 1.3, 300e9),
        Datasheet("a100-80gb", "NVIDIA A100 80GB", 79.2 * _GIB, 2.039e12, 312e12, 1.8, 300e9),
        Datasheet("b200", "NVIDIA B200", 178.4 * _GIB, 8.0e12, 2250e12, 5.5, 900e9),
        Datasheet("gh200-96gb", "NVIDIA GH200 96GB", 94.5 * _GIB, 4.0e12, 989e12, 2.0, 450e9),
        Datasheet("h100-64gb", "NVIDIA H100 64GB", 64.0 * _GIB, 2.0e12, 989e12, None, 450e9),
        Datasheet("h100-80gb", "NVIDIA H100 SXM 80GB", 79.2 * _GIB, 3.35e12, 989e12, 2.9, 450e9),
        Datasheet("h100-nvl-94gb", "NVIDIA H100 NVL 94GB", 93.1 * _GIB, 3.9e12, 835e12, 2.8, 300e9),
        Datasheet("h100-pcie-80gb", "NVIDIA H100 PCIe 80GB", 79.2 * _GIB, 2.0e12, 756e12, 2.4),
        Datasheet("h200-141gb", "NVIDIA H200 141GB", 139.8 * _GIB, 4.8e12, 989e12, 3.6, 450e9),
        Datasheet("l4", "NVIDIA L4", 22.0 * _GIB, 0.300e12, 121e12, 0.6),
        Datasheet("l40s", "NVIDIA L40S", 44.4 * _GIB, 0.864e12, 362e12, 1.0),
        Datasheet("mi300x", "AMD MI300X", 191.9 * _GIB, 5.3e12, 1307e12, 2.5, 448e9),
        Datasheet("rtx4090", "NVIDIA GeForce RTX 4090", 23.5 * _GIB, 1.008e12, 165e12, 0.5),
    )
}


def datasheet(name: str) -> Datasheet:
    """The GPU of that name; raises `UnknownNameError`."""
    if name not in GPUS:
        raise UnknownNameError("GPU", name, GPUS)
    return GPUS[name]
