"""The simulation's first worlds. `python -m tests.simulation` runs as many as one likes."""

from itertools import count

from tests.simulation import run_world


def test_every_invariant_holds_for_twenty_thousand_steps():
    done, seeds = 0, count()
    while done < 20_000:
        done += run_world(next(seeds))  # an error names its seed and the command that runs it again
