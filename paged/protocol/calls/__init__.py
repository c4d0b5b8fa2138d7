"""Request bodies as calls of an engine."""
