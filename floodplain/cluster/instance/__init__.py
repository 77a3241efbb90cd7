"""The instance's end: its connection to the router, one session, an engine or a stage behind it."""
