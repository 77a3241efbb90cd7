"""Floor 6: the OpenAI-compatible endpoints."""
