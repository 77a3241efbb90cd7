"""Floor 3: policies. Pure functions from a frozen view to a decision about the next step."""
