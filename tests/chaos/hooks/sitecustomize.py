"""Imported by each Python process that has this folder in its PYTHONPATH: the front of a chaos run and its children."""

import os
import sys
import traceback

try:
    from tests.chaos.group_hooks import install

    install(sys.orig_argv)
except BaseException:  # Python would go on without the hooks
    traceback.print_exc()
    os._exit(70)
