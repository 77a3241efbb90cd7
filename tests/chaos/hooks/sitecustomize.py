"""Imported by each Python process with this folder in its PYTHONPATH: the router of a chaos run and its children."""

import os
import sys
import traceback

try:
    from tests.chaos.group_hooks import install

    install(sys.orig_argv)
except BaseException:  # Python would go on without the hooks
    traceback.print_exc()
    os._exit(70)
