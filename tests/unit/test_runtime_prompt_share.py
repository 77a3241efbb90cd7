"""The loop learns the prompt share from all ended requests that had a token, aborted or not."""

from __future__ import annotations

from floodplain.core.plan import StepPlan
from floodplain.core.request import FinishReason, SeqId
from floodplain.runtime.loop import Loop
from tests.support.loops import FakeExecutor, make_loop, make_request


class Bench:
    """A loop over a device whose steps take 20 ms and 1 ms for every prompt token."""

    def __init__(self) -> None:
        self.loop: Loop = make_loop(num_blocks=64, max_batched_tokens=8)
        self._executor = FakeExecutor(self.loop.state.ledger.block_tokens)
        self._now = 0.0

    def submit(self, first_token: int, num_prompt: int) -> SeqId:
        prompt = tuple(range(first_token, first_token + num_prompt))
        return self.loop.submit(make_request("r", prompt, self._now, max_tokens=20, ignore_eos=True))

    def step(self) -> None:
        plan = self.loop.next_plan(self._now)
        assert isinstance(plan, StepPlan)
        self._now += 0.02 + 0.001 * sum(len(chunk.token_ids) for chunk in plan.prefills)
        self.loop.complete(self._executor.execute(plan), self._now)

    def abort(self, seq_id: SeqId) -> None:
        assert self.loop.finish(seq_id, FinishReason.ABORT, self._now)

    def prompt_share(self) -> float:
        """The share after one more step."""
        self.step()
        return self.loop.state.prices.now.prompt_share


def beside_a_long_one() -> Bench:
    bench = Bench()
    bench.submit(1000, 4)
    bench.step()
    return bench


def test_a_client_that_hangs_up_after_its_first_token_counts() -> None:
    bench = beside_a_long_one()
    seq_id = bench.submit(1, 8)
    for _ in range(2):
        bench.step()
    bench.abort(seq_id)
    assert bench.prompt_share() > 0.05


def test_a_request_aborted_before_its_first_token_does_not_count() -> None:
    """Its partly computed prompt is no measure of other prompts."""
    bench = beside_a_long_one()
    computes = bench.submit(1, 24)
    bench.step()
    assert 0 < bench.loop.state.sequences[computes].num_computed < 24
    waits = bench.submit(100, 8)
    bench.abort(computes)
    bench.abort(waits)
    assert bench.prompt_share() == 0.0


def test_what_a_prefix_spared_does_not_count() -> None:
    shares = []
    for first_token in (1, 100):  # the same prompt again, and another
        bench = beside_a_long_one()
        for token in (1, first_token):
            seq_id = bench.submit(token, 16)
            for _ in range(3):
                bench.step()
            bench.abort(seq_id)
        shares.append(bench.prompt_share())
    assert 0 < shares[0] < 0.8 * shares[1]
