"""KV kept over tool calls, in vLLM itself: later turns of a session are restored from swap space, with equal tokens.

On a virtual clock, so that prices, and what pays, do not depend on this machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm import LLM, SamplingParams

from benchmarks.vllm.measure import Work, make_clock, watch
from floodplain.core.backups import Backup
from floodplain.core.errors import UserError
from floodplain.core.hashing import BlockKey
from floodplain.core.tiers import Tier
from floodplain.plugins.vllm.saved_prefixes import SavedPrefixes
from floodplain.plugins.vllm.swap_controller import SwapController
from tests.vllm.engines import (
    BLOCK_TOKENS,
    Load,
    close,
    controller_of,
    drive,
    make_load,
    make_ours,
    make_stock,
    scheduler_of,
    serve_all_calmly,
)
from tests.vllm.storm import StormPolicy

NUM_BLOCKS, NUM_OUTPUT = 25, 30
TEXTS = [
    [Random(f"turn {turn}").randrange(10, 40_000) for _ in range(number)] for turn, number in enumerate((170, 40, 9))
]
"""What each turn of a session adds to all that was said."""

FIRST = make_load(seed=7, num_requests=8, num_common=100)
NUMBERS = count()


@dataclass
class Served:
    """An engine under test, and what its scheduler did."""

    llm: LLM
    work: Work
    clock: Any = None

    def ask(self, prompt: Sequence[int], num_output: int = NUM_OUTPUT, **names: Any) -> tuple[list[int], int]:
        """Serve one request; return its tokens, and how many tokens of its prompt were not computed."""
        before, salt = self.work.num_computed_tokens, names.pop("salt", None)
        text: Any = {"prompt_token_ids": list(prompt)} | ({"cache_salt": salt} if salt else {})
        params = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        arrival_s = None if self.clock is None else self.clock.wall_s()
        self.llm.llm_engine.add_request(f"{next(NUMBERS)}", text, params, arrival_time=arrival_s, **names)
        ended = []
        while self.llm.llm_engine.has_unfinished_requests():
            ended += [output for output in self.llm.llm_engine.step() if output.finished]
        [output] = ended
        num_computed = self.work.num_computed_tokens - before
        return list(output.outputs[0].token_ids), len(prompt) + num_output - 1 - num_computed

    def evict(self) -> None:
        """Serve others until nothing of earlier requests is in vLLM's prefix cache."""
        for _ in range(4):
            self.ask([next(NUMBERS)] * 270, 20)

    def talk(self, **names: Any) -> tuple[list[list[int]], list[int]]:
        """Serve the turns of a session, and others between them; return tokens, and prompt tokens not computed."""
        said: list[int] = []
        found, saved = [], []
        for text in TEXTS:
            said += text
            tokens, num_saved = self.ask(said, **names)
            said += tokens
            found.append(tokens)
            saved.append(num_saved)
            self.evict()
        return found, saved


def make(folder: Path, policy: str, *, pins: bool, **flags: Any) -> Served:
    settings = {"policy": policy, "swap_memory": "64MiB", "pin_sessions": pins}
    small = {"num_gpu_blocks_override": NUM_BLOCKS, "enable_prefix_caching": True, "skip_tokenizer_init": True}
    llm = make_ours(folder, settings, **(small | flags))
    clock = make_clock(llm, "cpu")
    return Served(llm, watch(llm), clock)


@pytest.fixture(scope="module")
def turns(llama: Path) -> list[list[int]]:
    """The answers of stock vLLM, which computes every prompt whole."""
    llm = make_stock(llama, skip_tokenizer_init=True)
    served = Served(llm, watch(llm))
    found, saved = served.talk()
    close(llm)
    assert saved == [0, 0, 0]
    return found


@pytest.fixture(scope="module")
def calm(llama: Path) -> dict[Load, dict[int, list[int]]]:
    """The tokens of stock vLLM, of requests and of the turns that follow them."""
    first = serve_all_calmly(llama, [FIRST], skip_tokenizer_init=True)[FIRST]
    tail = tuple(TEXTS[1][:25])
    prompts = tuple((*prompt, *first[index], *tail) for index, prompt in enumerate(FIRST.prompts))
    second = Load(prompts, tuple(reversed(FIRST.lengths)))
    return {FIRST: first} | serve_all_calmly(llama, [second], skip_tokenizer_init=True)


@pytest.fixture(scope="module", params=[("timely", False), ("fcfs", True)], ids=["timely", "fcfs, async"])
def served(
    request: pytest.FixtureRequest, llama: Path, turns: list[list[int]], calm: dict[Load, dict[int, list[int]]]
) -> Iterator[Served]:
    policy, is_async = request.param
    served = make(llama, policy, pins=True, async_scheduling=is_async)
    yield served
    close(served.llm)


@pytest.fixture
def fresh(served: Served) -> Iterator[Served]:
    """An engine with nothing in swap space; afterwards nothing but kept KV is in use."""
    core = served.llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    assert served.llm.reset_prefix_cache(reset_running_requests=True)
    yield served
    controller = controller_of(served.llm)
    for _ in range(100):
        if len(controller.books.transfers) or core.batch_queue:
            core.step_fn()
    controller.books.backups.check_integrity()
    controller.sessions.book.check_integrity()  # type: ignore[union-attr]
    assert controller.books.backups.is_at_rest and not controller.books._owners and not len(controller.roster)
    scheduler = scheduler_of(served.llm)
    assert scheduler.finder.count_free() == scheduler.finder.num_blocks


def whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


def saved_turns() -> list[int]:
    """Prompt tokens that each turn finds: whole blocks of what was computed before it."""
    said, found = 0, [0]
    for text in TEXTS[:-1]:
        said += len(text) + NUM_OUTPUT
        found.append(whole(said - 1))
    return found


def counts_of(controller: SwapController) -> tuple[int, int]:
    """Requests whose session was pinned when they came, and tokens restored from KV of earlier requests."""
    assert controller.sessions is not None
    return controller.sessions.book.counts.hits, controller.books.num_adopted_tokens


@pytest.mark.parametrize("name", ["agent", None])
def test_later_turns_are_restored_with_equal_tokens(fresh: Served, turns: list[list[int]], name: str | None) -> None:
    controller = controller_of(fresh.llm)
    num_hits, num_tokens = counts_of(controller)
    found, saved = fresh.talk(session_id=name, salt=str(name))
    assert found == turns
    assert saved == saved_turns()
    assert counts_of(controller) == (num_hits + 2, num_tokens + sum(saved))


def test_others_find_nothing(fresh: Served, turns: list[list[int]]) -> None:
    fresh.ask(TEXTS[0], session_id="agent", salt="one")
    fresh.evict()
    assert fresh.ask([9, *TEXTS[0]], session_id="agent", salt="one")[1] == 0, "another beginning"
    assert fresh.ask(TEXTS[0], session_id="agent", salt="two") == (turns[0], 0)
    fresh.evict()
    assert fresh.ask(TEXTS[0], session_id="agent", salt="one") == (turns[0], whole(len(TEXTS[0]) - 1))


@pytest.mark.parametrize("stop", [None, ["a stop string"]])
def test_a_request_is_kept_if_a_stop_string_may_have_ended_it(fresh: Served, stop: list[str] | None) -> None:
    """vLLM finds stop strings in another process, which aborts the request, as it does if a client goes away."""
    engine, tokens = fresh.llm.llm_engine, list[int]()
    params = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True, stop=stop)
    engine.add_request("stopped", {"prompt_token_ids": TEXTS[0]}, params, arrival_time=fresh.clock.wall_s())
    while len(tokens) < 20:
        tokens = [token for output in engine.step() for token in output.outputs[0].token_ids]
    engine.abort_request(["stopped"])
    fresh.evict()
    said = [*TEXTS[0], *tokens]
    assert fresh.ask([*said, *TEXTS[1]])[1] == (whole(len(said) - 1) if stop else 0)


def test_a_wrong_block_has_other_tokens(fresh: Served, turns: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the first block is restored from the copy of another request's. (Their order is of no matter.)"""
    find = SavedPrefixes.find

    def exchange(saved: SavedPrefixes, keys: Sequence[BlockKey]) -> list[Backup]:
        found = find(saved, keys)
        others = (one for one in saved._backups.idle.in_tier(Tier.HOST) if one not in found)
        return [next(others), *found[1:]] if found else []

    monkeypatch.setattr(SavedPrefixes, "find", exchange)
    found, saved = fresh.talk()
    assert saved == saved_turns() and found[0] == turns[0] and found[1] != turns[1]


def test_a_reset_leaves_nothing_to_restore(fresh: Served, turns: list[list[int]]) -> None:
    fresh.ask(TEXTS[0])
    assert fresh.llm.reset_prefix_cache()
    assert fresh.ask(TEXTS[0]) == (turns[0], 0)


def test_tokens_survive_a_storm_in_which_sessions_go_on(
    fresh: Served, llama: Path, ages: list[int], calm: dict[Load, dict[int, list[int]]]
) -> None:
    """Requests of both turns are preempted at random, and share copies with each other and with ended requests."""
    scheduler, books = scheduler_of(fresh.llm), controller_of(fresh.llm).books
    policy, before = scheduler.policy_object, books.num_adopted_tokens
    storm = scheduler.policy_object = StormPolicy(seed=3, chance=0.1)  # type: ignore[assignment]
    first, second = calm
    assert drive(fresh.llm, first).tokens == calm[first]
    fresh.evict()
    assert drive(fresh.llm, second).tokens == calm[second]
    scheduler.policy_object = policy
    assert storm.num_sent_away > 20 and books.num_adopted_tokens - before > 500


def test_without_the_setting_later_turns_are_computed_again(llama: Path, turns: list[list[int]]) -> None:
    served = make(llama, "timely", pins=False)
    assert served.talk(session_id="agent") == (turns, [0, 0, 0])
    close(served.llm)


def test_layers_that_keep_different_kv_are_refused_in_one_line(fresh: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(fresh.llm)
    assert scheduler.finder.finds_all
    monkeypatch.setattr(scheduler.finder, "_tables", scheduler.finder._tables * 2)
    with pytest.raises(UserError, match="leave pin_sessions out"):
        scheduler._expect_contents()
