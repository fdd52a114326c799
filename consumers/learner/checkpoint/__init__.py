"""The saved state of a run: checkpoints, consumed records, random generators."""
