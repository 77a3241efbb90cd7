"""Floor 2: results, plots, reports."""
