"""Floor 2: metrics, results, plots, reports."""
