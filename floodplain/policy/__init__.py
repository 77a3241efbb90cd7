"""Policies: pure functions from a frozen view to a decision about the next step."""
