"""``floodplain demo --cluster``: two instances drop layers in a spike, serve as a pipeline, and restore them later.

After KunServe's Figure 12, with real processes on one machine: a few users; then several times as many, which need more
KV than both pools hold; then the few again, until all layers are back.
"""

from __future__ import annotations

import asyncio
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from floodplain.bench.offline import hardware_report
from floodplain.demo.alternation import Run
from floodplain.demo.cluster import VerbProcess
from floodplain.demo.users import Users, shifted
from floodplain.demo.watch import (
    SOLO,
    ReliefSample,
    ReliefTotals,
    find_spans,
    has_restored,
    read_totals,
    to_columns,
    watching_relief,
)
from floodplain.engine.build import kv_bytes_per_token
from floodplain.model.weights.open_model import open_model
from floodplain.observe.result import RunInfo, benchmark_result
from floodplain.workload.http_target import HttpTarget
from floodplain.workload.prompts import PromptTokenizer
from floodplain.workload.records import LoadRequest, RequestRecord
from floodplain.workload.spec import WorkloadSpec, build

PHASES = ("before", "spike", "after")
NO_DROP_S = 10.0
"""If no layer was dropped within this time after the spike, none will be."""
POLL_S = 0.05


def serve_relief(
    model: str, seed: int, scale: ReliefScale, *, progress: bool
) -> tuple[list[RequestRecord], dict[str, Any]]:
    """Start the processes, run the scene, end them; return the records and ``cluster`` of ``demo.json``.

    The seed is that of lengths and texts. Raises UserError if the router does not start, or ended.
    """
    source = open_model(model)
    requests = relief_requests(source.load_tokenizer(), seed, scale)
    words = serve_words(model, seed, scale, kv_bytes_per_token(source.config, DTYPE))
    if progress:
        print(f"cluster: a router and {NUM_INSTANCES} instances", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory(prefix="floodplain-demo-") as folder,
        VerbProcess(words, Path(folder) / "router.log", num_threads=1) as router,
    ):
        ready = router.wait_ready()
        records, samples, totals = asyncio.run(_play(str(ready["url"]), model, requests, scale))
    return records, {"command": ["floodplain", *words], "scene": asdict(scale), **summarise(records, samples, totals)}


async def _play(
    url: str, model: str, requests: Sequence[LoadRequest], scale: ReliefScale
) -> tuple[list[RequestRecord], list[ReliefSample], ReliefTotals]:
    crowd = Users(HttpTarget(url, model), requests)
    await crowd.warm_up(2 * NUM_INSTANCES)
    async with watching_relief(url, crowd.begin()) as samples, asyncio.TaskGroup() as group:
        calm = group.create_task(crowd.visit(scale.num_users, 0.0))
        more = scale.num_spike_users - scale.num_users
        group.create_task(crowd.visit(more, scale.spike_s, scale.calm_s))
        while not (calm.done() or is_at_end(samples, crowd.now_s(), scale)):
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(scale.after_s)
        crowd.stop()
    return crowd.records, samples, await read_totals(url)


def is_at_end(samples: Sequence[ReliefSample], now_s: float, scale: ReliefScale) -> bool:
    """Whether all layers are back after the spike, or the scene need not wait for them."""
    if now_s < scale.calm_s:
        return False
    is_undropped = all(sample.phase == SOLO for sample in samples)
    return has_restored(samples) or now_s >= scale.give_up_s or (is_undropped and now_s >= scale.calm_s + NO_DROP_S)


def summarise(
    records: Sequence[RequestRecord], samples: Sequence[ReliefSample], totals: ReliefTotals
) -> dict[str, Any]:
    """The scene in numbers, and the data of the picture."""
    sent = sorted(records, key=lambda record: record.sent_s)
    return {
        "blocks": {
            "before": samples[0].blocks if samples else 0,
            "dropped": max((sample.blocks for sample in samples if sample.phase == "pipelined"), default=None),
            "most_used": max((sample.used_blocks for sample in samples), default=0),
        },
        "totals": asdict(totals),
        "completed": sum(record.error is None for record in records),
        "failed": sum(record.error is not None for record in records),
        "spans": find_spans(samples),
        "samples": to_columns(samples, ReliefSample),
        "requests": {
            "sent_s": [record.sent_s for record in sent],
            "ttft_s": [record.token_times_s[0] - record.sent_s if record.token_times_s else None for record in sent],
        },
    }


