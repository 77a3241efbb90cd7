"""What does the plug-in's view of vLLM cost in each step? Over fake requests and blocks: needs no vLLM.

Run ``python -m benchmarks.vllm.step_cost``. Each row is a load; every step gives each running request a token. The view
must cost at most ``BOUND_MS`` at the median, however many requests wait; the decision that follows is shown beside it.
Loads are measured in turns, in several rounds, and the bound is for the quietest round of each: what else runs on the
same machine can only add. The median over all rounds is shown, too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence, Set
from random import Random
from statistics import median, quantiles
from typing import Any

from floodplain.core.cache_groups import CacheGroup
from floodplain.core.request import SeqId
from floodplain.core.view import Demand, Prices
from floodplain.plugins.vllm.books import Tables
from floodplain.plugins.vllm.exclusive import ExclusiveCounts
from floodplain.plugins.vllm.prefix_index import NOTHING, Found, PrefixIndex
from floodplain.plugins.vllm.rows import Limits
from floodplain.plugins.vllm.settings import PluginSettings
from floodplain.plugins.vllm.sorted_queue import SortedQueue
from floodplain.plugins.vllm.swap_controller import SwapController
from floodplain.plugins.vllm.views import Present, ViewMaker
from floodplain.policy.registry import make_policy

BOUND_MS = 0.5
BLOCK_TOKENS, BLOCK_BYTES = 16, 2**19
NUM_RUNNING, NUM_OWN_BLOCKS = 256, 250
LIMITS = Limits(num_blocks=100_000, groups=(CacheGroup(BLOCK_TOKENS),), max_batched_tokens=8192,
                max_num_seqs=NUM_RUNNING, max_model_len=32_768)  # fmt: skip
LOADS = ((0, 0), (1_000, 0), (10_000, 0), (1_000, 625), (10_000, 625))
"""Waiting requests, and blocks of a prefix that they and all running requests share."""


class Block:
    """As vLLM's."""

    __slots__ = ("block_id", "is_null", "ref_cnt")

    def __init__(self, block_id: int, ref_cnt: int = 1) -> None:
        self.block_id, self.ref_cnt, self.is_null = block_id, ref_cnt, False


