"""Tokens of the texts that an output must not have."""

from __future__ import annotations

from dataclasses import replace

from floodplain.core.sampling import SamplingParams
from floodplain.model.tokenizer import Tokenizer


def with_bad_tokens(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """Return parameters whose ``bad_token_ids`` hold the tokens of ``bad_words``; the same object without any.

    A word has two forms, at the beginning of a text and after a space. Other ways to spell it in tokens stay possible,
    as in vLLM.
    """
    if not params.bad_words:
        return params
    texts = [text for word in params.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts}
    return replace(params, bad_words=(), bad_token_ids=(*params.bad_token_ids, *sorted(found - {()})))
