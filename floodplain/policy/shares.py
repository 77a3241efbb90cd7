"""The served work of API keys."""

from __future__ import annotations

from collections import defaultdict

from floodplain.core.served import weighted_work
from floodplain.core.view import View
from floodplain.policy.cfs import prefilled_tokens
from floodplain.policy.ranking import live_rows


def work_of_keys(view: View) -> defaultdict[str, float]:
    """Served work of each key with live requests: its credit, and the prompts and answers of requests in the view."""
    work = defaultdict(float, view.key_credits)
    for row in live_rows(view):
        num_generated = max(0, row.num_generated(view.step))
        work[row.client] += weighted_work(prefilled_tokens(row, view.step), num_generated, row.order_key[0])
    return work
