"""Requests, blocks, plans, tiers, lifecycle. Pure: the standard library only."""
