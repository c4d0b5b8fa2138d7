"""Which models are loaded: the policy alone, by a clock of the tests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
from dataclasses import replace

import pytest

from paged.checkpoints.library.models_file import ModelEntry
from paged.server.http.failures import HttpError
from paged.server.models.host import Host
from paged.server.models.residency import (
    PATIENCE_S,
    Admit,
    LifeStage,
    Load,
    Residency,
    Ticket,
    Unload,
)
from paged.server.models.weigh import ModelWeight

GB = 10**9


class World:
    """Carries out what a policy decides: loads and unloads take time, and some loads fail."""

    def __init__(
        self, memory: int, sizes: dict[str, int], load_s: float = 2.0, keep_alive: float = 300.0
    ) -> None:
        self.policy = Residency(memory)
        self.now = 0.0
        self.load_s = load_s
        self.failing: set[str] = set()
        self.events: list[tuple[float, int, str, str]] = []
        self.numbers = itertools.count()
        self.admitted: dict[int, float] = {}
        self.users: dict[int, str] = {}
        self.failed: set[int] = set()
        self.num_loads = 0
        self.log: list[str] = []
        self.tickets: list[Ticket] = []
        for name, size in sizes.items():
            self.policy.know(name, size, keep_alive)

    def at(self, delay: float, what: str, name: str) -> None:
        heapq.heappush(self.events, (self.now + delay, next(self.numbers), what, name))

    def ask(self, name: str) -> int:
        ticket = self.policy.ask(name, self.now)
        self.decide()
        self.tickets.append(ticket)  # ids stay unique
        return id(ticket)

    def decide(self) -> None:
        for action in self.policy.decide(self.now):
            match action:
                case Load(name):
                    self.num_loads += 1
                    self.log.append(f"load {name}")
                    self.at(self.load_s, "loaded", name)
                case Unload(name):
                    assert not self.policy.models[name].users
                    self.log.append(f"unload {name}")
                    self.at(0.2, "gone", name)
                case Admit(ticket):
                    assert self.policy.models[ticket.name].stage is LifeStage.LOADED
                    self.admitted[id(ticket)] = self.now - ticket.since
                    self.users[id(ticket)] = ticket.name
        self.policy.check()
        models = self.policy.models.values()
        taken = sum(each.num_bytes for each in models if each.stage is not LifeStage.ABSENT)
        assert taken <= self.policy.memory  # counted without the policy

    def step(self) -> bool:
        """Go on to the next event. Return whether there was one."""
        soonest = self.events[0][0] if self.events else math.inf
        self.now, then = min(soonest, self.policy.next_time(self.now)), self.now
        if self.now == math.inf:
            self.now = then
            return False
        while self.events and self.events[0][0] <= self.now:
            _, _, what, name = heapq.heappop(self.events)
            if what == "loaded" and name in self.failing:
                self.failed |= {id(each) for each in self.policy.on_failed(name, self.now)}
            elif what == "loaded":
                self.policy.on_loaded(name, self.now)
            elif what == "gone":
                self.policy.on_gone(name)
        self.decide()
        return True

    def ended(self) -> set[int]:
        """Return the requests that had their model, and have it no longer."""
        return self.admitted.keys() - self.users.keys()

    def settle(self) -> None:
        while self.events:
            self.step()

    def end(self, ticket: int, keep_alive: float | None = None) -> None:
        self.policy.release(self.users.pop(ticket), self.now, keep_alive)
        self.decide()


def test_the_least_recently_used_idle_model_goes():
    world = World(2 * GB, {"a": GB, "b": GB, "c": GB})
    for name in "abab":
        ticket = world.ask(name)
        world.settle()
        world.end(ticket)
        world.now += 1
    world.ask("c")
    world.settle()
    assert world.log == ["load a", "load b", "unload a", "load c"]


def test_a_model_in_use_never_goes():
    world = World(GB, {"a": GB, "b": GB})
    a = world.ask("a")
    b = world.ask("b")  # while the other one loads, which has taken the memory
    world.settle()
    world.now += 10_000
    world.decide()
    assert world.log == ["load a"]
    world.end(a)
    world.settle()
    assert world.log == ["load a", "unload a", "load b"]
    assert b in world.users


def test_a_flood_on_one_model_does_not_keep_others_out():
    """After a while a model lets nobody in whose room an older request waits for; then all go on."""
    world = World(GB, {"a": GB, "b": GB})
    running = [world.ask("a")]
    world.settle()
    b = world.ask("b")
    asked = world.now
    for _ in range(100):
        world.now += 0.5
        running.append(world.ask("a"))
        done = next((each for each in running if each in world.users), None)
        if done is not None:
            world.end(done)
        if b in world.users:
            break
        world.step()
    assert b in world.users
    assert PATIENCE_S <= world.now - asked < PATIENCE_S + 10
    world.end(b)
    world.settle()
    assert all(each in world.admitted for each in running)


@pytest.mark.parametrize(
    ("keep_alive", "leaves_after"), [(300.0, 300.0), (0.0, 0.0), (math.inf, None)], ids=["5m", "0", "ever"]
)
def test_idle_models_leave_after_keep_alive(keep_alive, leaves_after):
    world = World(GB, {"a": GB})
    ticket = world.ask("a")
    world.settle()
    world.now += 10  # it is not counted from the beginning
    world.end(ticket, keep_alive)
    ended = world.now
    if leaves_after is None:
        assert not world.step()
        return
    world.step()
    assert world.policy.models["a"].stage in (LifeStage.LEAVING, LifeStage.ABSENT)
    assert world.now - ended == pytest.approx(leaves_after, abs=0.21)


def test_a_requests_own_keep_alive_ends_with_the_stay_of_its_model():
    """Else a model that was unloaded by hand, with 0, would be loaded anew for each request from then on."""
    world = World(GB, {"a": GB})
    for keep_alive, stays in ((0.0, False), (None, True)):
        ticket = world.ask("a")
        world.settle()
        world.end(ticket, keep_alive)
        world.settle()
        assert (world.policy.models["a"].stage is LifeStage.LOADED) == stays
    world.policy.know("a", GB, 60.0)  # its options have changed
    assert world.policy.models["a"].keep_alive == 60


def test_a_model_whose_options_change_is_loaded_anew_for_the_next_request():
    world = World(GB, {"a": GB})
    old = world.ask("a")
    world.settle()
    world.policy.retire("a")
    new = world.ask("a")
    world.settle()
    assert new not in world.admitted
    world.end(old)
    world.settle()
    assert new in world.admitted
    assert world.log == ["load a", "unload a", "load a"]
    # One that is being loaded is not used either.
    world.end(new)
    world.policy.unload("a")
    world.decide()
    world.settle()
    world.ask("a")
    world.policy.retire("a")
    world.settle()
    assert world.log[3:] == ["unload a", "load a", "unload a", "load a"]


def test_a_load_that_fails_has_a_pause_that_grows_and_others_run_on():
    world = World(2 * GB, {"a": GB, "bad": GB})
    world.failing.add("bad")
    a = world.ask("a")
    pauses = []
    for _ in range(3):
        bad = world.ask("bad")
        world.settle()
        assert bad in world.failed
        pauses.append(world.policy.pause_left("bad", world.now))
        world.now += pauses[-1]
        assert world.policy.pause_left("bad", world.now) == 0
    assert pauses == [5.0, 10.0, 20.0]
    assert a in world.users
    world.failing.clear()
    good = world.ask("bad")
    world.settle()
    assert good in world.users


def test_an_operator_unloads_what_is_in_use_once_it_is_idle():
    world = World(GB, {"a": GB})
    ticket = world.ask("a")
    world.settle()
    world.policy.unload("a")
    world.decide()
    assert world.policy.models["a"].stage is LifeStage.LOADED
    world.end(ticket, math.inf)
    assert world.policy.models["a"].stage is LifeStage.LEAVING


@pytest.mark.parametrize("seed", range(20))
def test_every_request_of_a_random_load_ends(seed):
    """In floods and by turns, with cancellations and failures, within the memory at every moment."""
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 8) * GB for name in "abcde"[: rng.randint(2, 5)]}
    world = World(
        rng.randint(max(sizes.values()) // GB, 20) * GB,
        sizes,
        load_s=rng.choice([0.5, 3.0, 30.0]),
        keep_alive=rng.choice([0.0, 5.0, 300.0, math.inf]),
    )
    asked: dict[int, object] = {}
    cancelled: set[int] = set()
    left = 300
    while left or asked.keys() - world.users.keys() - world.failed - cancelled - world.ended():
        choice = rng.random()
        if left and choice < 0.5:
            for _ in range(min(left, rng.choice([1, 1, 1, 20]))):
                left -= 1
                name = rng.choice([*sizes])
                if world.policy.pause_left(name, world.now):
                    continue
                asked[world.ask(name)] = None
        elif choice < 0.55 and world.policy.waiting:
            ticket = rng.choice(world.policy.waiting)
            world.policy.cancel(ticket)
            cancelled.add(id(ticket))
            world.decide()
        elif choice < 0.6:
            world.failing ^= {rng.choice([*sizes])}
        elif choice < 0.65:
            name = rng.choice([*sizes])
            world.policy.unload(name)
            world.decide()
        elif world.users and choice < 0.9:
            world.end(rng.choice([*world.users]), rng.choice([None, None, 0.0, 60.0]))
        elif not world.step():
            world.now += rng.random() * 20
            world.decide()
        if not left:
            world.failing.clear()
    assert world.num_loads


class Engine:
    """A model that is loaded; it does nothing."""

    is_dead = False

    async def aclose(self) -> None:
        pass


def test_a_host_refuses_what_never_fits_and_keeps_a_model_as_long_as_it_says():
    sizes = {"small": GB, "large": 3 * GB}

    async def load(*_: object) -> Engine:
        return Engine()

    async def use() -> None:
        host = Host(
            2 * GB,
            weigh=lambda entry: ModelWeight(sizes[entry.name], 1, 1, "so much"),
            load=load,
            keep_alive=0.0,
            most_wait_s=60.0,
        )
        async with host.using(ModelEntry(name="small", checkpoint="x", keep_alive=math.inf)):
            assert host.residency.used == GB
        await asyncio.sleep(0.05)
        assert [*host.loaded] == ["small"]  # it stays for ever, others of this host go at once
        with pytest.raises(HttpError, match=r"large takes 2\.79 GiB \(so much\), and --memory is 1\.86 GiB"):
            async with host.using(ModelEntry(name="large", checkpoint="x")):
                pass
        assert host.unload("small")
        await host.aclose()

    asyncio.run(asyncio.wait_for(use(), 120))


def test_a_host_loads_a_model_anew_whose_entry_has_changed():
    """Its next request waits for those that use the old one, and memory is counted as it then is."""
    old = ModelEntry(name="a", checkpoint="x", line=1)
    new = ModelEntry(name="a", checkpoint="y", keep_alive=7.0)

    async def load(*_: object) -> Engine:
        return Engine()

    async def use() -> None:
        sizes = {"x": GB, "y": 2 * GB}
        host = Host(
            2 * GB,
            weigh=lambda entry: ModelWeight(sizes[entry.checkpoint], 1, 1, "so much"),
            load=load,
            keep_alive=60.0,
            most_wait_s=60.0,
        )
        async with host.using(old) as first, host.using(replace(old, line=9)) as same:
            assert same is first
            waiting = asyncio.ensure_future(host.using(new).__aenter__())
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert await waiting is not first
        assert host.residency.used == 2 * GB
        assert host.residency.models["a"].keep_alive == 7
        await host.aclose()

    asyncio.run(asyncio.wait_for(use(), 120))
