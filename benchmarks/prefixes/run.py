"""What is a prefix worth that the device forgot and swap space kept? See README.md."""

from __future__ import annotations

import argparse
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from floodplain import LLM, SamplingParams
from floodplain.engine.build import kv_bytes_per_token
from floodplain.model.weights.open_model import open_model
from floodplain.observe.strict_json import save_result

HERE = Path(__file__).resolve().parent
MODEL = "smollm2"
DTYPE = "bfloat16"
QUESTION_TOKENS = 16
"""What follows the prefix, and is new in every request."""
FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)

AGAIN, DEVICE = "computed again", "device"
PLACES: dict[str, dict[str, object]] = {
    AGAIN: {"swap": "none", "policy": "fcfs"},
    "host, emulated-pcie5": {"swap": "host", "hardware": "emulated-pcie5"},
    "host, emulated-nvlink4": {"swap": "host", "hardware": "emulated-nvlink4"},
    "host, this machine's memory": {"swap": "host"},
}
"""Where the prefix is when it is asked for again."""


@dataclass(frozen=True, slots=True)
class Row:
    """Repeated requests with one length of prefix, from one place; ``device`` if it was never evicted.

    Of each repeat: the TTFT, how much of the prompt was not computed, and how much of that came over the link.
    """

    place: str
    num_prefix_tokens: int
    ttft_s: list[float]
    cached_tokens: list[int]
    fetched_tokens: list[int]

    def is_from_there(self) -> bool:
        """Whether in every repeat all of the prefix came from the place, and nothing from elsewhere."""
        num_cached = 0 if self.place == AGAIN else self.num_prefix_tokens
        num_fetched = 0 if self.place in (AGAIN, DEVICE) else self.num_prefix_tokens
        return {*self.cached_tokens} == {num_cached} and {*self.fetched_tokens} == {num_fetched}


class Bench:
    """An engine whose pool holds two prompts of the longest kind, and new prompts."""

    def __init__(self, flags: dict[str, object], longest: int, seed: int) -> None:
        shape = open_model(MODEL).config
        kv_memory = 2 * (longest + 64) * kv_bytes_per_token(shape, DTYPE)
        swap = {"swap_memory": 6 * kv_memory} if flags["swap"] == "host" else {}
        self.llm = LLM(MODEL, dtype=DTYPE, kv_memory=kv_memory, max_model_len=longest + 64, seed=seed, **flags, **swap)
        self._dice = Random(seed)
        self._token_bytes = kv_bytes_per_token(shape, DTYPE)

    def tokens(self, count: int) -> list[int]:
        """A text that has nothing in common with any other."""
        return [self._dice.randrange(1000, 40_000) for _ in range(count)]

    def ask(self, prompt: list[int]) -> tuple[float, int, int]:
        """(TTFT in seconds, prompt tokens that were not computed, those that came from swap space), alone."""
        before = self._num_bytes_in()
        output = self.llm.generate([{"prompt_token_ids": prompt}], FIRST_TOKEN, use_tqdm=False)[0]
        assert output.lifecycle is not None and output.lifecycle.ttft_s is not None
        num_fetched = (self._num_bytes_in() - before) // self._token_bytes
        return output.lifecycle.ttft_s, output.num_cached_tokens, num_fetched

    def _num_bytes_in(self) -> int:
        return self.llm.stats().swap_bytes.get(("in", "host"), 0)

    def flood(self) -> None:
        """Other prompts, until nothing of what was before is on the device. Short steps let copies keep up."""
        num_tokens = self.llm.engine.loop.state.ledger.num_blocks * 16
        for _ in range(2 * num_tokens // 256):
            self.ask(self.tokens(256))


def measure(place: str, lengths: list[int], num_repeats: int, seed: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """(all lengths from one place, and from the device beside computing again; the links of the engine)."""
    bench, rows = Bench(PLACES[place], max(lengths), seed), []
    bench.ask(bench.tokens(max(lengths)))  # warm
    for length in lengths:
        far: list[tuple[float, int, int]] = []
        near: list[tuple[float, int, int]] = []
        for _ in range(num_repeats):
            prefix = bench.tokens(length)
            bench.ask(prefix + bench.tokens(QUESTION_TOKENS))
            near.append(bench.ask(prefix + bench.tokens(QUESTION_TOKENS)))
            bench.flood()
            far.append(bench.ask(prefix + bench.tokens(QUESTION_TOKENS)))
        rows.append(Row(place, length, *map(list, zip(*far, strict=True))))
        print(f"{place}, {length}: {median(rows[-1].ttft_s):.3f} s", file=sys.stderr, flush=True)
        if place == AGAIN:
            rows.append(Row(DEVICE, length, *map(list, zip(*near, strict=True))))
    links = [dict(link) for link in bench.llm.engine.links]
    bench.llm.close()
    return rows, links


def format_table(rows: list[Row]) -> str:
    """Median TTFT by length and place, the range of repeats, and the gain over computing again."""
    lengths = list(dict.fromkeys(row.num_prefix_tokens for row in rows))
    by_key = {(row.place, row.num_prefix_tokens): row for row in rows}
    lines = ["| where the prefix is | " + " | ".join(f"{length} tokens" for length in lengths) + " |"]
    lines.append("|---" * (len(lengths) + 1) + "|")
    for place in dict.fromkeys(row.place for row in rows):
        cells = []
        for length in lengths:
            row, base = by_key[place, length], by_key[AGAIN, length]
            ms, gain = sorted(1e3 * ttft_s for ttft_s in row.ttft_s), median(base.ttft_s) / median(row.ttft_s)
            cells.append(f"{median(ms):.0f} ms ({ms[0]:.0f} to {ms[-1]:.0f}), {gain:.1f}x")
        lines.append(f"| {place} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure every place, end if it was another one, print the table, keep every repeat."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 1984])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    args = parser.parse_args()
    rows, links = [], {}
    for place in PLACES:
        more, links[place] = measure(place, args.lengths, args.repeats, args.seed)
        rows += more
    for row in rows:
        if not row.is_from_there():
            came = f"cached {row.cached_tokens}, fetched {row.fetched_tokens}"
            sys.exit(f"{row.place}, {row.num_prefix_tokens} tokens: the prefix was elsewhere ({came})")
    command = "benchmarks/prefixes/run.py " + " ".join(sys.argv[1:])
    machine = f"{platform.system()} {platform.machine()}"
    result = {"command": command, "platform": machine, "links": links, "rows": [asdict(row) for row in rows]}
    save_result(args.out, result)
    print(format_table(rows))


if __name__ == "__main__":
    main()
