"""A profile as JSON: the measured need or spare capacity of a model, the machine, and the confidence.

``floodplain profile`` writes it; ``floodplain place`` and ``--lend auto --profile`` read it. ``result`` has what
programs read, with the keys of its kind (``RESULT_KEYS``); everything else is for people.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from floodplain import __version__
from floodplain.core.errors import UserError
from floodplain.files.parsing import listed, parsing, read_json_object

logger = logging.getLogger(__name__)

FORMAT, VERSION = "floodplain-profile", 1
RESULT_KEYS: dict[str, dict[str, type]] = {
    "llm": {"rate_rps": float, "peak_kv_bytes": int, "kv_bytes": int, "free_bytes": int, "role": str},
    "media": {"batch": int, "throughput": float, "peak_bytes": int, "free_bytes": int, "role": str},
    "swap": {"stable_rate_rps": float, "needs_bytes": int},
    "step": {"base_s": float, "decode_s": float, "prefill_token_s": float},
}
"""Keys of ``result`` in each kind of profile, and their types. Rates are requests a second."""
ROLES = ("producer", "consumer")
_MAX_NUMBER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile of a model, or of a callable (``subject``).

    Attributes:
        is_virtual: Whether time and device were computed from a step line, not measured.
        result: The keys of ``RESULT_KEYS``, and perhaps more.
        tries: The tries in order: one mapping each, in the form of the kind.
        errors: How sure the result is: confidence, held-out errors, spread, depending on the kind.
        made_at: The time, in ISO 8601 and UTC.
    """

    kind: str
    subject: str
    machine: str
    is_virtual: bool = False
    settings: dict[str, Any]
    result: dict[str, Any]
    tries: list[dict[str, Any]] = field(default_factory=list)
    errors: dict[str, Any] = field(default_factory=dict)
    made_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    made_by: str = __version__

    @property
    def spare_bytes(self) -> int:
        """R_m of AQUA, section 5: bytes that each of the model's GPUs lends (positive) or needs (negative).

        A consumer's need is in its ``swap`` profile; from other profiles its need is unknown, and counts as 0.
        """
        if self.kind == "swap":
            return -int(self.result["needs_bytes"])
        return int(self.result["free_bytes"]) if self.result.get("role") == "producer" else 0

    def to_json(self) -> dict[str, Any]:
        """The JSON object of its file."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}


def read_profile(path: Path, *kinds: str) -> Profile:
    """The profile in a file, of one of ``kinds`` if given. Raises UserError if it is none of this version and kind."""
    document = read_json_object(path)
    if document.get("format") != FORMAT:
        raise UserError(f"{path} is no profile: write one with floodplain profile --out")
    if document.get("version") != VERSION:
        raise UserError(f"{path} is a profile of version {document.get('version')!r:.20}, and {VERSION} is read here")
    with parsing(path, "is no profile as floodplain profile writes it"):
        profile = Profile(**{item.name: document[item.name] for item in fields(Profile)})
    if str(profile.kind) not in (kinds or RESULT_KEYS):
        wanted = listed(kinds or tuple(RESULT_KEYS))
        raise UserError(f"{path} is a profile of kind {profile.kind!r:.40}; wanted here: {wanted}")
    _check(profile, path)
    return profile


def warn_if_foreign(path: Path, profile: Profile, model: str, machine: str | None) -> None:
    """Log one warning if the profile is of another model or machine than these; a ``machine`` of None is not compared.

    Of a model's path only the last part counts, since its folder may be elsewhere. A dummy has its model's costs.
    """
    if _name_of(profile.subject) != _name_of(model) or _is_elsewhere(profile.machine, machine):
        here = model if machine is None else f"{model} on {machine}"
        words = "%s was measured for %s on %s, and is used for %s: its numbers may be wrong here"
        logger.warning(words, path, profile.subject, profile.machine, here)


def _is_elsewhere(measured: str, machine: str | None) -> bool:
    """Whether a profile was ``measured`` on another machine: an address of a server does not say on which."""
    with_links = f" on {machine}"  # after the names of emulated links
    return machine is not None and "://" not in measured and machine != measured and not measured.endswith(with_links)


def _name_of(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].removeprefix("dummy:").lower()


def _check(profile: Profile, path: Path) -> None:
    for name in ("subject", "machine", "made_at", "made_by"):
        if not isinstance(getattr(profile, name), str):
            raise UserError(f"{path}: {name} must be a text")
    for name, kind in (("settings", dict), ("result", dict), ("errors", dict), ("tries", list)):
        if not isinstance(getattr(profile, name), kind):
            raise UserError(f"{path}: {name} must be a {'mapping' if kind is dict else 'list'}")
    for key, value_type in RESULT_KEYS[profile.kind].items():
        _check_result(key, profile.result.get(key), value_type, path)


def _check_result(key: str, value: Any, kind: type, path: Path) -> None:
    if kind is str:
        if value not in ROLES:
            raise UserError(f"{path}: result.{key} must be {' or '.join(ROLES)}, not {value!r:.40}")
        return
    is_number = isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_NUMBER:
        what = "a whole number" if kind is int else "a number"
        raise UserError(f"{path}: result.{key} must be {what} from 0 on, not {value!r:.40}")
