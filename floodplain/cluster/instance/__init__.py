"""The instance's end: its connection to the router, one life, an engine or a stage behind it."""
