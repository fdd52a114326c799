"""Sources of trajectory groups: adapters that put the groups of environments into lanes."""
