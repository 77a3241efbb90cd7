"""LangChain against a server: langchain_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import asyncio
import json
import sys

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI

TURNS = [SystemMessage("be brief"), HumanMessage("hi", name="ann"), AIMessage("yes"), HumanMessage("and?")]


def main(url: str, model: str) -> None:
    """Chat and complete in every way that LangChain has."""
    common = {"base_url": f"{url}/v1", "api_key": "none", "model": model, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(**common, max_tokens=8, stream_usage=True, seed=1)
    whole = chat.invoke(TURNS)
    streamed = list(chat.stream(TURNS))
    assert "".join(chunk.content for chunk in streamed) == whole.content
    used = [chunk.usage_metadata for chunk in streamed if chunk.usage_metadata]
    assert used[-1]["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert [answer.content for answer in chat.batch([TURNS, TURNS])] == [whole.content] * 2
    assert asyncio.run(chat.ainvoke(TURNS)).content == whole.content
    hinted = ChatOpenAI(**common, max_tokens=8, store=True, metadata={"a": "b"}, service_tier="auto", n=1)
    assert hinted.invoke(TURNS, user="ann", parallel_tool_calls=False).content == whole.content
    scored = chat.bind(logprobs=True, top_logprobs=2).invoke(TURNS)
    assert len(scored.response_metadata["logprobs"]["content"]) == scored.usage_metadata["output_tokens"]
    plain = OpenAI(**common, max_tokens=8)
    text = plain.invoke("the river", stop=["\n\n"])
    assert "".join(plain.stream("the river", stop=["\n\n"])) == text
    assert plain.batch(["the river", "the plain"])[0] == text
    print(json.dumps({"checks": 9}))


if __name__ == "__main__":
    main(*sys.argv[1:])
