"""The device that an engine computes on: which one, its threads, and transfers to and from it."""
