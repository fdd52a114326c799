"""What is said of a run: metrics, logs, pictures."""
