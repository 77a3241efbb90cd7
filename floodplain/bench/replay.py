"""Settings of a benchmark: how to replay the load, and the server under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.web.address import check_base_url
from floodplain.workload.http_target import DEFAULT_TIMEOUT_S
from floodplain.workload.prompts import SEND_HELP, WAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How to replay: the most requests in flight (None: no limit), whether token ids are kept, and no progress."""

    max_concurrency: int | None = None
    save_tokens: bool = False
    quiet: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """Any OpenAI server."""

    base_url: str = flag("http://127.0.0.1:8000", "where the server is")
    model: str = field(metadata={"help": "the name under which it serves the model"})
    tokenizer: str | None = flag(None, "model whose tokenizer makes the prompts (default: the one of --model)")
    api_key_file: Path | None = flag(None, "file with the key to send")
    send: str = flag("auto", SEND_HELP, choices=WAYS)
    timeout: float = flag(DEFAULT_TIMEOUT_S, "seconds that one request may take in all", metavar="S")

    def __post_init__(self) -> None:
        check_base_url(self.base_url)
        if not 0 < self.timeout <= 1e6:
            raise UserError(f"--timeout must be between 0 and 1000000 seconds, not {self.timeout}")
