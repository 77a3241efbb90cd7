"""Outputs of an engine with room for all requests: the reference of every storm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from floodplain import LLM
from floodplain.core.request import Request
from tests.support.parity import Reference

MODEL = "dummy:tiny-llama"


def run_calmly(requests: Sequence[Request], **flags: Any) -> list[Reference]:
    """Return tokens, their logprobs, and gaps to the second-best token; no request is preempted.

    ``model`` and ``kv_memory`` may be among the flags.
    """
    prompts = [{"prompt_token_ids": list(request.prompt_token_ids)} for request in requests]
    params = [replace(request.params, logprobs=2) for request in requests]
    flags = {"model": MODEL, "kv_memory": 2**24} | flags | {"policy": "fcfs", "swap": "none"}
    with LLM(**flags) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().preemptions == {"recompute": 0, "swap": 0}
    references = []
    for output in outputs:
        entries = output.outputs[0].logprobs or []
        gaps = [entry.top[0][1] - entry.top[1][1] for entry in entries]
        references.append(Reference(output.outputs[0].token_ids, gaps, [entry.chosen for entry in entries]))
    return references
