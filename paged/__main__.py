"""`python -m paged` is `paged`."""

from .commands.cli import main

main()
