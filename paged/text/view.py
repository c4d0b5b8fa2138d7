"""View: what an unfinished output shows of a list that grows."""

from collections.abc import Sequence
from typing import TypeVar, overload

T = TypeVar("T")


class View(Sequence[T]):
    """A read-only view of a slice of a list. The list may grow; the items in the view do not change."""

    __slots__ = ("_items", "_start", "_stop")

    def __init__(self, items: Sequence[T], start: int, stop: int) -> None:
        self._items = items
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        places = range(self._start, self._stop)[index]
        if isinstance(places, int):
            return self._items[places]
        return [self._items[place] for place in places]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, View | list) and self[:] == other[:]

    __hash__ = None  # type: ignore[assignment]  # like a list

    def __repr__(self) -> str:
        return repr(self[:])
