"""A user's program: vLLM with only the scheduler and the connector of ours. Prints tokens and preemptions."""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig


def main(model: str, prompts: list[list[int]], num_tokens: int, **flags: object) -> None:
    """Everything else is vLLM's default, except ``flags``."""
    transfer = KVTransferConfig(
        kv_connector="FloodplainConnector",
        kv_connector_module_path="floodplain.plugins.vllm.connector",
        kv_role="kv_both",
    )
    scheduler = "floodplain.plugins.vllm.scheduler.FloodplainScheduler"
    llm = LLM(model, scheduler_cls=scheduler, kv_transfer_config=transfer, disable_log_stats=False, **flags)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    preemptions = sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions")
    print(json.dumps({"tokens": [list(one.outputs[0].token_ids) for one in outputs], "preemptions": preemptions}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
