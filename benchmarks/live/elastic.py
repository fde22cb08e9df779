"""One real vLLM server of two runs; traffic rises and falls, and `packer live follow` starts and stops the other one.

    uv run python benchmarks/live/elastic.py --launch vllm-cpu/launch.toml

By the commands in the file of servers. A server holds about 10 requests/s within the goal, by the twin; 3 requests/s
come at first, 14 for eight minutes, then 3 again. What was answered, and what ran when, is in elastic.json.
"""

from __future__ import annotations

import argparse
import asyncio
import platform
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from stack import Client, Follow, Stack, fleet_of, interruptible, models, packer_run, plan_of

from packer.live.server import healthy
from packer.testing.records import record_text

HERE = Path(__file__).resolve().parent
EVERY_S, LOW, HIGH = 15.0, 3.0, 14.0
GOAL = "p95_ttft_ms=30,mean_itl_ms=100"
RISES_S, FALLS_S = 60.0, 540.0


async def drive(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole run, with what was answered."""
    names = [f"a{k:02d}" for k in range(8)]
    stack = Stack(folder)
    stack.write_files(options.launch, "start", "stop")
    plan_of(fleet_of(names, LOW, GOAL), [dict.fromkeys(range(8), 1.0)]).save(folder / "plan.json")
    follow = None
    with stack.around():
        stack.start(0)
        await asyncio.to_thread(stack.wait, [0])
        given = ("live", "apply", str(folder / "plan.json"), "--servers", str(folder / "servers.toml"), "--yes")
        assert await packer_run(*given, log=folder / "packer.log") == 0
        client = Client(names, LOW, options.seed, folder / "requests.jsonl")
        traffic = asyncio.create_task(client.run(options.minutes * 60.0))
        try:
            follow = Follow(folder / "plan.json", EVERY_S)
            watching = asyncio.create_task(watch(client, stack))
            await client.until(RISES_S)
            client.rate = HIGH
            client.note(f"{HIGH:g} requests/s")
            await client.until(FALLS_S)
            client.rate = LOW
            client.note(f"{LOW:g} requests/s")
            await traffic
            watching.cancel()
            client.note(f"follow ended with exit code {follow.end()}")
            failed = [each for each in client.done if each.status != 200]
            took = np.array([each.took_s for each in client.done])
            return {
                "events": client.events, "held": await models(stack.url(0)), "requests": len(client.done),
                "completed": len(client.done) - len(failed), "median_s": float(np.median(took)),
                "errors": Counter(f"{each.status} {each.error}"[:120] for each in failed).most_common(8),
                "nginx": stack.refused(), "follow": follow.used,
                "loads": stack.asked("packer_live_loads_total"), "changes": stack.asked("packer_live_changes_total"),
            }  # fmt: skip
        finally:
            traffic.cancel()
            if follow is not None:
                follow.process.kill()


async def watch(client: Client, stack: Stack) -> None:
    """Note when the second server starts to answer, what it holds, and when it has ended."""
    before: list[str] | None = None
    while True:
        up = await asyncio.to_thread(healthy, stack.url(1))
        held = await models(stack.url(1)) if up else None
        if held != before:
            client.note("server 1 " + ("does not answer" if held is None else f"holds {', '.join(held) or 'none'}"))
        before = held
        await asyncio.sleep(1.0)


def main() -> None:
    """Run it, print and write what came out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--launch", required=True, type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("live-elastic"))
    parser.add_argument("-o", "--output", type=Path, default=HERE / "elastic.json")
    options = parser.parse_args()
    folder = options.folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    outcome = asyncio.run(drive(options, folder))
    about = {"machine": platform.processor() or platform.machine(), "date": time.strftime("%Y-%m-%d")}
    options.output.write_text(record_text({**about, "minutes": options.minutes, **outcome}) + "\n", "utf-8")
    print(record_text(outcome))


if __name__ == "__main__":
    interruptible(main)
