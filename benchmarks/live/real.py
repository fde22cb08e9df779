"""Two real vLLM servers on the CPU behind nginx, with traffic, while packer moves, adds and removes adapters.

    uv run python benchmarks/live/real.py --launch vllm-cpu/launch.toml

The popularity of the adapters changes twice, each time with a plan that `packer live apply` carries out. Then
`packer live follow` runs: adapters are added to the fleet and taken away, one server is killed (SIGKILL) and started
again, and an adapter is added after that. Every request goes through nginx, open loop; Prometheus scrapes the servers
and packer. What was answered, and by when, is in real.json.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shutil
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from stack import Client, Follow, Stack, fleet_of, interruptible, models, packer_run, plan_of

from packer.io.workloads import write_workload
from packer.live.server import healthy
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
ADAPTERS = 12
EVERY_S = 15.0
PARTS = 16.0
"""The whole time has so many parts."""


async def drive(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Everything, on a clock whose unit is a part of the whole time."""
    names = [f"a{k:02d}" for k in range(ADAPTERS)]
    stack = Stack(folder)
    stack.write_files(options.launch)
    fleet = fleet_of(names, options.rate)
    half = ADAPTERS // 2
    placed = [
        [dict.fromkeys(range(half), 1.0), dict.fromkeys(range(half, ADAPTERS), 1.0)],
        [dict.fromkeys([0, 1, *range(half, half + 4)], 1.0), dict.fromkeys([2, 3, 4, 5, 10, 11], 1.0)],
        [{**dict.fromkeys(range(half), 1.0), 8: 0.5}, {**dict.fromkeys([6, 7, 9, 10, 11], 1.0), 8: 0.5}],
    ]
    plans = [folder / f"plan-{k}.json" for k in range(len(placed))]
    for path, own in zip(plans, placed, strict=True):
        plan_of(fleet, own).save(path)

    async def apply(k: int) -> int:
        words = ("live", "apply", str(plans[k]), "--servers", str(folder / "servers.toml"), "--yes")
        return await packer_run(*words, log=folder / "packer.log")

    def serve(now: list[str]) -> None:
        write_workload(fleet_of(now, options.rate), folder / "fleet.json", force=True)

    serve(names)
    follow = None
    with stack.around():
        for k in range(2):
            stack.start(k)
        await asyncio.to_thread(stack.wait, range(2))
        assert await apply(0) == 0
        client = Client(names, options.rate, options.seed, folder / "requests.jsonl")
        unit = options.minutes * 60.0 / PARTS
        traffic = asyncio.create_task(client.run(PARTS * unit))
        try:
            for k, part in ((1, 2.0), (2, 4.5)):
                await client.until(part * unit)
                client.hot([names[j] for j in placed[k][0]][:4])
                client.note(f"other hot adapters; apply plan {k}")
                client.note(f"applied, exit code {await apply(k)}")
            follow = Follow(plans[2], EVERY_S, "--fleet", str(folder / "fleet.json"))
            await client.until(7.5 * unit)
            names = await added(client, names, ["b00", "b01"], serve)
            await client.until(10.0 * unit)
            names = [name for name in names if name not in ("a10", "a11")]
            client.weights = {name: client.weights[name] for name in names}
            await asyncio.sleep(5.0)
            serve(names)
            client.note("adapters a10 and a11 are taken away")
            await client.until(12.0 * unit)
            lost = await models(stack.url(1))
            killed_s = client.now()
            again = asyncio.create_task(client.answer_again(lost))
            client.note(f"server 1 is killed; it held {', '.join(lost)}")
            await asyncio.to_thread(stack.end, 1)
            await client.until(12.4 * unit)
            stack.start(1)
            client.note("server 1 is started again")
            answers_s = await found(client, stack)
            await again
            await client.until(max(14.0 * unit, client.now() + 2 * EVERY_S))
            if answers_s is not None:
                names = await added(client, names, ["c00", "c01"], serve)
            await traffic
            client.note(f"follow ended with exit code {follow.end()}")
            held = [await models(stack.url(k)) for k in range(2)]
            return {
                "events": client.events, "held": held, "answers_again_s": again.result(),
                "found_again_after_s": answers_s, **judged(client, killed_s), "nginx": stack.refused(),
                "follow": follow.used, "prometheus": scraped(stack, client, killed_s),
            }  # fmt: skip
        finally:
            traffic.cancel()
            if follow is not None:
                follow.process.kill()


