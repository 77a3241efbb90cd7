"""Former name of ``model.weights``, kept for scripts that import it."""

from __future__ import annotations

import sys

from floodplain.model.weights import gguf_file, open_model

for _module in (gguf_file, open_model):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
