"""Servers on GPUs of other makers than NVIDIA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import yaml

from packer.errors import IncompatibleError
from packer.export.formats import FORMATS, export_plan
from packer.export.makers import AMD, GAUDI, INTEL, NVIDIA, maker
from packer.export.servers import Options
from packer.plan import Plan
from packer.twin.datasheets import GPUS

OPTIONS = Options(adapters_claim="adapters", sources={"a": "acme/a", "b": "acme/b"})
IMAGES = [name for name, kind in FORMATS.items() if kind.image]


def on(plan: Plan, *gpus: str) -> Plan:
    """The plan with a server on each of these GPUs."""
    bins = [
        replace(each, profile=replace(each.profile, gpu=replace(each.profile.gpu, name=gpu)))
        for each, gpu in zip(plan.bins, gpus, strict=True)
    ]
    return replace(plan, bins=tuple(bins))


def test_every_gpu_has_a_maker() -> None:
    """The maker is that of the data sheet, also under a driver's name; an unknown GPU counts as NVIDIA's."""
    named = {"NVIDIA": NVIDIA, "AMD": AMD, "Intel": INTEL}
    for sheet in GPUS.values():
        wanted = GAUDI if "gaudi" in sheet.name else named[sheet.title.split()[0]]
        assert {maker(sheet.title), maker(sheet.name)} == {wanted}
    assert maker("AMD Instinct MI300X OAM") == maker("AMD Radeon PRO W7900") == AMD
    assert maker("mine") == NVIDIA


@pytest.mark.parametrize("name", IMAGES)
@pytest.mark.parametrize("gpu", ["AMD MI300X", "Intel Gaudi 3"])
def test_other_makers_need_an_image(toy_plan: Callable[..., Plan], name: str, gpu: str) -> None:
    """A format with containers is refused without an image, and with one asks for the maker's own devices."""
    plan = on(toy_plan(("a", "b")), gpu, gpu)
    with pytest.raises(IncompatibleError, match=f"for {gpu}, got none.*--image"):
        export_plan(plan, name, OPTIONS)
    files = export_plan(plan, name, replace(OPTIONS, image="acme/vllm:1"))
    text = "".join(files.values())
    assert "acme/vllm" in text
    assert not any(word in text for word in ("nvidia.com/gpu", "driver: nvidia", "vllm-openai"))
    if name != "compose":
        assert text.count(maker(gpu).resource) == 2


def test_compose_hands_over_the_devices(toy_plan: Callable[..., Plan]) -> None:
    """Compose opens AMD's and Intel's devices to a service, uses Gaudi's runtime, and selects its GPUs by number."""

    def services(gpu: str) -> list[dict[str, object]]:
        files = export_plan(on(toy_plan(("a", "b")), gpu, gpu), "compose", Options(image="acme/vllm:1"))
        return list(yaml.safe_load(files["compose.yaml"])["services"].values())

    amd, gaudi, intel = (services(gpu)[1] for gpu in ("AMD MI300X", "Intel Gaudi 3", "Intel Arc Pro B60"))
    assert (amd["devices"], intel["devices"]) == (["/dev/kfd", "/dev/dri"], ["/dev/dri"])
    assert gaudi["runtime"] == "habana"
    variables = ("CUDA_VISIBLE_DEVICES=1", "HABANA_VISIBLE_DEVICES=1", "ZE_AFFINITY_MASK=1")
    for each, variable in zip((amd, gaudi, intel), variables, strict=True):
        assert variable in each["environment"]  # type: ignore[operator]
        assert "deploy" not in each


def test_one_image_is_for_one_maker(toy_plan: Callable[..., Plan]) -> None:
    """A plan on GPUs of two makers has no container image that fits both; start commands need none."""
    plan = on(toy_plan(("a", "b")), "Intel Gaudi 3", "NVIDIA L4")
    options = Options(image="acme/vllm:1", node_labels={"gaudi-3": ("pool", "gaudi")})
    with pytest.raises(IncompatibleError, match=r"GPUs of one maker.*Intel Gaudi 3, NVIDIA L4"):
        export_plan(plan, "compose", options)
    script = export_plan(plan, "vllm", options)["start.sh"]
    assert 'export HABANA_VISIBLE_MODULES="${HABANA_VISIBLE_MODULES:-0}"' in script
    assert 'export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-1}"' in script
    assert "unset CUDA_VISIBLE_DEVICES HABANA_VISIBLE_MODULES\n" in script
