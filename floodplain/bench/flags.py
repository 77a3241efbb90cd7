"""The flags of ``floodplain bench``: how to replay the load, and the server under test."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.flags import flag
from floodplain.web.address import check_base_url
from floodplain.workload.http_target import DEFAULT_TIMEOUT_S
from floodplain.workload.prompts import SEND_HELP, WAYS


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """The flags of both benches, beside those of engine and workload. UserError names a wrong one."""

    out: Path | None = flag(None, "write the result to this JSON file")
    plot: bool = flag(False, "draw pictures beside the result (needs --out)")
    save_tokens: bool = flag(False, "keep the output token ids in the result")
    max_concurrency: int | None = flag(None, "send at most so many at a time (the load is then no longer open-loop)")

    def __post_init__(self) -> None:
        if self.plot and self.out is None:
            raise UserError("--plot draws beside the result: give --out FILE too")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise UserError(f"--max-concurrency must be at least 1, not {self.max_concurrency}")


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
