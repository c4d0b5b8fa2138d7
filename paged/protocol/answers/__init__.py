"""Response bodies, whole and in chunks."""
