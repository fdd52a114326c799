"""Consumers of a bridge: learners, trainer adapters, servers; each imports its own heavy dependencies."""
