"""Many instances behind one endpoint."""
