"""The flags of a server. Light to import, because the command line is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.flags import check_between, flag
from floodplain.server.auth import KEY_LINE
from floodplain.server.tool_parsers import FORMS
from floodplain.web.address import check_address
from floodplain.web.limits import KEEP_ALIVE_HELP, KEEP_ALIVE_S, MAX_CONNECTIONS_HELP, check_connection_flags

PING_S = 15.0
"""Default silence before a comment: well below the 60 s after which most proxies cut a silent connection."""
METRICS_NAMES = ("floodplain", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's own flags. Raises UserError, which names the flag, if a value is out of its range."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8000, "port to listen on; 0 takes a free one")
    api_key_file: Path | None = flag(
        None, f"keys of /v1, of mode 0600, with a line for each: {KEY_LINE}", metavar="FILE"
    )
    share_prefixes: bool = flag(False, "let requests find prefixes that were computed for other API keys' names")
    drain_timeout: float = flag(30.0, "seconds that running requests get when the server stops", metavar="S")
    ping_interval: float = flag(
        PING_S,
        "seconds of silence after which a stream gets a comment, so that no proxy cuts it; 0: never",
        metavar="S",
    )
    tool_call_parser: str = flag(
        "auto", "how the model writes calls of tools; auto: as its chat template shows", choices=("auto", *FORMS)
    )
    served_model_name: tuple[str, ...] = flag(
        (), "names under which requests may ask for the model, the first for metrics (default: MODEL)", metavar="NAME"
    )
    allowed_origins: tuple[str, ...] = flag(
        (), "origins whose pages may send requests (CORS), such as https://chat.example; * allows all", metavar="ORIGIN"
    )
    page: bool = flag(True, "show a live page at / of this server")
    metrics_names: str = flag(
        "floodplain",
        "names at /metrics; vllm: vLLM's beside ours, for its dashboards and pickers",
        choices=METRICS_NAMES,
    )
    otlp_traces_endpoint: str | None = flag(
        None, "where traces of requests are sent (OTLP over HTTP), e.g. http://localhost:4318/v1/traces", metavar="URL"
    )
    access_log: bool = flag(False, "log method, path, status and duration of every request")
    max_connections: int | None = flag(None, MAX_CONNECTIONS_HELP, metavar="N")
    keep_alive_timeout: float = flag(KEEP_ALIVE_S, KEEP_ALIVE_HELP, metavar="S")

    def __post_init__(self) -> None:
        check_between(self, "port", 0, 65535)
        check_between(self, "drain_timeout", 0, 86400, "seconds")
        if self.ping_interval != 0 and not 0.1 <= self.ping_interval <= 86400:
            raise UserError(f"--ping-interval must be 0, or between 0.1 and 86400 seconds, not {self.ping_interval}")
        if self.share_prefixes and self.api_key_file is None:
            raise UserError("--share-prefixes needs --api-key-file: without keys all requests share prefixes")
        if self.otlp_traces_endpoint is not None:
            check_address("--otlp-traces-endpoint", self.otlp_traces_endpoint, "http://localhost:4318/v1/traces")
        check_connection_flags(self)


DEFAULTS = ServerConfig()
