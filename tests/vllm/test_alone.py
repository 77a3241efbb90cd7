"""The scheduler without a connector: the policy decides, and preempted requests are recomputed."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from floodplain.core.errors import UserError
from floodplain.plugins.vllm.register import SCHEDULER
from tests.vllm.engines import (
    close,
    controller_of,
    drive,
    expect_nothing_left,
    make_load,
    make_stock,
    scheduler_of,
    serve_calmly,
)
from tests.vllm.storm import StormPolicy

NUM_REQUESTS = 12
NO_TOKENIZER = {"skip_tokenizer_init": True}
TURNS = {"floodplain": {"policy": "cfs", "slice": 8}}


def test_turns_without_swap_space_give_stock_tokens(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    load = make_load(3, NUM_REQUESTS)
    expected = serve_calmly(llama, load, **NO_TOKENIZER)
    with caplog.at_level(logging.WARNING, logger="floodplain"):
        llm = make_stock(llama, num_gpu_blocks_override=18, scheduler_cls=SCHEDULER, **NO_TOKENIZER)
    assert "there is no swap space" in caplog.text, "nothing but the scheduler is named, and it says what that means"
    close(llm)
    own = {"scheduler_cls": SCHEDULER, "additional_config": TURNS}
    llm = make_stock(llama, num_gpu_blocks_override=18, **own, **NO_TOKENIZER)
    sent_away: list[str] = []
    scheduler = scheduler_of(llm)
    assert scheduler.policy_object.name == "cfs"
    scheduler.policy_object = StormPolicy(1)  # cfs alone preempts few: each turn computes a prompt
    preempt = scheduler._preempt_request

    def note(request: object, *args: object, **kwargs: object) -> None:
        sent_away.append(request.request_id)  # type: ignore[attr-defined]
        preempt(request, *args, **kwargs)

    scheduler._preempt_request = note  # type: ignore[method-assign]
    aborted = {3, 8}

    def abort(step: int) -> None:
        if step == 40:
            llm.llm_engine.abort_request([str(number) for number in aborted], internal=False)

    run = drive(llm, load, each_step=abort)
    assert {number: tokens for number, tokens in run.tokens.items() if number not in aborted} == {
        number: tokens for number, tokens in expected.items() if number not in aborted
    }
    assert len(set(sent_away)) > NUM_REQUESTS // 2 and len(sent_away) > 2 * NUM_REQUESTS
    assert max(run.resumed) > 32, "they are computed again"
    assert controller_of(llm).tally.take()["counts"] == {"preemptions_total recompute": len(sent_away)}
    expect_nothing_left(llm)
    close(llm)


def test_settings_of_swap_space_are_refused_without_it(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = {"floodplain": {"swap_memory": "1GiB"}}
    with pytest.raises(UserError, match="which is none of policy, seed"):
        make_stock(llama, scheduler_cls=SCHEDULER, additional_config=wrong, **NO_TOKENIZER)
    assert capsys.readouterr().err.count("floodplain: ") == 1
