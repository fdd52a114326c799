"""Reports of a run: metrics, logs, plots."""
