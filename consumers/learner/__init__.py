"""The parts of the GRPO learner, one idea per file; `grpo.py` next door is the program that joins them."""
