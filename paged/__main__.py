"""Runs the command line for `python -m paged`."""

from .commands.cli import main

main()
