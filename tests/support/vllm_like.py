"""A server with vLLM's metrics and its stream of completions, without a model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

NUM_BLOCKS, BLOCK_TOKENS = 101, 16
TOKEN_S = 0.001

CONFIG = 'vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="101",swap_space="4"} 1.0'
METRICS = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="m"}} {live}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="0",model_name="m"}} 0.0
# HELP {usage} KV-cache usage. 1 means 100 percent usage.
# TYPE {usage} gauge
{usage}{{engine="0",model_name="m"}} {part}
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
{config}
"""
"""The metrics used here, as vLLM 0.11 writes them."""


def metrics_text(
    num_used: int, num_live: int = 0, usage: str = "vllm:kv_cache_usage_perc", config: str = CONFIG
) -> str:
    """Return the text of ``/metrics``. One block is vLLM's own, and is not counted in the usage."""
    return METRICS.format(live=float(num_live), part=num_used / (NUM_BLOCKS - 1), usage=usage, config=config)


class VllmLike(ThreadingHTTPServer):
    """Sends the requested number of tokens; each request holds the blocks of its prompt and its output."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.lock = threading.Lock()
        self.held_blocks: dict[int, int] = {}
        self.most_held = 0


class _Handler(BaseHTTPRequestHandler):
    server: VllmLike

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        with self.server.lock:
            text = metrics_text(sum(self.server.held_blocks.values()), len(self.server.held_blocks))
        self._begin("text/plain; version=0.0.4")
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key, num_tokens = threading.get_ident(), body["max_tokens"]
        with self.server.lock:
            self.server.held_blocks[key] = -(-(len(body["prompt"]) + num_tokens) // BLOCK_TOKENS)
            self.server.most_held = max(self.server.most_held, sum(self.server.held_blocks.values()))
        try:
            self._stream(len(body["prompt"]), num_tokens)
        finally:
            with self.server.lock:
                del self.server.held_blocks[key]

    def _begin(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()

    def _stream(self, num_prompt: int, num_tokens: int) -> None:
        self._begin("text/event-stream")
        for index in range(num_tokens):
            time.sleep(TOKEN_S)
            reason = "length" if index == num_tokens - 1 else None
            self._event({"choices": [{"index": 0, "text": "a", "finish_reason": reason}]})
        self._event({"choices": [], "usage": {"prompt_tokens": num_prompt, "completion_tokens": num_tokens}})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, message: object) -> None:
        self.wfile.write(f"data: {json.dumps(message)}\n\n".encode())
        self.wfile.flush()


@contextmanager
def vllm_like() -> Iterator[VllmLike]:
    """Yield such a server, until the context ends."""
    with VllmLike() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
