"""The commands of `paged`, one a module."""
