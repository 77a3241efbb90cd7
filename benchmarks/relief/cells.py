"""The cells: two instances of Llama-2-70B on eight H100 each, bursts, and how much KV memory is beside the weights."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

from benchmarks.relief.model import VirtualModel
from floodplain.core.request import UNLOADED_FACTOR, Request
from floodplain.core.sampling import SamplingParams
from floodplain.cost.step_time import StepCost
from floodplain.policy.drop import DropSizes
from floodplain.policy.relief import StreamStep
from floodplain.runtime.state import LoopConfig

NUM_INSTANCES = 2
COST = StepCost(base_s=0.0300, decode_s=0.000304, prefill_token_s=0.0000909)
"""Least squares over Splitwise's measurements of this model on eight H100, as in benchmarks/policies."""
NUM_LAYERS, LAYER_BYTES, TOKEN_BYTES = 80, 1_711_276_032, 327_680
BLOCK_TOKENS = 64
HOST_BANDWIDTH = 200e9
"""Eight links of PCIe 4 (25 GB/s each, AQUA), one for each GPU of an instance."""
HOP_S = 0.0005
"""One way of activations, a few MB; assumed."""
REMAP_S_PER_BYTE = 5e-12
"""5 ms per GB, KunServe's order of magnitude for ``cuMemMap``; not measured here (``benchmarks/gpu``)."""
LEAST_TOKENS = 1024
"""Of a microbatch: 256, the default, costs more in reading weights than bubbles do on such a device (README)."""
PROMPT_TOKENS, OUTPUT_TOKENS, SPREAD = 1500, 300, 0.6
"""Means and sigma of lognormal lengths: chats with a document."""
QUIET = 0.4
"""Load before and after a burst, as a part of capacity."""
QUIET_S = 10.0

STEP = StreamStep(
    COST.base_s, COST.decode_s + COST.prefill_token_s * PROMPT_TOKENS / OUTPUT_TOKENS, COST.prefill_token_s
)


@dataclass(frozen=True, slots=True)
class Cell:
    """A burst, a memory and a link: the factor over capacity, the seconds, and bytes of layers over bytes of KV pool.

    The link is between instances, in bytes per second each way.
    """

    factor: float
    burst_s: float
    ratio: float
    link: float

    @property
    def name(self) -> str:
        """For tables."""
        return f"{self.factor:g}x for {self.burst_s:g} s, weights {self.ratio:g}x KV, {self.link / 1e9:g} GB/s"

    @property
    def num_blocks(self) -> int:
        """Of an instance's pool."""
        return int(NUM_LAYERS * LAYER_BYTES / self.ratio / (TOKEN_BYTES * BLOCK_TOKENS))

    @property
    def num_streams(self) -> float:
        """Requests that an instance's pool holds, each in the middle of its output."""
        return self.num_blocks * BLOCK_TOKENS / (PROMPT_TOKENS + OUTPUT_TOKENS / 2)

    @property
    def capacity(self) -> float:
        """Requests per second of all instances with full pools."""
        return NUM_INSTANCES * STEP.tokens_per_s(self.num_streams) / OUTPUT_TOKENS

    @property
    def model(self) -> VirtualModel:
        """What runs on each instance."""
        block_bytes = TOKEN_BYTES * BLOCK_TOKENS
        return VirtualModel(
            cost=COST,
            sizes=DropSizes(NUM_LAYERS, LAYER_BYTES, block_bytes // NUM_LAYERS),
            num_blocks=self.num_blocks,
            block_tokens=BLOCK_TOKENS,
            config=LoopConfig(max_model_len=8192, max_num_seqs=1024, block_bytes=block_bytes),
            hop_s=HOP_S,
            least_tokens=LEAST_TOKENS,
        )

    def make_requests(self, seed: int) -> list[Request]:
        """A quiet time, the burst, a quiet time; prompts have nothing in common."""
        dice, now, requests = Random(seed), 0.0, []
        end_s = 2 * QUIET_S + self.burst_s
        while True:
            is_burst = QUIET_S <= now < QUIET_S + self.burst_s
            now += dice.expovariate(self.capacity * (self.factor if is_burst else QUIET))
            if now >= end_s:
                return requests
            num_prompt, num_output = _draw(dice, PROMPT_TOKENS, 6000), _draw(dice, OUTPUT_TOKENS, 1500)
            requests.append(
                Request(
                    request_id=str(len(requests)),
                    prompt_token_ids=(len(requests),) * num_prompt,
                    params=SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0),
                    arrival_s=now,
                )
            )


BURSTS = ((1.5, 30.0), (1.5, 60.0), (1.5, 120.0), (4.0, 10.0), (4.0, 30.0), (4.0, 60.0))
RATIOS, LINKS = (1.0, 2.0, 5.0), (3e9, 25e9)
CELLS = tuple(Cell(*burst, ratio, link) for burst, ratio, link in product(BURSTS, RATIOS, LINKS))
GOALS_S = (
    UNLOADED_FACTOR * (COST.base_s + COST.prefill_token_s * PROMPT_TOKENS),
    UNLOADED_FACTOR * (COST.base_s + COST.decode_s),
)
"""(TTFT, TPOT): five times what a request of mean length takes alone."""


def _draw(dice: Random, mean: float, most: int) -> int:
    return max(8, min(most, int(mean * dice.lognormvariate(-SPREAD * SPREAD / 2, SPREAD))))