async def added(client: Client, names: list[str], more: list[str], serve: Any) -> list[str]:
    """Adapters come to the fleet; their requests begin two looks later."""
    serve([*names, *more])
    client.note(f"adapters {' and '.join(more)} are added")
    await asyncio.sleep(2.5 * EVERY_S)
    client.weights |= dict.fromkeys(more, 4.0)
    client.note(f"requests for {' and '.join(more)} begin")
    return [*names, *more]


async def found(client: Client, stack: Stack) -> float | None:
    """From the start of server 1 until packer says in Prometheus that it serves, s; None: not within 5 minutes."""
    began = client.now()
    while client.now() < began + 300.0:
        if healthy(stack.url(1)) and stack.asked("packer_live_server_ready").get("gpu-1"):
            client.note("packer has found server 1 again")
            return round(client.now() - began, 1)
        await asyncio.sleep(1.0)
    return None


def scraped(stack: Stack, client: Client, killed_s: float) -> dict[str, Any]:
    """What Prometheus saw."""
    span = f"[{int(client.now()) + 60}s]"
    return {
        "samples_of_up": stack.asked(f"count_over_time(up{span})"),
        "up_share": stack.asked(f"avg_over_time(up{span})"),
        "requests_of_servers": stack.asked(f"sum by (instance) (increase(vllm:request_success_total{span}))"),
        "requests_of_client_before_the_kill": sum(each.sent_s < killed_s for each in client.done),
        "alerts_s": stack.asked(f'sum by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}{span})) * 5'),
        "changes": stack.asked("packer_live_changes_total"),
        "loads": stack.asked("packer_live_loads_total"),
        "looks": stack.asked(f"changes(packer_live_last_look_timestamp_seconds{span})"),
        "ready_share": stack.asked(f"avg_over_time(packer_live_server_ready{span})"),
        "level": stack.asked("packer_live_level"),
        "itl_ms": stack.asked("packer_live_server_itl_ms"),
        "predicted_itl_ms": stack.asked("packer_live_server_predicted_itl_ms"),
    }


def judged(client: Client, killed_s: float) -> dict[str, Any]:
    """Errors, apart by what caused them: moves, or the killed server."""
    failed = [each for each in client.done if each.status != 200]
    of_kill = [each for each in failed if each.sent_s + each.took_s >= killed_s]
    flying = [each for each in of_kill if each.sent_s < killed_s]
    refused = [each for each in of_kill if each.sent_s >= killed_s]
    last = max((each.sent_s for each in refused), default=killed_s)
    return {
        "requests": len(client.done),
        "completed": len(client.done) - len(failed),
        "errors_before_the_kill": len(failed) - len(of_kill),
        "in_flight_on_the_killed_server": len(flying),
        "refused_after_the_kill": len(refused),
        "last_refused_after_s": round(last - killed_s, 1),
        "limit_s": 2 * EVERY_S,
        "median_s": float(np.median([each.took_s for each in client.done])),
        "errors": Counter(f"{each.status} {each.error}"[:120] for each in failed).most_common(8),
        "failed": [asdict(each) for each in failed[:50]],
    }


def main() -> None:
    """Run it, print and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=2.0, help="requests/s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("live-real"))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "real.json")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = asyncio.run(drive(options, folder))
    about = {
        "machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d"),
        "minutes": options.minutes, "rate": options.rate,
    }  # fmt: skip
    options.output.write_text(record_text({**about, **outcome}) + "\n", "utf-8")
    print(record_text({key: value for key, value in outcome.items() if key != "failed"}))


if __name__ == "__main__":
    interruptible(main)
