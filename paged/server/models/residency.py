"""Residency: which models are loaded now, decided by numbers alone. Time is passed in; nothing waits here.

A model's life: absent, loading, loaded, leaving. The models that are not absent take at most `memory` bytes
together. A request waits as a `Ticket` until its model is loaded; a model with users never leaves.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_LOAD_PAUSE_S = 5.0  # after a load that failed, until the next; doubled each time
MOST_LOAD_PAUSE_S = 300.0
# For which the oldest request waits for room before no others are let in at the models that it waits for.
PATIENCE_S = 10.0


class LifeStage(enum.Enum):
    """A step in the life of a model."""

    ABSENT = "absent"
    LOADING = "loading"
    LOADED = "loaded"
    LEAVING = "leaving"


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits for a model, in the order of its arrival."""

    name: str
    since: float


@dataclass(slots=True, eq=False)
class Resident:
    """What is known of a model.

    num_bytes: the memory that it takes from the beginning of its loading to its end.
    keep_alive: seconds without a user after which it leaves; inf for never.
    usual_keep_alive: keep_alive from its next load on, as a request's own ends with the model's stay.
    users: how many requests have it. last_use: when the last one came or ended.
    pause_until: no load begins before, as the last one failed. pause_s: of the next failure.
    unloads: whether it leaves as soon as it has no user, because an operator says so.
    is_stale: whether it was loaded with options that hold no more: it admits no request until it has left.
    """

    name: str
    num_bytes: int
    keep_alive: float
    stage: LifeStage = LifeStage.ABSENT
    users: int = 0
    last_use: float = 0.0
    pause_until: float = -math.inf
    pause_s: float = FIRST_LOAD_PAUSE_S
    unloads: bool = False
    is_stale: bool = False
    usual_keep_alive: float = field(init=False)

    def __post_init__(self) -> None:
        self.usual_keep_alive = self.keep_alive

    @property
    def is_here(self) -> bool:
        """Whether it takes memory."""
        return self.stage is not LifeStage.ABSENT

    @property
    def leaves_at(self) -> float:
        """When it leaves if no request comes; inf for never, and while it has users."""
        if self.stage is not LifeStage.LOADED or self.users:
            return math.inf
        return self.last_use if self.unloads or self.is_stale else self.last_use + self.keep_alive


class Load(NamedTuple):
    """Begin to load a model, and tell `on_loaded` or `on_failed`."""

    name: str


class Unload(NamedTuple):
    """End a model that is loaded and has no user, and tell `on_gone`."""

    name: str


class Admit(NamedTuple):
    """Let a request use its model, which is loaded. Tell `release` when it has ended."""

    ticket: Ticket


Action = Load | Unload | Admit


