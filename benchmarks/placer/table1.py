"""Mixes of models as AQUA's section 9.3 draws them from its Table 1, until the GPUs are used up."""

from __future__ import annotations

from random import Random

from floodplain.planner.cluster import Cluster, Model, Server

GB = 10**9
SERVER_GPUS, GPU_BYTES, NVLINK = 8, 80 * GB, 450 * GB
"""The paper's H100 servers (section 9)."""

Kind = tuple[str, int, int]
"""A name, GPUs, and GB that each GPU lends (positive) or needs."""
AUDIO: tuple[Kind, ...] = (("musicgen", 1, 28), ("audiogen", 1, 20))
VISION: tuple[Kind, ...] = (("sd-3", 1, 30), ("sd-xl", 1, 40), ("kandinsky", 1, 35))
LLMS: tuple[Kind, ...] = (
    ("llama-3.1-70b-tp2", 2, -15),
    ("yi-34b-200k", 2, -20),
    ("opt-30b", 1, -10),
    ("llama-3.1-8b", 1, 25),
    ("llama-3.1-70b-tp4", 4, 15),
)
"""The paper tells 20 GB of audiogen (Fig. 3), 30 of SD-3 and 25 of Llama 8B (Fig. 7), 15 of Llama 70B on four GPUs and
10 of OPT-30B (9.4); the others are assumed.
"""


def draw_cluster(num_gpus: int, seed: int) -> Cluster:
    """Full servers: 10 % of the draws are audio models, 15 % vision models, the rest LLMs."""
    random, left = Random(seed), num_gpus
    counts: dict[Kind, int] = dict.fromkeys((*AUDIO, *VISION, *LLMS), 0)
    while left:
        (kinds,) = random.choices((AUDIO, VISION, LLMS), (0.10, 0.15, 0.75))
        kind = random.choice(kinds)
        if kind[1] <= left:
            counts[kind] += 1
            left -= kind[1]
    names = [f"s{i}" for i in range(num_gpus // SERVER_GPUS)]
    servers = tuple(Server(name, SERVER_GPUS, GPU_BYTES, name, NVLINK) for name in names)
    return Cluster(servers, tuple(Model(name, n, size, 1, gb * GB) for (name, size, gb), n in counts.items() if n))
