"""One optimizer step: the objective, the update, publishing, evaluation."""
