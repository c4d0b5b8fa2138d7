"""Models by name: those of models.toml, and those in the cache of the hub."""
