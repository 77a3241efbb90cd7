"""What an endpoint picker of Kubernetes' inference gateways reads of a model server: the list, and a reader.

Written from two texts: the model server protocol, ``docs/proposals/003-model-server-protocol/README.md`` of
kubernetes-sigs/gateway-api-inference-extension (commit 2b934d0), which has types and meanings; and the default mapping
of llm-d/llm-d-router (``extractor/metrics/factories.go``, commit 08cbacc), which has the names that it reads of vLLM.
The first still calls the use of KV ``vllm:gpu_cache_usage_perc``. Metrics of LoRA are read where a server has them.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

QUEUED, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
KV_USE, CACHE = "vllm:kv_cache_usage_perc", "vllm:cache_config_info"


@dataclass(frozen=True)
class Endpoint:
    """What the picker keeps of one scrape. ``kv_use`` is a fraction."""

    num_queued: int
    num_running: int
    kv_use: float
    block_size: int
    num_blocks: int


def read_endpoint(text: str) -> Endpoint:
    """Read one scrape. AssertionError if a metric is missing, or is no gauge with one sample."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {}
    for name in (QUEUED, RUNNING, KV_USE, CACHE):
        assert name in families, f"the picker misses {name}"
        assert families[name].type == "gauge", name
        (found[name],) = families[name].samples
    labels = found[CACHE].labels
    return Endpoint(
        num_queued=int(found[QUEUED].value),
        num_running=int(found[RUNNING].value),
        kv_use=found[KV_USE].value,
        block_size=int(labels["block_size"]),
        num_blocks=int(labels["num_gpu_blocks"]),
    )
