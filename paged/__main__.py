"""`python -m paged` is `paged`."""

from .cli import main

main()
