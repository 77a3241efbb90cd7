"""Floor 2: what is seen: metrics, results, plots, reports."""
