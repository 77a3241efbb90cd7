"""CPU time in user mode until ``floodplain --help`` ends and until a server of a tiny model says that it is ready.

Usage: imports.py [--rounds N] [--out FILE] FLOODPLAIN... (paths of the programs to compare, the baseline first)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path

SERVE = ("serve", "dummy:tiny-llama", "--port", "0", "--format", "json", "--quiet")


def main() -> None:
    """Measure in turns; print the median and the range of each program, and write all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("imports.json"))
    args = parser.parse_args()
    for program in args.programs:  # the first start writes bytecode and compiles kernels
        user_s(program, "--help"), user_s(program, *SERVE)
    rounds = [[(user_s(one, "--help"), user_s(one, *SERVE)) for one in args.programs] for _ in range(args.rounds)]
    result = [
        {"help_s": [one[place][0] for one in rounds], "serve_s": [one[place][1] for one in rounds]}
        for place in range(len(args.programs))
    ]
    for program, columns in zip(args.programs, result, strict=True):
        for name, all_s in columns.items():
            print(f"{program} {name}: {statistics.median(all_s):.2f} ({min(all_s):.2f} to {max(all_s):.2f})")
    args.out.write_text(json.dumps(result) + "\n")


def user_s(program: str, *arguments: str) -> float:
    """Seconds of all threads in user mode, until the end or, of a server, until its first line."""
    with subprocess.Popen([program, *arguments], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if arguments == SERVE:
            assert process.stdout.readline(), "the server ended"
            process.kill()
        process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
    if arguments != SERVE and status != 0:
        raise SystemExit(f"{program} {' '.join(arguments)} failed")
    return usage.ru_utime


if __name__ == "__main__":
    main()