class FakeRequest:
    """As vLLM's, as far as the view reads it."""

    def __init__(self, number: int, num_prompt: int, hashes: list[bytes]) -> None:
        self.request_id, self.num_prompt_tokens, self.block_hashes = f"request-{number}", num_prompt, hashes
        self._all_token_ids = [7] * num_prompt
        self.num_computed_tokens, self.num_output_placeholders, self.max_tokens = 0, 0, 20_000
        self.priority, self.arrival_time = 0, float(number)

    @property
    def num_tokens(self) -> int:
        """Of the prompt and the output."""
        return len(self._all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Of the output."""
        return len(self._all_token_ids) - self.num_prompt_tokens

    def run(self) -> None:
        """It gets a token."""
        self.num_computed_tokens = len(self._all_token_ids)
        self._all_token_ids.append(7)


class FakeBlocks:
    """Block tables, and the blocks of a prefix that are found by content."""

    def __init__(self, prefix: Sequence[Block], hashes: Sequence[bytes]) -> None:
        self._by_hash = dict(zip(hashes, prefix, strict=True))
        self.by_request: dict[str, list[Block]] = {}
        self._num_given = len(prefix)
        self._exclusive, self._prefixes = ExclusiveCounts(), PrefixIndex(self._by_hash.get)

    def give(self, request: FakeRequest, num_blocks: int) -> None:
        """So many more blocks for a request, which are cached when they are full."""
        blocks = [Block(self._num_given + index) for index in range(num_blocks)]
        self._num_given += num_blocks
        self.by_request.setdefault(request.request_id, []).extend(blocks)
        self._prefixes.note_cached(b"%d" % self._num_given)

    def count_free(self) -> int:
        """See ``rows.Blocks``."""
        return max(0, LIMITS.num_blocks - self._num_given)

    def tables(self, request_id: str) -> Tables:
        """See ``rows.Blocks``."""
        return [self.by_request.get(request_id, ())]

    def count_exclusive(self, seq_id: SeqId, tables: Tables) -> int:
        """See ``rows.Blocks``."""
        return self._exclusive.count(seq_id, tables[0])

    def take_changed(self) -> Set[SeqId]:
        """See ``rows.Blocks``."""
        return self._exclusive.take_recounted() | self._prefixes.take_forgotten()

    def find_prefix(self, seq_id: SeqId, request: Any, most: int) -> Found:
        """See ``rows.Blocks``."""
        return self._prefixes.find(seq_id, request.block_hashes, min(most, len(request.block_hashes))) or NOTHING

    def watch_only(self, holding: Set[SeqId], absent: Set[SeqId]) -> None:
        """See ``rows.Blocks``."""
        self._exclusive.keep_only(holding)
        self._prefixes.keep_only(absent)


def measure(policy_name: str, num_waiting: int, num_prefix: int, num_steps: int) -> tuple[list[float], list[float]]:
    """Milliseconds of each step's view, and of its decision."""
    hashes = [b"prefix-%d" % index for index in range(num_prefix)]
    prefix = [Block(index, NUM_RUNNING) for index in range(num_prefix)]
    controller, blocks = SwapController(PluginSettings(), BLOCK_BYTES, LIMITS.groups, 1), FakeBlocks(prefix, hashes)
    policy = make_policy(policy_name)
    sorted_queue = SortedQueue(controller.roster, policy.waiting_key, policy.waiting_window)
    views = ViewMaker(LIMITS, blocks, controller, sorted_queue)
    shared, own = num_prefix * BLOCK_TOKENS, NUM_OWN_BLOCKS * BLOCK_TOKENS
    requests = [FakeRequest(number, shared + own - number % BLOCK_TOKENS, hashes) for number in range(NUM_RUNNING)]
    running = tuple([controller.roster.arrive(request, 0.0) for request in requests])  # type: ignore[arg-type]
    for request in requests:
        blocks.by_request[request.request_id] = list(prefix)
        blocks.give(request, NUM_OWN_BLOCKS)
        request.run()
    waiting = [FakeRequest(NUM_RUNNING + number, shared + 500, hashes) for number in range(num_waiting)]
    for request in waiting:
        controller.roster.arrive(request, 0.0)  # type: ignore[arg-type]
    sorted_queue.refresh({request.request_id: request for request in waiting}, lambda _: True)  # type: ignore[misc]
    views_ms, decisions_ms = [], []
    for step in range(num_steps):
        now = time.perf_counter()
        for one in running:
            one.note_tokens(now)
        begin_s = time.perf_counter()
        sorted_queue.refresh({}, lambda _: True)
        view = views.view(step, Present(running), is_open=True, prices=Prices(), demand=Demand(), completion_step=-1)
        seen_s = time.perf_counter()
        policy.decide(view, now, Random(0))
        views_ms.append(1e3 * (seen_s - begin_s))
        decisions_ms.append(1e3 * (time.perf_counter() - seen_s))
        for request in requests:
            if request.num_tokens > len(blocks.by_request[request.request_id]) * BLOCK_TOKENS:
                blocks.give(request, 1)
            request.run()
    return views_ms[5:], decisions_ms[5:]  # the first step makes every row


def show(load: tuple[int, int], rounds: Sequence[tuple[list[float], list[float]]]) -> float:
    """Print the row of a load, and return the median of its quietest round."""
    quietest = min(median(views_ms) for views_ms, _ in rounds)
    views_ms = [view_ms for views_ms, _ in rounds for view_ms in views_ms]
    decision_ms = median(decision_ms for _, decisions_ms in rounds for decision_ms in decisions_ms)
    cells = f"{quietest:.2f} | {median(views_ms):.2f} | {quantiles(views_ms, n=100)[98]:.2f} | {decision_ms:.2f}"
    print(f"| {NUM_RUNNING} | {load[0]:,} | {load[1]} | {cells} |")
    return quietest


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="paced")
    parser.add_argument("--steps", type=int, default=60, help="of a round")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rounds = [[measure(args.policy, *load, args.steps) for load in LOADS] for _ in range(args.rounds)]
    print("| running | waiting | shared prefix, blocks | view ms p50, quietest round | p50 | p99 | decision ms p50 |")
    print("|---|---|---|---|---|---|---|")
    slowest = max([show(load, of_load) for load, of_load in zip(LOADS, zip(*rounds, strict=True), strict=True)])
    print(f"\nview: {slowest:.2f} ms at most, by medians of quietest rounds; the bound is {BOUND_MS} ms")
    return int(slowest > BOUND_MS)


if __name__ == "__main__":
    sys.exit(main())
