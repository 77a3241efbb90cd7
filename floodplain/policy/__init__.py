"""Floor 3: who runs next. Pure functions from a frozen view to a decision."""
