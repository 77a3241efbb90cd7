"""What a benchmark is told: how to replay the load, and which server to send it to."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How a load is replayed.

    Attributes:
        max_concurrency: Requests under way at a time, at most; None: as the load has them.
        save_tokens: Keep the output token ids in the result.
        quiet: Say nothing meanwhile.
    """

    max_concurrency: int | None = None
    save_tokens: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """Any OpenAI server."""

    base_url: str = field(default="http://127.0.0.1:8000", metadata={"help": "where the server is"})
    model: str = field(metadata={"help": "the name under which it serves the model"})
    tokenizer: str | None = field(
        default=None, metadata={"help": "model whose tokenizer makes the prompts (default: the one of --model)"}
    )
    api_key_file: Path | None = field(default=None, metadata={"help": "file with the key to send"})
