"""What feeds, data sets and the learner's checkpoints share: the records that a saved state contains."""
