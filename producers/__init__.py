"""Where trajectory groups come from: adapters that put the groups of environments into lanes."""
