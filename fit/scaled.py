"""The step law of a calibrated server for another model and other GPUs."""

from __future__ import annotations

from packer.fit.dimensions import LORA_MODULES, ModelDimensions
from packer.fit.models import model_named
from packer.profile import ModelSpec, Profile
from packer.terms import LINEAR
from packer.twin.datasheets import Datasheet, datasheet


def scaled_law(model: ModelDimensions | ModelSpec, sheet: Datasheet, measured: Profile, n: int = 1) -> dict[str, float]:
    """The linear law of a calibrated profile, each term scaled to another model and `n` GPUs by what bounds it."""
    known = datasheet(measured.name.partition("/")[0])
    bandwidth = known.bandwidth_bytes_s / sheet.bandwidth_bytes_s
    weights = model.active_bytes if isinstance(model, ModelDimensions) else model.weights_bytes
    adapters = model.lora_bytes_per_rank / measured.model.lora_bytes_per_rank
    launches = adapters * bandwidth
    if isinstance(model, ModelDimensions):
        adapters = model.lora_bytes_on(n) / measured.model.lora_bytes_per_rank
        # Thread blocks of a layer's kernels run in parallel on the SMs: time scales as layers / (SMs × clock).
        slower = known.sms * known.clock_mhz / (sheet.sms * sheet.clock_mhz)
        layers = model_named(measured.model.repository or measured.model.name).layers
        modules = len(model.lora_modules or LORA_MODULES) / len(LORA_MODULES)
        launches = (model.layers / layers * slower) * modules
    scale = {
        "host": 1.0,
        "compute": weights / measured.model.weights_bytes * known.bf16_flops / sheet.bf16_flops / n,
        "kv": model.kv_bytes_per_token / measured.model.kv_bytes_per_token * bandwidth / n,
        "adapters": adapters * bandwidth,
        "launches": launches,
    }
    coefficients = measured.latency.coefficients
    scaled = {term.name: coefficients.get(term.name, 0.0) * scale[term.bound] for term in LINEAR}
    # base_ms is host time plus the time of reading weights; only the latter is scaled.
    host_ms = scaled["base_ms"] - 1e3 * measured.model.weights_bytes / known.bandwidth_bytes_s
    scaled["base_ms"] = max(0.0, host_ms) + 1e3 * model.weights_bytes / sheet.bandwidth_bytes_s / n
    return scaled
