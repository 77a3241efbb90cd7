"""LlamaIndex against a server: llamaindex_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import asyncio
import json
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

TURNS = [ChatMessage(role="system", content="be brief"), ChatMessage(role="user", content="hi")]


def main(url: str, model: str) -> None:
    """Chat and complete in every way that LlamaIndex has."""
    common = {"api_base": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0.0, "max_tokens": 8}
    chat = OpenAILike(**common, is_chat_model=True, max_retries=0)
    whole = chat.chat(TURNS).message.content
    assert list(chat.stream_chat(TURNS))[-1].message.content == whole
    assert asyncio.run(chat.achat(TURNS)).message.content == whole
    plain = OpenAILike(**common, is_chat_model=False, max_retries=0)
    text = plain.complete("the river").text
    assert list(plain.stream_complete("the river"))[-1].text == text
    assert asyncio.run(plain.acomplete("the river")).text == text
    print(json.dumps({"checks": 4}))


if __name__ == "__main__":
    main(*sys.argv[1:])
