"""An engine that computes prompts in a storm, and then lends their KV by NIXL until its standard input is closed.

Run as a process: the folder of the model, and a descriptor of a pipe. Prompts come as a line of JSON on standard input.
How many requests were preempted, and where their KV is, as vLLM's ``kv_transfer_params`` say it, go into the pipe.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from vllm import SamplingParams

from tests.vllm.engines import make_crowded, scheduler_of
from tests.vllm.storm import StormPolicy
from tests.vllm.test_beside import beside

NIXL = {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
UNKNOWN = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
NUM_BLOCKS = 64
"""NIXL keeps the blocks of all prompts until they are read."""


def main() -> None:
    flags = {"num_gpu_blocks_override": NUM_BLOCKS, "kv_transfer_config": beside(NIXL)}
    llm = make_crowded(Path(sys.argv[1]), skip_tokenizer_init=True, **flags)
    policy = scheduler_of(llm).policy_object = StormPolicy(seed=3, chance=0.2)
    params = SamplingParams(temperature=0.0, max_tokens=1, extra_args={"kv_transfer_params": KEEP | UNKNOWN})
    prompts = [{"prompt_token_ids": prompt} for prompt in json.loads(sys.stdin.readline())]
    answers = llm.generate(prompts, params, use_tqdm=False)
    with os.fdopen(int(sys.argv[2]), "w") as pipe:
        json.dump([policy.num_sent_away, [answer.kv_transfer_params for answer in answers]], pipe)
    sys.stdin.read()


if __name__ == "__main__":
    main()
