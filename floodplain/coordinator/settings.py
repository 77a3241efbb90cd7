"""The flags of a coordinator; light to import, because the command line is built from it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from floodplain.core.errors import UserError
from floodplain.core.flags import check_between, flag
from floodplain.files.reading import user_folder
from floodplain.leases.rules import (
    FORGET_AFTER_S,
    LEAST_LEASE_BYTES,
    MAX_BORROWED_BYTES,
    MAX_LEASES,
    MAX_LEASES_ON_DEVICE,
    LeaseLimits,
)
from floodplain.web.address import split_url
from floodplain.web.limits import KEEP_ALIVE_HELP, KEEP_ALIVE_S, MAX_CONNECTIONS_HELP, check_connection_flags

DEFAULT_URL = "http://127.0.0.1:8100"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """The coordinator's own flags. UserError, which names the flag, if a value is out of its range."""

    host: str = flag("127.0.0.1", "address to listen on")
    port: int = flag(8100, "port to listen on; 0 takes a free one")
    store: str | None = flag(
        None,
        "sqlite:///FILE, or postgresql://USER@HOST/NAME for several coordinators "
        "(default: a file of its own in $XDG_STATE_HOME/floodplain)",
        metavar="URL",
    )
    token_file: Path | None = flag(None, "tokens of /v1, a line TOKEN or ROLE NAME TOKEN each, mode 0600")
    url: str | None = flag(None, "where others reach this coordinator (default: where it listens)", metavar="URL")
    placement: Path | None = flag(
        None, "grant only along the pairs of this file, of floodplain place --out; SIGHUP reads it anew"
    )
    ttl: float = flag(10.0, "seconds of silence after which a member is taken for dead", metavar="S")
    least_lease: int = flag(LEAST_LEASE_BYTES, "a smaller lease is refused", size=True, metavar="SIZE")
    max_leases: int = flag(MAX_LEASES, "most leases of one consumer", metavar="N")
    max_borrowed: int = flag(MAX_BORROWED_BYTES, "most memory of one consumer", size=True, metavar="SIZE")
    forget_after: float = flag(
        FORGET_AFTER_S, "seconds after which a member that ended and has no leases is forgotten", metavar="S"
    )
    page: bool = flag(True, "show a live page at / of this coordinator")
    max_connections: int | None = flag(None, MAX_CONNECTIONS_HELP, metavar="N")
    keep_alive_timeout: float = flag(KEEP_ALIVE_S, KEEP_ALIVE_HELP, metavar="S")

    def __post_init__(self) -> None:
        check_between(self, "port", 0, 65535)
        if self.url is not None and not (self.url.isascii() and split_url(self.url)):
            raise UserError(f"--url must be like http://HOST:PORT, not {self.url!r}")
        check_between(self, "ttl", 1, 3600, "seconds")
        check_between(self, "max_leases", 1, 2 * MAX_LEASES_ON_DEVICE)
        if self.max_borrowed < self.least_lease:
            raise UserError(f"--max-borrowed must be at least --least-lease, not {self.max_borrowed} bytes")
        check_between(self, "forget_after", 1, 10 * 365 * 86400, "seconds")
        check_connection_flags(self)


def limits_of(config: CoordinatorConfig) -> LeaseLimits:
    """Return the limits that the flags set."""
    return LeaseLimits(
        least_lease_bytes=config.least_lease,
        max_leases=config.max_leases,
        max_borrowed_bytes=config.max_borrowed,
        forget_after_s=config.forget_after,
    )


def default_store() -> str:
    """Create this user's state folder (https://specifications.freedesktop.org/basedir-spec); return a file's URL.

    UserError if it cannot be created.
    """
    base = user_folder("XDG_STATE_HOME", ".local/state")
    if base is None:
        raise UserError("this user has no home folder to keep leases in: give --store sqlite:///FILE")
    folder = base / "floodplain"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {folder} ({error.strerror}): give --store sqlite:///FILE") from error
    return f"sqlite:///{folder / 'leases.db'}"
