"""What a use imports: the plain path does not grow with the capabilities beside it."""

import pytest

from tests.house import CHOSEN, COMMANDS, imported_by, imported_by_command

pytest.importorskip("numba")

MOST_MODULES = 130
MOST_LINES = 22_000


@pytest.fixture(scope="module")
def plain():
    found = imported_by("plain")
    compiles = "paged.kernels.cpu.compiling" in found.own  # what was not in the cache
    return imported_by("plain") if compiles else found


def test_a_plain_generation_imports_little(plain):
    own = plain.own - {"paged.kernels.cpu.linear.amx_linear"}  # which processors with AMX need
    assert (len(own) <= MOST_MODULES, plain.num_lines <= MOST_LINES) == (True, True), (len(own), plain[2:])


def among(names, rooms):
    """Return the names that are in one of the rooms, or one themselves."""
    return {name for name in names for room in rooms if name == room or name.startswith(f"{room}.")}


def test_a_capability_is_imported_where_it_is_chosen(plain):
    assert among(plain.all, CHOSEN) == set()


@pytest.mark.parametrize(
    ("use", "needed"),
    [
        ("grammar", "paged.sampling.structured_outputs"),
        ("drafts", "paged.scheduler.drafts"),
        ("int4", "paged.model.weights.coded_panels"),
    ],
)
def test_a_chosen_capability_is_imported_alone(plain, use, needed):
    """The test above would pass if the names had changed."""
    own = imported_by(use).own - plain.own
    assert needed in own
    others = {"grammar": "drafting", "drafts": "json_schema", "int4": "structured_outputs"}
    assert not [name for name in own if others[use] in name]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_command_imports_what_it_uses(arguments):
    found = imported_by_command(arguments)
    assert "paged.commands.cli" in found.own
    assert among(found.all, COMMANDS[arguments]) == set()
