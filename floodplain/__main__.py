"""``python -m floodplain``: the command ``floodplain``."""

from __future__ import annotations

import sys

from floodplain.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
