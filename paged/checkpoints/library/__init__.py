"""Models by name: the entries of models.toml, and what is in the cache of the hub."""
