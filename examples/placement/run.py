"""Profile two models, place them on two servers, start a coordinator with the result, and borrow along it.

    python examples/placement/run.py [--out placement-demo] [--try-seconds 5]

All of it runs on the CPU of one machine, with SmolLM2 in two sizes of KV memory. Each step is a command of
``floodplain``, which is printed before it runs. Only the devices of one pair are started: a laptop has cores for two.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FLOODPLAIN = str(Path(sys.executable).with_name("floodplain"))
MODEL = "smollm2"
CHAT, WRITER = ("--kv-memory", "384MiB"), ("--kv-memory", "24MiB")
CHAT_LOAD = ("--max-input", "128", "--max-output", "64")
WRITER_LOAD = ("--max-input", "512", "--max-output", "150", "--ignore-eos")
GOALS = ("--goodput", "ttft:5000", "tpot:500", "--share", "0.8", "--threshold", "100MB")
"""Of the chat model: what a laptop can keep, and how much must be idle for it to be a producer."""
BURST = ("--request-rate", "8", "--num-prompts", "40")
START_S, LEND_S = 120.0, 60.0


def main() -> None:
    """Run the steps; the folder ``--out`` keeps what each of them wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("placement-demo"), help="folder for profiles and results")
    parser.add_argument("--try-seconds", type=float, default=5.0, help="how long a rate is tried")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    profile(args.out, args.try_seconds)
    pair = place(args.out)
    borrow(args.out, pair)


def profile(out: Path, try_s: float) -> None:
    """What the chat model can spare at the rate that it sustains, and what the writer needs in a burst."""
    search = (
        "--rates",
        "1",
        "16",
        "--rate-step",
        "3",
        "--try-seconds",
        str(try_s),
        "--tries",
        "3",
        "--confidence",
        "0.7",
    )
    floodplain("profile", "llm", MODEL, *CHAT, *CHAT_LOAD, *GOALS, *search, "--out", out / "chat.json")
    floodplain("profile", "step", MODEL, *WRITER, "-q", "--step-seconds", "20", "--out", out / "steps.json")
    steps = ("--steps", out / "steps.json", "--request-rate", "1", "--burst", "2", "--burst-seconds", "10")
    floodplain("profile", "swap", MODEL, *WRITER, *WRITER_LOAD, *steps, "--tries", "1", "--out", out / "writer.json")
    for name in ("chat", "steps", "writer"):
        floodplain("profile", "show", out / f"{name}.json", "-q", "--plot", out / f"{name}.png")


def place(out: Path) -> dict[str, Any]:
    """Which model is where, and the pair of the first server."""
    shutil.copy(HERE / "cluster.yaml", out)
    placement = out / "placement.json"
    floodplain("place", out / "cluster.yaml", "--out", placement, "--plot", out / "placement.png")
    pairs: list[dict[str, Any]] = json.loads(placement.read_text())["pairs"]
    if not pairs:
        raise SystemExit(
            "nothing is matched: no rate met the chat model's goals here; loosen GOALS, or wait for a quiet machine"
        )
    return pairs[0]


def borrow(out: Path, pair: dict[str, Any]) -> None:
    """Start the coordinator and both ends of the pair, and send the writer a burst."""
    ports = free_ports(3)
    coordinator, chat, writer = (f"http://127.0.0.1:{port}" for port in ports)
    store = f"sqlite:///{out}/leases.sqlite"
    with ExitStack() as running:
        start = lambda *words: running.enter_context(started(*words))  # noqa: E731
        start("coordinator", "--port", ports[0], "--store", store, "--placement", out / "placement.json")
        wait_for(f"{coordinator}/health", START_S)
        shared = ("--coordinator", coordinator, "-q")
        lends = ("--lend", "auto", "--lend-after", "2", "--profile", out / "chat.json")
        start("serve", MODEL, "--port", ports[1], *CHAT, *lends, "--device-name", pair["producer"], *shared)
        start("serve", MODEL, "--port", ports[2], *WRITER, "--swap", "peer", "--device-name", pair["consumer"], *shared)
        for server in (chat, writer):
            wait_for(f"{server}/health", START_S)
        wait_until_lent(coordinator, pair["producer"])
        floodplain(
            "bench", "serve", "--base-url", writer, "--model", MODEL, *BURST, *WRITER_LOAD, "--out", out / "burst.json"
        )
        floodplain("leases", "--coordinator", coordinator)
        print(f"\nSwapped by the writer, in bytes:\n{swapped(writer)}")


def floodplain(*words: object) -> None:
    """Run one command, and stop if it fails."""
    command = [str(word) for word in words]
    print(f"\n$ floodplain {shlex.join(command)}", flush=True)
    subprocess.run([FLOODPLAIN, *command], check=True)


@contextmanager
def started(*words: object) -> Iterator[None]:
    """A command that runs while the context is open."""
    command = [str(word) for word in words]
    print(f"\n$ floodplain {shlex.join(command)} &", flush=True)
    process = subprocess.Popen([FLOODPLAIN, *command])
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def wait_for(url: str, seconds: float) -> str:
    """What a server answers, as soon as it does."""
    deadline_s = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return str(reply.read().decode())
        except OSError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)


def wait_until_lent(coordinator: str, producer: str) -> None:
    """Until the producer has put bytes up: it does when it has been calm for --lend-after."""
    deadline_s = time.monotonic() + LEND_S
    while time.monotonic() < deadline_s:
        members = json.loads(wait_for(f"{coordinator}/v1/leases", START_S))["members"]
        if any(member["name"] == producer and member["offered_bytes"] for member in members):
            return
        time.sleep(0.1)
    raise SystemExit(f"{producer} has lent nothing for {LEND_S:g} s")


def swapped(server: str) -> str:
    """The lines of a server's metrics that say what was swapped where."""
    lines = wait_for(f"{server}/metrics", START_S).splitlines()
    return "\n".join(line for line in lines if line.startswith("floodplain_swap_bytes_total"))


def free_ports(count: int) -> list[int]:
    """Ports of this machine that nothing listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


if __name__ == "__main__":
    main()
