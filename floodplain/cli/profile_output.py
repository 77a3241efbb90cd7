"""The output of the verbs of ``floodplain profile``."""

from __future__ import annotations

from pathlib import Path

from floodplain.files.profile import Profile
from floodplain.observe.terminal import say


def save_and_show(profile: Profile, out: Path | None, output_format: str) -> None:
    """Write the profile to ``out`` if given, and print it, even if it cannot be saved.

    Args:
        profile: The profile.
        out: A JSON file.
        output_format: ``terminal`` or ``json``.

    Raises:
        WriteFailed: The file cannot be written.
    """
    from floodplain.observe.profile import describe_profile
    from floodplain.observe.strict_json import save_result, to_json

    document = profile.to_json()
    try:
        if out is not None:
            save_result(out, document)
    finally:
        say(to_json(document) if output_format == "json" else describe_profile(profile))
