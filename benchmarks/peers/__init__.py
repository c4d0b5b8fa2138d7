"""Other engines compared with this one, each in its own environment and process."""
