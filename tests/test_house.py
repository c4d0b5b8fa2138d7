"""What a use imports: the plain path does not grow with the capabilities beside it."""

import pytest

from tests.house import CHOSEN, imported_by

pytest.importorskip("numba")

MOST_MODULES = 153  # 130 are wanted, and 22,000 lines
MOST_LINES = 23_300


@pytest.fixture(scope="module")
def plain():
    imported_by("plain")  # compiles what is not in the cache
    return imported_by("plain")


def test_a_plain_generation_imports_little(plain):
    assert (len(plain.own) <= MOST_MODULES, plain.num_lines <= MOST_LINES) == (True, True), plain[2:]


def test_a_capability_is_imported_where_it_is_chosen(plain):
    found = {
        name for name in plain.all for chosen in CHOSEN if name == chosen or name.startswith(f"{chosen}.")
    }
    assert found == set()


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
