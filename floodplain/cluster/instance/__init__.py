"""The instance's end: its connection to the front, one life, an engine or a stage behind it."""
