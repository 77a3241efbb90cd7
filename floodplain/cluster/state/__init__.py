"""The router's tables: live requests with their tokens and placements, and joined instances. No I/O."""
