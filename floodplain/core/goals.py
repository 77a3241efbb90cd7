"""The one number behind default goals for TTFT and TPOT."""

from __future__ import annotations

UNLOADED_FACTOR = 5.0
"""A default goal is what a request takes without load, times this: KunServe's factor for chat ("SLO attainment")."""