def runs_of(records: Sequence[RequestRecord], model: str, seed: int, scale: ReliefScale) -> list[Run]:
    """A benchmark result for the requests that were sent before the spike, in it, and after it."""
    begins = (0.0, scale.spike_s, scale.calm_s, float("inf"))
    users = (scale.num_users, scale.num_spike_users, scale.num_users)
    runs = []
    for phase, from_s, to_s, num_users in zip(PHASES, begins, begins[1:], users, strict=False):
        part = [shifted(record, -from_s) for record in records if from_s <= record.sent_s < to_s]
        info = RunInfo(
            backend="openai",
            model_id=model,
            tokenizer_id=model,
            max_concurrency=num_users,
            seed=seed,
            config={"users": num_users, **asdict(scale)},
            hardware=hardware_report("cpu"),
        )
        runs.append((phase, benchmark_result(sorted(part, key=lambda record: record.sent_s), info)))
    return runs


def describe_drop(cluster: Mapping[str, Any]) -> str:
    """A sentence or two about the drop and the restore."""
    totals, blocks = cluster["totals"], cluster["blocks"]
    if not totals["num_drops"]:
        return "No layer was dropped: memory was not short for long enough on this machine."
    restored = (
        f"All layers were back {totals['restored_s'] / totals['num_restores']:.2f} s after the decision to restore."
        if totals["num_restores"]
        else "Layers were not back before the demo ended."
    )
    return (
        f"{blocks['before']} KV blocks became {blocks['dropped'] or '-'}. They could be used "
        f"{totals['usable_s'] / totals['num_drops']:.2f} s after the decision to drop, and all KV had moved after "
        f"{totals['dropped_s'] / totals['num_drops']:.2f} s. {restored} In both changes {totals['num_carried']} "
        f"requests went on with their KV, and {totals['num_recomputed']} were computed again; "
        f"{cluster['failed']} failed."
    )


NUM_INSTANCES = 2
BLOCK_TOKENS = 16
DTYPE = "bfloat16"
POOL_MARGIN = 1.08
"""Factor on KV memory: an engine maps only whole quanta of blocks, at most as many as its memory holds."""
SILENCE_S = 2.0
"""``--instance-timeout``: twice the default: both instances, the router and the users may share two cores."""
NUM_PROMPTS = 600
LENGTH_SCALE = 8.0
"""Factor on chat-like lengths, so large that nearly all prompts are cut at ``max_input``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReliefScale:
    """The times and sizes of the scene.

    More users start at ``spike_s``, and send no further requests after ``calm_s``; ``num_spike_users`` includes the
    first ones. The scene ends ``after_s`` after the restore, or at ``give_up_s``. ``pool_blocks`` are those of an
    instance. Nearly all prompts have ``max_input`` tokens, and answers from half of ``max_output`` on.
    """

    spike_s: float
    calm_s: float
    give_up_s: float
    after_s: float
    num_users: int
    num_spike_users: int
    pool_blocks: int
    max_input: int = 176
    max_output: int = 64


FULL_RELIEF = ReliefScale(
    spike_s=12.0, calm_s=37.0, give_up_s=110.0, after_s=8.0, num_users=6, num_spike_users=24, pool_blocks=96
)
QUICK_RELIEF = ReliefScale(
    spike_s=4.0, calm_s=14.0, give_up_s=60.0, after_s=3.0, num_users=4, num_spike_users=15, pool_blocks=64
)


def relief_requests(tokenizer: PromptTokenizer, seed: int, scale: ReliefScale) -> list[LoadRequest]:
    """Requests of nearly equal size, so that KV is proportional to users. Answers differ: users are not in step."""
    spec = WorkloadSpec(
        request_rate=math.inf,
        num_prompts=NUM_PROMPTS,
        seed=seed,
        length_scale=LENGTH_SCALE,
        max_input=scale.max_input,
        ignore_eos=True,
    )
    rng = Random(seed)
    half = scale.max_output // 2
    return [replace(one, max_tokens=rng.randint(half, scale.max_output)) for one in build(spec, tokenizer)]


def serve_words(model: str, seed: int, scale: ReliefScale, token_bytes: int) -> list[str]:
    """The words of ``serve`` and its flags; a token has ``token_bytes`` of KV."""
    kv_memory = round(scale.pool_blocks * BLOCK_TOKENS * token_bytes * POOL_MARGIN)
    return [
        *("serve", model, "--port", "0", "--instances", str(NUM_INSTANCES), "--relief", "drop"),
        *("--policy", "fcfs", "--swap", "none", "--dtype", DTYPE, "--seed", str(seed)),
        *("--kv-memory", str(kv_memory), "--block-tokens", str(BLOCK_TOKENS)),
        *("--max-model-len", str(scale.max_input + scale.max_output), "--instance-timeout", str(SILENCE_S)),
    ]