@dataclass
class Residency:
    """Decides what is loaded, unloaded and admitted.

    memory: bytes that all models together may take.

    After each call that changes something, carry out the actions of `decide`, and call it again at
    `next_time` at the latest.
    """

    memory: int
    models: dict[str, Resident] = field(default_factory=dict)
    waiting: list[Ticket] = field(default_factory=list)

    def know(self, name: str, num_bytes: int, keep_alive: float) -> Resident:
        """Note a model, or what has changed of one. Its bytes change only while it is absent."""
        found = self.models.get(name)
        if found is None:
            found = self.models[name] = Resident(name, num_bytes, keep_alive)
        elif not found.is_here:
            found.num_bytes = num_bytes
        if found.usual_keep_alive != keep_alive:
            found.keep_alive = keep_alive
            found.usual_keep_alive = keep_alive
        return found

    def fits(self, num_bytes: int) -> bool:
        """Return whether a model could ever be loaded."""
        return num_bytes <= self.memory

    @property
    def used(self) -> int:
        """The bytes of the models that are here."""
        return sum(each.num_bytes for each in self.models.values() if each.is_here)

    # Requests

    def ask(self, name: str, now: float) -> Ticket:
        """Queue a request for a model that is known and fits."""
        assert self.fits(self.models[name].num_bytes), "it can never be loaded"
        ticket = Ticket(name, now)
        self.models[name].unloads = False
        self.waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request that waits no longer."""
        if ticket in self.waiting:
            self.waiting.remove(ticket)

    def release(self, name: str, now: float, keep_alive: float | None = None) -> None:
        """Note that a request has ended. keep_alive: of its model until it leaves, if it said so."""
        model = self.models[name]
        assert model.users, f"{name} has no user"
        model.users -= 1
        model.last_use = now
        if keep_alive is not None:
            model.keep_alive = keep_alive

    def pause_left(self, name: str, now: float) -> float:
        """Return the seconds until a model may be loaded again after a failed load; 0 if it may now."""
        model = self.models.get(name)
        return 0.0 if model is None else max(0.0, model.pause_until - now)

    def unload(self, name: str) -> None:
        """Let a model leave as soon as it has no user."""
        self.models[name].unloads = True

    def retire(self, name: str) -> None:
        """Let a model leave as soon as it has no user, and load it anew for the requests that wait."""
        self.models[name].is_stale = self.models[name].is_here

    # What became of actions

    def on_loaded(self, name: str, now: float) -> None:
        """Note that a model is loaded."""
        model = self.models[name]
        assert model.stage is LifeStage.LOADING, f"{name} is {model.stage.value}"
        model.stage = LifeStage.LOADED
        model.pause_s = FIRST_LOAD_PAUSE_S
        model.last_use = now

    def on_failed(self, name: str, now: float) -> list[Ticket]:
        """Note that a load failed. Return the requests that fail with it."""
        model = self.models[name]
        assert model.stage is LifeStage.LOADING, f"{name} is {model.stage.value}"
        self._leave(model)
        self.pause(name, now)
        failed = [each for each in self.waiting if each.name == name]
        self.waiting = [each for each in self.waiting if each.name != name]
        return failed

    def pause(self, name: str, now: float, *, grows: bool = True) -> None:
        """Note that a model cannot be loaded for a while, longer each time unless `grows` is False."""
        model = self.models[name]
        model.pause_until = now + model.pause_s
        if grows:
            model.pause_s = min(2 * model.pause_s, MOST_LOAD_PAUSE_S)

    def on_gone(self, name: str) -> None:
        """Note that a model has left."""
        model = self.models[name]
        assert model.stage is LifeStage.LEAVING, f"{name} is {model.stage.value}"
        self._leave(model)

    @staticmethod
    def _leave(model: Resident) -> None:
        model.stage = LifeStage.ABSENT
        model.unloads = False
        model.is_stale = False
        model.keep_alive = model.usual_keep_alive

    # Decisions

    def decide(self, now: float) -> list[Action]:
        """Return what is to be done now, each action once."""
        actions: list[Action] = [*self._admit(now), *self._expire(now)]
        for name in self._wanted():
            model = self.models[name]
            if model.is_here:
                continue
            if self.used + model.num_bytes <= self.memory:
                model.stage = LifeStage.LOADING
                actions.append(Load(name))
                continue
            # Room is made for one model at a time, the one whose request is the oldest. Others wait behind
            # it, so that none of them takes the room.
            actions += self._make_room(model.num_bytes)
            break
        return actions

    def next_time(self, now: float) -> float:
        """Return when `decide` may have something to do though nothing happens; inf for never."""
        times = [model.leaves_at for model in self.models.values()]
        claimed = self._claims(math.inf)
        if claimed and self.waiting:
            times.append(self._first_absent().since + PATIENCE_S)
        return max(now, min((time for time in times if time > now), default=math.inf))

    def _wanted(self) -> Iterator[str]:
        """Yield the models that requests wait for, by the oldest request."""
        return iter(dict.fromkeys(ticket.name for ticket in self.waiting))

    def _admit(self, now: float) -> Iterator[Admit]:
        claimed = self._claims(now)
        is_behind = False  # the request that claims them
        for ticket in [*self.waiting]:
            model = self.models[ticket.name]
            is_behind = is_behind or not model.is_here
            if model.is_stale or (is_behind and ticket.name in claimed):
                continue
            if model.stage is LifeStage.LOADED:
                model.users += 1
                model.last_use = now
                self.waiting.remove(ticket)
                yield Admit(ticket)

    def _expire(self, now: float) -> Iterator[Unload]:
        wanted = {*self._wanted()} - self._claims(now)
        for model in self.models.values():
            if model.leaves_at <= now and (model.is_stale or model.name not in wanted):
                model.stage = LifeStage.LEAVING
                yield Unload(model.name)

    def _make_room(self, num_bytes: int) -> Iterator[Unload]:
        """Let the least recently used models leave that have no users, until there will be room enough."""
        free = self.memory - self.used
        leaving = sum(each.num_bytes for each in self.models.values() if each.stage is LifeStage.LEAVING)
        idle = [each for each in self.models.values() if each.stage is LifeStage.LOADED and not each.users]
        for model in sorted(idle, key=lambda each: each.last_use):
            if free + leaving >= num_bytes:
                return
            leaving += model.num_bytes
            model.stage = LifeStage.LEAVING
            yield Unload(model.name)

    def _first_absent(self) -> Ticket:
        return next(each for each in self.waiting if not self.models[each.name].is_here)

    def _claims(self, now: float) -> set[str]:
        """Return the models that let no request in, as an older request has waited too long for their room.

        A model that always has users would otherwise keep all others out for ever.
        """
        absent = [each for each in self.waiting if not self.models[each.name].is_here]
        if not absent or now - absent[0].since < PATIENCE_S:
            return set()
        missing = self.models[absent[0].name].num_bytes - (self.memory - self.used)
        missing -= sum(each.num_bytes for each in self.models.values() if each.stage is LifeStage.LEAVING)
        claimed = set[str]()
        present = [
            each for each in self.models.values() if each.stage in (LifeStage.LOADED, LifeStage.LOADING)
        ]
        for model in sorted(present, key=lambda each: (each.users > 0, each.last_use)):
            if missing <= 0:
                break
            missing -= model.num_bytes
            claimed.add(model.name)
        return claimed

    def check(self) -> None:
        """Every model is within the memory, only loaded ones have users, and those that wait are known."""
        assert self.used <= self.memory, f"{self.used} of {self.memory} bytes are used"
        for model in self.models.values():
            assert model.users >= 0, f"{model.name} has {model.users} users"
            assert not model.users or model.stage is LifeStage.LOADED, f"{model.name} is {model.stage.value}"
        assert {each.name for each in self.waiting} <= self.models.keys()
