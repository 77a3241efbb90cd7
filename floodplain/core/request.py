"""Requests as clients send them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import Annotated, NewType

from floodplain.core.errors import RequestRefused
from floodplain.core.ranges import Range
from floodplain.core.sampling import SamplingParams

UNLOADED_FACTOR = 5.0
"""Ratio of a default goal to the latency without load: KunServe's factor for chat ("SLO attainment")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A request's own goals in seconds, above 0: to the first token, and per token after it. None: the server's."""

    ttft_s: Annotated[float, Range(0.0, inf)] | None = None
    tpot_s: Annotated[float, Range(0.0, inf)] | None = None

    @property
    def field(self) -> str:
        """Name of an API field that sets one of these goals, for error messages."""
        return "ttft_goal_ms" if self.tpot_s is None else "tpot_goal_ms"


NO_GOALS = Goals()


SeqId = NewType("SeqId", int)
"""Names a sequence inside one loop: the number of the request in order of submission."""

MAX_PROMPT_SCORES = 2**18
"""The most log-probabilities of one prompt; bounded, because they are sent at once."""

OrderKey = tuple[int, float, int]
"""(priority, arrival, sequence id), which breaks every tie; (0, place, sequence id) where API keys take turns."""


class FinishReason(Enum):
    """Why a request ended; the values are those of the OpenAI API, and ``abort``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, how to sample from it, and its priority and goals.

    Attributes:
        request_id: The client's name for it, unique among live requests.
        prompt_token_ids: At least one token.
        arrival_s: When it arrived, on the loop's monotonic clock.
        priority: Lower is sooner, as in vLLM.
        client: Name of the API key; fairness may be counted by it.
        cache_salt: Requests share cached prefixes only with requests of the same salt.
        session: The client's name for the conversation or agent that it belongs to; "" if it gave none.
        known_token_ids: Output that another engine has generated already. It is computed again like a prompt, and
            counts as output: towards ``max_tokens``, ``min_tokens``, and the positions of seeded samples.
        is_accepted: Another engine had accepted it: it is not refused because many wait.
        choice_group: The same number for all choices of a request, and for no other live request; 0: it is the only
            choice.
        trace_headers: The W3C headers by which its client names a trace; empty if the server traces nothing.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    priority: int = 0
    client: str = ""
    cache_salt: str = ""
    session: str = ""
    goals: Goals = NO_GOALS
    known_token_ids: tuple[int, ...] = ()
    is_accepted: bool = False
    choice_group: int = 0
    trace_headers: tuple[tuple[str, str], ...] = ()

    def choices(self, group: int) -> list[Request]:
        """One request for each of its ``n`` choices. The first is to compute the prompt, before the others begin."""
        return [self if self.params.n == 1 else self._choice(number, group) for number in range(self.params.n)]

    def _choice(self, number: int, group: int) -> Request:
        seed = self.params.seed
        if seed is not None and number:
            seed = (seed + number) % 2**64
        name = f"{self.request_id}-c{number}" if number else self.request_id
        scores = None if number else self.params.prompt_logprobs
        params = replace(self.params, n=1, seed=seed, prompt_logprobs=scores)
        is_accepted = self.is_accepted or number > 0
        return replace(self, request_id=name, params=params, is_accepted=is_accepted, choice_group=group)

    def check_tokens(self, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
        """Check the token ids in all fields.

        Raises RequestRefused, which names the field, if one is not below ``vocab_size``, or none may be chosen.
        """
        own: dict[str, Sequence[int]] = {"prompt": self.prompt_token_ids, "known_token_ids": self.known_token_ids}
        for field, token_ids in {**own, **self.params.named_token_ids}.items():
            lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
            if lowest < 0 or highest >= vocab_size:
                bad, last = lowest if lowest < 0 else highest, vocab_size - 1
                raise RequestRefused(f"token id {bad} is not in the vocabulary: ids go from 0 to {last}", field=field)
        num_scores = len(self.prompt_token_ids) * (1 + (self.params.prompt_logprobs or 0))
        if self.params.prompt_logprobs is not None and num_scores > MAX_PROMPT_SCORES:
            raise RequestRefused(
                f"prompt_logprobs would have {num_scores} values, over {MAX_PROMPT_SCORES}: ask for fewer "
                "alternatives, or send a shorter prompt",
                field="prompt_logprobs",
            )
        if not self.params.leaves_a_token(eos_token_ids, vocab_size):
            field = "bad_words" if self.params.allowed_token_ids is None else "allowed_token_ids"
            raise RequestRefused("min_tokens and bad_words exclude all allowed_token_ids, or all tokens", field=field)
