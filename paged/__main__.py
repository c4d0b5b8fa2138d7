"""Runs the command line, for `paged` and for `python -m paged`."""

from .base.interrupts import end_at_ctrl_c


def main() -> None:
    """Run the command line and exit with its code."""
    end_at_ctrl_c()  # before the imports, which take a second
    from .commands.cli import main as run

    run()


if __name__ == "__main__":
    main()
