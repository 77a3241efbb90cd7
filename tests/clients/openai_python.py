"""openai-python against a server: openai_python.py URL MODEL. Prints results as JSON; fails loudly."""

from __future__ import annotations

import json
import sys
from typing import Literal

from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel


class Person(BaseModel):
    """What an answer must be."""

    name: Literal["Ann", "Bob"]
    age: Literal[7, 8]


class Turn(BaseModel):
    """Turn to a side."""

    side: Literal["left", "right"]


def main(url: str, model: str) -> None:
    """Parse, call tools, stream both, and ask for choices, biases and scores."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = [{"role": "user", "content": "who?"}]
    parsed = client.chat.completions.parse(model=model, messages=chat, response_format=Person, n=2)
    assert all(isinstance(choice.message.parsed, Person) for choice in parsed.choices) and len(parsed.choices) == 2
    how = {"model": model, "messages": chat, "tools": [pydantic_function_tool(Turn)], "tool_choice": "required"}
    call = client.chat.completions.parse(**how, parallel_tool_calls=False).choices[0].message.tool_calls[0]
    assert isinstance(call.function.parsed_arguments, Turn)
    with client.chat.completions.stream(**how, parallel_tool_calls=False) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert isinstance(done[0].parsed_arguments, Turn)
    result = {"role": "tool", "tool_call_id": call.id, "content": "a wall"}
    made = {"role": "assistant", "tool_calls": [call.model_dump(exclude={"function": {"parsed_arguments"}})]}
    assert client.chat.completions.create(model=model, messages=[*chat, made, result], max_tokens=4).choices
    assert isinstance(client.responses.parse(model=model, input="who?", text_format=Person).output_parsed, Person)
    with client.responses.stream(model=model, input="who?", text_format=Person) as events:
        texts = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert events.get_final_response().output_text == "".join(texts)
    biased = client.completions.create(model=model, prompt="a", logit_bias={str(5): 100}, max_tokens=3, logprobs=1)
    assert len(set(biased.choices[0].logprobs.tokens)) == 1
    scored = client.completions.create(model=model, prompt="abc", echo=True, logprobs=1, max_tokens=0)
    assert scored.choices[0].text == "abc" and scored.choices[0].logprobs.token_logprobs[0] is None
    print(json.dumps({"checks": 8}))


if __name__ == "__main__":
    main(*sys.argv[1:])
