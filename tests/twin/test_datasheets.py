"""Data sheets of GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from packer.errors import FileFormatError, UnknownNameError, ValidationError
from packer.operate.project import profile_for
from packer.twin.datasheets import GPUS, datasheet


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("A10G", "a10g"), ("a10", "a10"), ("MI300", "mi300x"),
        ("h200", "h200-141gb"), ("A100-80GB", "a100-80gb"), ("NVIDIA L40S", "l40s"), ("RTX 4090", "rtx4090"),
        ("h100-sxm5-80gb", "h100-80gb"), ("mi300x", "mi300x"), ("b60", "intel-b60"), ("H100-NVL", "h100-nvl-94gb"),
        ("rtx_pro_6000", "rtx-pro-6000"), ("GB300", "gb300"), ("l4", "l4"), ("Gaudi3", "gaudi-3"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("h200 nvl", "h200-nvl-141gb"), ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA B300 SXM6 AC", "b300"), ("l40s 48GB", "l40s"), ("A6000", "rtx-a6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"), ("RTX 6000 Ada Generation", "rtx6000-ada"),
    ],
)  # fmt: skip
def test_gpus_are_found_as_people_type_them(said: str, name: str) -> None:
    """Case, separators, maker and the memory of a GPU that exists once may be left out."""
    assert datasheet(said).name == name


@pytest.mark.parametrize("said", ["a100", "H100", "gaudi", "RTX 6000", "a100 sxm", "a100 pcie"])
def test_a_name_of_several_gpus_asks_which(said: str) -> None:
    """A name that fits several GPUs is refused with all of them."""
    with pytest.raises(ValidationError, match=r"Expected one GPU, got .*, which may be any of .*, "):
        datasheet(said)


def test_unknown_gpus_are_refused() -> None:
    """Another GPU's name with a suffix is not taken for it."""
    for said in ("l40x", "h100-80g", "v100", "", "h200 h200", "sxm", "blackwell", "nvidia", "h100 nvl 80gb"):
        with pytest.raises(UnknownNameError):
            datasheet(said)


def test_another_gpu_is_given_by_its_data_sheet(tmp_path: Path) -> None:
    """A GPU that is not known, whatever its file's name, has an estimate with the bands of a data sheet alone; a wrong
    value is named."""
    path, clock = tmp_path / "h100-80gb.toml", "clock_mhz = 2495\n"
    given = 'title = "AMD W7900"\nmemory_gib = 47.9\nbandwidth_bytes_s = 864e9\nbf16_flops = 1e14\nsms = 96\nwatts=9\n'
    path.write_text(given + clock)
    found = profile_for("meta-llama/Llama-3.1-8B-Instruct", str(path), {})
    assert (found.gpu.name, found.calibrated) == ("AMD W7900", False)
    assert "data sheet alone" in found.provenance["method"]
    for text, said in (
        ("", "clock_mhz': this key is missing"),
        ("clock_mhz = 0", "clock_mhz to be .* got 0"),
    ):
        path.write_text(given + text)
        with pytest.raises(FileFormatError, match=said):
            datasheet(str(path))
    path.write_text("[model]\n[gpu]\n[engine]\n")
    with pytest.raises(FileFormatError, match=r"expected a data sheet\. This is a profile: --profile takes it"):
        datasheet(str(path))


def test_sheets_make_sense() -> None:
    """Peaks are ordered by width, every GPU has a power, and each price has a source that says when."""
    for sheet in GPUS.values():
        assert sheet.bf16_flops <= (sheet.fp8_flops or sheet.bf16_flops) <= (sheet.fp4_flops or 1e18)
        assert min(sheet.watts, sheet.sms, sheet.clock_mhz) > 10
        assert (sheet.price_per_hour is None) == (sheet.price_source is None)
        assert sheet.price_source is None or re.search(r"\b20[0-9]{2}-[0-9]{2}\b", sheet.price_source)
