"""What ``serve smollm2`` takes until its first answer, at rest and after a burst; several builds in turns.

Usage: run.py [--rounds N] [--rest SECONDS] FLOODPLAIN... (paths of the programs to compare, the baseline first)
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

BURST = 32
PROMPT = "The capital of France is"


def main() -> None:
    """Measure, and print a line of JSON for each round and the ratios of paired rounds at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rest", type=float, default=0.0, help="seconds between a burst and the last look; 0: no burst"
    )
    args = parser.parse_args()
    rounds: list[list[dict[str, Any]]] = []
    for _ in range(args.rounds):
        rounds.append([measure(program, args.rest) for program in args.programs])
        print(json.dumps(rounds[-1]), flush=True)
    for place, program in enumerate(args.programs[1:], 1):
        for column in ("cpu_s", "wall_s", "rest_mib"):
            ratios = [one[place][column] / one[0][column] for one in rounds]
            print(f"{program}: {column} x{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure(program: str, rest_s: float) -> dict[str, Any]:
    """One start, from the command to the first answer."""
    begin_s = time.monotonic()
    command = [program, "serve", "smollm2", "--port", "0", "--format", "json", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            text = ask(url, 8)
            facts = {"wall_s": time.monotonic() - begin_s, "cpu_s": cpu_s(process.pid), "text": text}
            facts["rest_mib"] = resident_mib(process.pid)
            if rest_s:
                with ThreadPoolExecutor(BURST) as threads:
                    list(threads.map(lambda number: ask(url, 64, f"{number} " * 200), range(BURST)))
                facts["burst_mib"] = resident_mib(process.pid)
                time.sleep(rest_s)
                facts["after_mib"] = resident_mib(process.pid)
            return facts
        finally:
            process.send_signal(signal.SIGINT)


def ask(url: str, max_tokens: int, prompt: str = PROMPT) -> str:
    """The text of one greedy answer."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600.0, trust_env=False)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


def cpu_s(pid: int) -> float:
    """Seconds of all threads of a process, in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> int:
    """Resident memory of a process, shared memory included."""
    rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(row.split()[1]) for row in rows if row.startswith("Rss:")) // 1024


if __name__ == "__main__":
    main()
