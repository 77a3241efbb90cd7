"""Models by their names on the Hugging Face hub: downloaded once into the cache that all its tools share."""

from __future__ import annotations

import re
from pathlib import Path

from floodplain.core.errors import UserError

_ID = re.compile(r"(?P<name>\w[\w.-]*/\w[\w.-]*)(?:@(?P<revision>[\w./-]+))?", re.ASCII)

FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
"""What a model needs: configuration, weights, tokenizer. Weights in other formats are not read."""


def is_hub_id(model: str) -> bool:
    """Whether a text has the form ``ORGANISATION/NAME`` or ``ORGANISATION/NAME@REVISION``."""
    return _ID.fullmatch(model) is not None


def hub_folder(model: str) -> Path:
    """The folder of a model of the hub, with all of its files; a progress bar shows what is downloaded.

    The cache, ``HF_TOKEN``, ``HF_HUB_OFFLINE`` and ``HF_ENDPOINT`` are those of ``huggingface_hub``. Raises UserError,
    with what to do, if the hub has no such model or does not give it, or it is not in the cache and cannot be fetched.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    found = _ID.fullmatch(model)
    assert found is not None
    name, revision = found["name"], found["revision"]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=FILES))
    except GatedRepoError:
        problem = f"it wants its licence accepted at https://huggingface.co/{name}, and HF_TOKEN set"
    except RepositoryNotFoundError:
        problem = "there is none of this name, or it is private and HF_TOKEN is not set"
    except RevisionNotFoundError:
        problem = f"it has no revision {revision!r}"
    except HfHubHTTPError as error:
        problem = f"the hub answered {str(error).splitlines()[0]}"
    except OSError as error:  # not reachable, or HF_HUB_OFFLINE is set
        problem = f"it is not in the cache, and cannot be downloaded ({(str(error).splitlines() or ['no reason'])[0]})"
    raise UserError(f"{model!r} is no file or folder here, and as a model of the Hugging Face hub: {problem}")
