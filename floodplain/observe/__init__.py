"""Results, plots, reports."""
