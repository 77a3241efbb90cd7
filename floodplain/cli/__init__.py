"""Floor 7: one verb per file."""
