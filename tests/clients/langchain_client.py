"""LangChain against a server: langchain_client.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

TURNS = [SystemMessage("be brief"), HumanMessage("hi", name="ann"), AIMessage("yes"), HumanMessage("and?")]


class Turn(BaseModel):
    """A turn to a side; without one, to the left."""

    side: Literal["left", "right"] = "left"


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
    for method in ("function_calling", "json_schema", "json_mode"):
        answer = ChatOpenAI(**common, max_tokens=64).with_structured_output(Turn, method=method).invoke(TURNS)
        assert isinstance(answer, Turn), (method, answer)
    assert run_agent(ChatOpenAI(**common, max_tokens=64), SIDES) == 2
    print(json.dumps({"checks": 13}))


SIDES: list[str] = []


@tool
def go(side: Literal["left", "right"]) -> str:
    """Go to a side."""
    SIDES.append(side)
    return "a wall"


def run_agent(chat: ChatOpenAI, sides: list[str]) -> int:
    """Let the model call a tool twice, and answer; return how often it did."""
    turns = list(TURNS)
    caller = chat.bind_tools([go], tool_choice="required", parallel_tool_calls=False, strict=True)
    for _ in range(2):
        turns.append(caller.invoke(turns))
        turns += [go.invoke(call) for call in turns[-1].tool_calls]
    assert isinstance(chat.bind_tools([go], tool_choice="none").invoke(turns).content, str)
    return len(sides)


if __name__ == "__main__":
    main(*sys.argv[1:])
