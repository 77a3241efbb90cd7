"""Floor 1: requests, blocks, plans, tiers, lifecycle. Pure: the standard library only."""
