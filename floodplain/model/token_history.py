"""Which tokens a sequence has had, and how often; the tokens of bad words. Penalties and structures depend on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from floodplain.core.errors import InvariantError
from floodplain.core.request import Request
from floodplain.core.sampling import SamplingParams
from floodplain.model.structure import Grammars, StructureState
from floodplain.model.tokenizer import Tokenizer

IntArray = npt.NDArray[np.int64]


class TokenHistory:
    """The distinct tokens of a prompt and its output, and how often each is in the output. A token costs constant time.

    It is a function of the tokens alone. ``grammars`` are the model's, needed for a request with a structure.

    ``structure``: which tokens its structure allows next; None without one. ``tail``: the last tokens of the output, as
    many as the longest bad word needs.
    """

    def __init__(self, request: Request, grammars: Grammars | None = None) -> None:
        self.structure: StructureState | None = None
        if request.params.structure is not None:
            if grammars is None:
                raise InvariantError("a structured request reached an engine without grammars")
            self.structure = grammars.begin(request.params.structure, request.known_token_ids)
        longest = max(map(len, request.params.bad_token_ids), default=1)
        self.tail: deque[int] = deque(maxlen=longest - 1)
        self._places: dict[int, int] = {}
        self._ids: IntArray = np.zeros(64, dtype=np.int64)
        self._counts: IntArray = np.zeros(64, dtype=np.int64)
        for token_id in request.prompt_token_ids:
            self._place(token_id)
        self._count(request.known_token_ids)

    @property
    def token_ids(self) -> IntArray:
        """The distinct tokens of prompt and output, [N]."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> IntArray:
        """How often each of ``token_ids`` is in the output, [N]."""
        return self._counts[: len(self._places)]

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add tokens to the output."""
        self._count(token_ids)
        if self.structure is not None:
            self.structure.extend(token_ids)

    def _count(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            place = self._place(token_id)  # may replace the arrays
            self._counts[place] += 1
            self.tail.append(token_id)

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids, self._counts = (np.concatenate((one, np.zeros_like(one))) for one in (self._ids, self._counts))
        self._ids[place] = token_id
        return place


def with_bad_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters with ``bad_token_ids`` for ``bad_words``, at a text's beginning and after a space."""
    if not params.bad_words:
        return params
    texts = [text for word in params.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    return replace(params, bad_words=(), bad_token_ids=(*params.bad_token_ids, *sorted(found - {()})))
