"""The learner's flags."""
