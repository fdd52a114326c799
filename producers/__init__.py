"""Where trajectory groups come from: adapters of environments, each putting groups into a lane through `shmbridge`."""
