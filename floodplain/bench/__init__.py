"""Load against an engine in this process or against any OpenAI server: what ``floodplain bench`` runs."""
