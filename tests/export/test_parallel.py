"""Tensor-parallel and data-parallel sizes that each format writes, beside the GPUs that it asks for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest

from packer.errors import IncompatibleError
from packer.export.formats import FORMATS
from packer.plan import Plan

STARTING = [name for name, kind in FORMATS.items() if kind.engine is not None]
TENSOR = r"(?:tensor[-_]parallel[-_]size|tensorParallelSize|tp-size|\btensor)\W+(\d+)"
DATA = r"data[-_]parallel[-_]size\W+(\d+)"
NUMBER = r"(?:nvidia\.com/gpu|requestGPU|\bgpu): \"?(\d+)"
DEVICES = r"(?:CUDA_VISIBLE_DEVICES(?:\": \"|:-)|device_ids: \[)([\d,\" ]+)"


def sizes(text: str, pattern: str) -> list[int]:
    """The distinct sizes that the files of one server give; [1], the default of every engine, if they give none."""
    return sorted({int(size) for size in re.findall(pattern, text)}) or [1]


@pytest.mark.parametrize("name", STARTING)
@pytest.mark.parametrize(("tensor", "data"), [(1, 1), (4, 1), (1, 4), (2, 2)])
def test_parallel_sizes_are_the_gpus_of_the_pod(
    toy_plan: Callable[..., Plan], exported: Callable[[Plan, str], dict[str, str]], name: str, tensor: int, data: int
) -> None:
    """Tensor size times data size is the number of GPUs asked for; formats without data-parallel ranks refuse them."""
    plan = toy_plan(("a",), gpus=1)
    profile = plan.bins[0].profile
    engine = replace(profile.engine, tensor_parallel_size=tensor, data_parallel_size=data)
    plan = replace(plan, bins=(replace(plan.bins[0], profile=replace(profile, engine=engine)),))
    if data > 1 and FORMATS[name].ranks_apart:
        with pytest.raises(IncompatibleError, match="does not start servers of several data-parallel ranks"):
            exported(plan, name)
        return
    text = "\n".join(exported(plan, name).values())
    written = sizes(text, TENSOR), sizes(text, DATA)
    assert written == ([tensor], [data])
    if name == "ray":  # Ray reserves the GPUs of the engine's own sizes
        return
    gpus = {int(number) for number in re.findall(NUMBER, text)}
    gpus |= {len(numbers.split(",")) for numbers in re.findall(DEVICES, text)}
    assert gpus == {prod(written[0] + written[1])}
