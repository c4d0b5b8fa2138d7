"""This engine beside other people's, each in its own environment and its own process."""
