"""Floor 7: many instances behind one endpoint."""
