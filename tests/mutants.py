"""Mutation tests: seeded bugs that the simulation or a test must catch.

    python -m tests.mutants             # all of them: a table, and exit code 1 if one survives
    python -m tests.mutants --all       # the findings of both the simulation and the tests
    python -m tests.mutants copy fair   # only mutants with one of these words in their names

A mutant replaces one text, which must occur exactly once, by another in a copy of the package. Worlds of the
simulation and the tests that need only Python run on that copy until one fails; for a mutant of `sampling`,
the tests of the sampler do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TIME_LIMIT_S = 60
TESTS = [
    "tests/blocks/test_block_pool.py",
    "tests/blocks/test_block_manager.py",
    "tests/scheduler/test_scheduler.py",
    "tests/scheduler/test_drafts.py",
    "tests/scheduler/test_preemption.py",
    "tests/scheduler/test_held.py",
    "tests/scheduler/test_policies.py",
    "tests/server/test_limits.py",
    "tests/ranks/test_messages.py",
]
SAMPLING_TESTS = ["tests/sampling/test_draft_rows.py"]
WORLDS = """
import sys
from tests.simulation import run_world
for seed in range(*map(int, sys.argv[1:])):
    try:
        run_world(seed)
    except AssertionError as error:
        sys.exit(f"world {seed}: {str(error).split('): ', 1)[1]}")
"""
# In this order the whole takes the least time: most mutants fail in the first worlds.
LOOKS = (("worlds", 0, 16), ("tests",), ("worlds", 16, 100))
LOOKS_AT_SAMPLING = (("tests of sampling",),)

# File: (name, old, new).
MUTANTS = {
    "blocks/pool": [
        ("free gives back what others hold", "if count == 1:", "if count >= 1:"),
        ("free skips the decref", "refcounts[block] = count - 1", "refcounts[block] = count"),
        ("new blocks have the draft model's K and V", "self.drafted.difference_update(blocks)", "pass"),
        ("share skips the incref", "self._refcounts[block] += 1", "pass"),
        ("allocation is not all or nothing", "if n > len(self._free) + self.num_cached:", "if n > 99:"),
        ("the salt is not compared", "if not blocks and self._namespaces", "if False and self._namespaces"),
        ("a salt outlives its block", "self._namespaces.pop(block, None)", "pass"),
        ("tokens are not compared", "tokens[at : at + size] != data[start : start + size]", "False"),
        (
            "predecessors are not compared",
            "if block is None or parents[block] != previous:",
            "if block is None:",
        ),
        (
            "predecessors are not noted",
            "self._parents[block] = parent",
            "self._parents[block] = 0",
        ),
        ("match takes a block too many", "chain.digests[:num_blocks]", "chain.digests[: num_blocks + 1]"),
        (
            "layer groups share digests",
            "return digest - digest % self._num_groups + group",
            "return digest",
        ),
        ("the same is cached twice", "                return known\n", "                pass\n"),
        ("reuse before the step ends", "if step > self._steps_ended:", "if False:"),
        (
            "deferred blocks come back a step early",
            "step = self._steps_begun + (block",
            "step = self._steps_begun - 1 + (block",
        ),
        ("keep_for_step forgets", "self._kept.add(block)", "pass"),
        ("kept blocks are kept for ever", "self._kept.clear()", "pass"),
        (
            "a shared block stays deferred",
            "self._deferred_until.pop(block, None)",
            "self._deferred_until.get(block)",
        ),
        (
            "evicts the most recently used",
            "evicted = self._newer[self.num_blocks]",
            "evicted = self._older[self.num_blocks]",
        ),
        (
            "an evicted block keeps its name",
            "self._drop_from_index(evicted)\n",
            "pass\n",
        ),
        ("reset frees what is held", "idle = self._refcounts[block] == 0 and", "idle ="),
    ],
    "blocks/prefix_chain": [
        ("digests skip what came before", "digest = hash_block(digest,", 'digest = hash_block(b"",'),
        ("digests skip the salt", 'hash_block(b"", namespace) if namespace else b""', 'b""'),
        ("a forked chain is the same", "self.digests.copy()", "self.digests"),
    ],
    "blocks/manager": [
        (
            "a wrong guess counts as computed",
            "seq.num_drafted = min(seq.num_drafted, num_tokens)",
            "pass",
        ),
        (
            "every cached block has the draft model's K and V",
            "seq.num_drafted = self._num_drafted(hits[self.widest])",
            "seq.num_drafted = num_blocks * self.block_size",
        ),
        (
            "blocks swapped in have the draft model's K and V",
            "seq.num_drafted = min(seq.num_drafted, known)",
            "pass",
        ),
        ("match serves the last token", "most = (len(token_ids) - 1) //", "most = len(token_ids) //"),
        (
            "registers a token early",
            "num_full = num_tokens //",
            "num_full = (num_tokens + 1) //",
        ),
        ("registers behind what is gone", "(index and not all(map(pool.is_known, seq.last)))", "False"),
        (
            "shared blocks are written",
            "if index < len(table) and pool.refcount",
            "if False and pool.refcount",
        ),
        (
            "what is shared makes room twice",
            "sum(self.pool.refcount(block) == gone[block] for block in blocks)",
            "len(blocks)",
        ),
        ("the copy is lost", "copies.append((source, target))", "pass"),
        ("truncate keeps the trailing blocks", "if len(seq.tables[0]) <= most:", "if True:"),
        (
            "truncate is a block off",
            "            gone = table[most:]",
            "            gone = table[most + 1 :]",
        ),
        (
            "a truncated sequence keeps its capacity",
            "seq.capacity = min(seq.capacity, most * self.block_size)",
            "pass",
        ),
        ("the copy's source is not kept", "pool.keep_for_step(source)", "pass"),
        ("the copy's source is not freed", "pool.free((source,))", "pass"),
        ("the table keeps the copy's source", "seq.tables[group][index] = target", "pass"),
        (
            "a forked parent writes without a look",
            "for either in (seq, copy):",
            "for either in (copy,):",
        ),
        ("a fork takes no reference", "self.pool.share(seq.live(group))", "pass"),
        ("no block for a fork's copy", "missing += 1  # forked", "missing += 0  # forked"),
        ("grows by a block too few", "wanted = self.blocks_for(end)", "wanted = end // self.block_size"),
        (
            "cached hits count as free",
            "needed += -shared if window is None else shared",
            "needed -= len(visible)",
        ),
        ("the window ends a token early", "max(0, start - window + 1)", "max(0, start - window + 2)"),
        ("windows drop nothing", "if first > dropped:", "if False:"),
        (
            "a dropped block is kept",
            "table[dropped:first]\n            gone.reverse()\n            self.pool.free(gone)",
            "table[dropped:first]",
        ),
        ("a dropped block is not noted", "seq.num_dropped[group] = first\n\n", "pass\n\n"),
        ("beginnings are evicted before ends", "blocks.reverse()  # the cache loses", "pass  #"),
        (
            "swap-in reads the wrong host block",
            "zip(saved[len(blocks) :], fresh",
            "zip(saved[: len(fresh)], fresh",
        ),
        ("swap-in loses host blocks", "self.host_pool.free(saved)", "pass"),
        ("swap-in does not keep host blocks", "self.host_pool.keep_for_step(block)", "pass"),
        ("swap-in counts cached blocks twice", "if missing + taken >", "if missing >"),
        (
            "swap-out leaves the last block",
            "num_blocks = self.blocks_for(num_computed)\n",
            "num_blocks = num_computed // self.block_size\n",
        ),
        ("release forgets host blocks", "self.host_pool.free(blocks)", "pass"),
        ("unpin lets go of nothing", "self.pool.free(reversed(blocks))", "pass"),
        (
            "a block leaves with its first pin",
            "self._pinned -= Counter(blocks)",
            "[self._pinned.pop(block, None) for block in blocks]",
        ),
        ("the unpinned stay pinned", "self._pinned -= Counter(blocks)", "pass"),
        ("pins take no room", "self.pool.num_blocks - self.num_pinned", "self.pool.num_blocks"),
    ],
    "scheduler/drafts": [
        ("a wrong draft is accepted", "if drafts[i : i + 1] != [token]:", "if not drafts[i : i + 1]:"),
        (
            "drafts are registered",
            "manager.register(blocks, request.token_ids, start)",
            "manager.register(blocks, request.token_ids + [1] * num, end)",
        ),
        (
            "drafts end a token late",
            "inputs.max_total_tokens - num_tokens - 1",
            "inputs.max_total_tokens - num_tokens",
        ),
        (
            "drafts grow the tables of others",
            "if manager.blocks_taken(blocks, end) <= num_spare_blocks():",
            "if True:",
        ),
        ("drafts cross long_from", "inputs.long_from - num_tokens - 1", "inputs.long_from - num_tokens"),
        (
            "a draft model runs before blocks are moved",
            "(self._in_blocks and schedule.moves_blocks)",
            "False",
        ),
        (
            "a draft model's blocks are kept",
            "manager.truncate(request.blocks, request.num_computed_tokens + 1 + num)",
            "pass",
        ),
        ("the budget is spent twice", "                left -= num\n", "                pass\n"),
        (
            "drafts are not cut at what a grammar refuses",
            "draft.tokens[: grammar.num_allowed(request, draft.tokens)]",
            "draft.tokens",
        ),
        ("sampled rows have no limit", "min(budget, self._max_rows - len(schedule.sampled))", "budget"),
    ],
    "ranks/messages": [
        ("a message that is lost goes unnoticed", "if number != self._number:", "if False:"),
        ("decodes stay where they were", "start + 1 for start", "start for start"),
        ("moves of blocks are not told", "if moves or len", "if len"),
    ],
    "scheduler/scheduler": [
        (
            "the first step in flight takes all decodes",
            "budget = min(budget, self._share_of_decodes())",
            "pass",
        ),
        ("decodes that come later stay in one step", "share = min(", "share = max("),
        ("a tail is kept behind a stop", "if not request.ready:  # finished, or grown long", "if False:"),
        (
            "rejected drafts count as computed",
            "request.num_computed_tokens = request.num_tokens - 1",
            "request.num_computed_tokens = request.num_tokens",
        ),
        (
            "blocks of drafts are kept",
            "self.block_manager.truncate(request.blocks, request.num_computed_tokens)",
            "pass",
        ),
        ("a seat keeps the token of a wrong draft", "self._running.correct(request)", "pass"),
        (
            "drafts take reserved blocks",
            "kept = self._running.num_reserved_blocks() + self._watermark_blocks",
            "kept = 0",
        ),
        (
            "drafts take the blocks of begun prompts",
            "- kept - sum(map(self._running.missing_blocks, begun))",
            "- kept",
        ),
        (
            "any policy is the first",
            "FirstComeFirstServed() if policy is None else policy",
            "policy or FirstComeFirstServed()",
        ),
        (
            "ignores the budget",
            "return self.max_num_batched_tokens - schedule.num_tokens",
            "return self.max_num_batched_tokens",
        ),
        ("ignores the budget of decodes", "if scarce and len(requests) == budget:", "if False:"),
        ("ignores long_prefill_token_threshold", "min(long_prefill_token_threshold or", "min("),
        ("ignores max_num_partial_prefills", "= max_num_partial_prefills or max_num_seqs", "= max_num_seqs"),
        ("ignores max_waiting", "if self.max_waiting is not None and", "if False and"),
        (
            "a failed step reverses what ran",
            "reversed(self._running.remove_all())",
            "self._running.remove_all()",
        ),
        ("the shortest must fit beside a pin", "longest = max(", "longest = min("),
        ("forgets requests that are read ahead", "longest = max(longest, ", "longest = max(1, "),
        ("admits before running requests", "reserved += self._running.num_reserved_blocks()", "reserved = 0"),
        ("what is pinned is still needed", "self._queue.reconsider()  # pinned", "pass  # pinned"),
        (
            "searches the queue without a seat",
            "self._budget_left(schedule) and self._running.num_seats > 0",
            "self._budget_left(schedule)",
        ),
        (
            "makes room for a priority again and again",
            "pool.num_available + pool.num_deferred",
            "pool.num_available",
        ),
        ("siblings are not forked", "self._share(request, sibling, end)", "self._running.join(sibling)"),
        (
            "the aborted keep their blocks",
            "(ended)\n        self.block_manager.release(request.blocks)",
            "(ended)",
        ),
        ("the held compute", "if not request.ready or request.held:", "if not request.ready:"),
        (
            "the released do not wait",
            "self._queue.remove(request)\n            self._queue.push",
            "self._queue.remove",
        ),
        ("one reason is released for all", "request.held & ~reason", "0"),
        (
            "the aborted keep their seats",
            "(self._running if request.status",
            "(self.running if request.status",
        ),
        (
            "after an empty run nothing is computed again",
            "min(request.num_computed_tokens, request.num_tokens - 1)",
            "request.num_computed_tokens",
        ),
        (
            "a token computed again is written into a shared block",
            "self.block_manager.rewind(request.blocks, request.num_computed_tokens)",
            "pass",
        ),
        ("seats do not know of a run", "self._running.resend(request)  # its", "pass  # its"),
        ("a run goes on after a stop token", "if not request.ready:  # finished", "if False:  # finished"),
        ("steps never end", "self._running.end_step()\n        now", "now"),
    ],
    "scheduler/preemption": [
        ("the held keep what others wait for", "request.is_settled and held_at <= since:", "False:"),
        ("the held give way at once", "request.is_settled and held_at <= since:", "request.is_settled:"),
        ("the held keep blocks that others lack", "if candidate.held and candidate.is_settled:", "if False:"),
        (
            "the held in flight are preempted",
            "if candidate.held and candidate.is_settled:",
            "if candidate.held:",
        ),
        ("to be held protects", "if counts and not victim.held:", "if counts:"),
        ("to be above a share protects", "if counts and not victim.held:", "if not victim.held:"),
        ("none gives way to a tenant below its share", "if not fair.any_is_above(now):", "if True:"),
        ("the youngest gives way whatever its share", "if above is not None:", "if False:"),
        ("makes room for a priority beside no request", "room = room.minus(running.claim(request))", "pass"),
        (
            "makes room for a priority with what is shared",
            "for block in blocks})\n        for c",
            "for block in ()})\n        for c",
        ),
        ("makes no room for a priority that needs all", "room = room._replace(num_blocks=math.inf)", "pass"),
        (
            "preempts the oldest",
            "for candidate in reversed(self._running.requests):\n            if candidate is request",
            "for candidate in self._running.requests:\n            if candidate is request",
        ),
        (
            "preempts the protected",
            "if candidate.is_settled and not candidate.protected:\n                return",
            "if candidate.ready:\n                return",
        ),
        (
            "preempts what is in flight",
            "if candidate.is_settled and not candidate.protected:\n                return",
            "if not candidate.protected:\n                return",
        ),
        (
            "equal priorities preempt",
            "if candidate.inputs.priority <= head.inputs.priority:",
            "if candidate.inputs.priority < head.inputs.priority:",
        ),
        (
            "a grown request is queued though it is finished",
            "if request.finish_reason is not None:",
            "if False:",
        ),
        (
            "a grown request runs with stale blocks",
            "request.ready = False\n        self._grown_long.append(request)",
            "pass",
        ),
        (
            "a grown request keeps its namespace",
            "request.blocks = self._manager.open(request.token_ids, request.namespace)",
            "pass",
        ),
        ("preempts without end", "victim.metrics.num_preemptions >= self._max_preemptions", "False"),
        ("the preempted keep their count", "victim.num_computed_tokens = 0", "pass"),
    ],
    "scheduler/running": [
        (
            "a seat is reused while a step in flight has it",
            "(self._kept[-1] if self._kept else self._free).append(seat)",
            "self._free.append(seat)",
        ),
        ("a seat is lost with its step", "self._free += self._kept.popleft()", "self._kept.popleft()"),
        (
            "ignores max_num_seqs",
            "return self.seats.num_free - self._num_reserved_seats",
            "return 99",
        ),
        ("promises seats twice", "self.seats.num_free - self._num_reserved_seats", "self.seats.num_free"),
        ("seats are not released", "self.seats.release(request.seat)", "pass"),
        ("the device is not told of newcomers", "self.newcomers.append(request)\n        bisect", "bisect"),
        (
            "makes room for a priority where prompts wait for blocks",
            "if num_new < missing or request.protected:",
            "if request.protected:",
        ),
        ("sets nothing aside for the protected", "if not self._num_protected:", "if True:"),
        (
            "runs in order of joining",
            "bisect.insort(self.requests, request, key=lambda other: other.rank)",
            "self.requests.append(request)",
        ),
    ],
    "runner/plan": [
        ("grown block tables are not sent", "if schedule.grown:", "if False:"),
        (
            "a newcomer's first blocks are not sent",
            "0 if is_new else start // self.block_size",
            "start // self.block_size",
        ),
        (
            "a block that is filled up is not sent",
            "part.starts[row] // self.block_size)",
            "-(-part.starts[row] // self.block_size))",
        ),
        (
            "newcomers that are not in the step are not sent",
            "absent = [request for request in changed if request not in present]",
            "absent = []",
        ),
        (
            "a seat is told a part's first token",
            "first_entry, count, request.token_ids[-1])",
            "first_entry, count, request.token_ids[start])",
        ),
        (
            "a newcomer's token is not sent",
            "if is_new or row >= part.num_decodes or",
            "if row >= part.num_decodes or",
        ),
    ],
    "scheduler/waiting": [
        ("deadlines outlive their requests", "if len(self._heap) > 2 * num_live + 64:", "if False:"),
        ("ignores deadlines", "while self._heap and", "while False and"),
        ("the held are admitted", "if request.held:", "if False:"),
        (
            "the protected wait behind others",
            "return self._protected[0][1] if self._protected else",
            "return",
        ),
        ("ignores that samples need seats", "need.num_seats > self.num_seats or", "self.num_seats < 1 or"),
        ("ignores that blocks lack", "or need.num_blocks > self.num_blocks", ""),
        ("begins as many prompts as there are", "in_part and self.num_partial <= 0", "False"),
        ("ignores the watermark", "int(watermark * block_manager.pool.num_blocks)", "0"),
        (
            "admits by the first chunk alone",
            "hits or (), num_tokens_ahead(request)",
            "hits or (), computed + 1",
        ),
        (
            "a refused head is never looked at again",
            "if before == state and not room.first_chunk(need, self._max_chunk):",
            "if before == state:",
        ),
        (
            "a refused head is looked at only when blocks come back",
            "(self._num_changes, self._manager.pool.last_serial)",
            "(self._num_changes, 0)",
        ),
        (
            "arrivals are not looked at while blocks lack",
            "(self._num_changes, self._manager.pool.last_serial)",
            "(0, self._manager.pool.last_serial)",
        ),
        (
            "tokens that run still wait",
            "self.num_tokens -= request.num_tokens\n        if request.protected",
            "if request.protected",
        ),
        ("searches the queue each time", "self._refused = (state, need)", "pass"),
    ],
    "scheduler/backlog": [
        ("all parts of a call wait in the queue", "if call not in self._queued:", "if True:"),
    ],
    "scheduler/policy": [
        (
            "the last come first",
            "heapq.heappush(self._heap, (request.rank,",
            "heapq.heappush(self._heap, ((-request.arrival, 0),",
        ),
        ("the removed still count", "self._removed.add(request)", "pass"),
        ("the removed are kept", "if len(self._removed) > len(self._heap) // 2:", "if False:"),
        ("a removed one is kept", "[(r.rank, r) for r in self]", "self._heap"),
        ("one that comes back is there twice", "if request in self._removed:", "if False:"),
    ],
    "scheduler/policies": [
        (
            "tenants at their share are not passed",
            "tenant = self._preferred(lowest, self._holdings())",
            "pass",
        ),
        (
            "a request that ran resets the overtakes",
            "== request.arrival and not request.ran_before",
            "== request.arrival",
        ),
        (
            "a request that ran overtakes",
            "self._num_overtakes += not request.ran_before",
            "self._num_overtakes += 1",
        ),
        ("priorities are inverted", "return (request.inputs.priority,", "return (-request.inputs.priority,"),
        ("the oldest is overtaken for ever", "if self._num_overtakes >= self.MAX_OVERTAKES:", "if False:"),
        ("the shortest match goes first", "return max(oldest,", "return min(oldest,"),
        ("fair: tokens cost nothing", "self._charge(request, self.OUTPUT_COST)", "pass"),
        (
            "fair: prompts cost nothing",
            "self._charge(request, self.INPUT_COST *",
            "self._charge(request, 0.0 *",
        ),
        ("fair: weights do not count", "cost / self._weight_of(tenant)", "cost"),
        (
            "fair: time away earns credit",
            "max(self.service.get(tenant, 0.0), floor)",
            "self.service.get(tenant, 0.0)",
        ),
        ("fair: a tenant that comes back is noted twice", "if tenant not in self._in_heap:", "if True:"),
        ("fair: goes by old counters", "elif counter != self.service[tenant]:", "elif False:"),
        ("fair: the preempted are charged again", "if not (request.ran_before or", "if not (False or"),
        (
            "fair: the preempted go last",
            "self._queues[tenant].move_to_end(request.arrival, last=False)",
            "pass",
        ),
        ("fair: tenants are not forgotten", "if len(self.service) > self._forget_at:", "if False:"),
        (
            "fair: tenants above the floor are forgotten",
            "if t in self._queues or c > floor",
            "if t in self._queues",
        ),
        (
            "fair: the forgotten begin at nothing",
            "self.service[tenant] = self._floor()",
            "self.service[tenant] = 0.0",
        ),
        (
            "fair: the first tenant by name goes first",
            "(self.service[tenant], request.arrival, tenant)",
            "(self.service[tenant], 0, tenant)",
        ),
        (
            "fair: weights stay",
            "def set_weights(self, weights: Mapping[str, float]) -> None:",
            "def unused(self):",
        ),
    ],
    "server/access/limits": [
        ("a reservation is not returned", "self._tokens.change(reserved, num_used, now)", "pass"),
        ("more than reserved costs nothing", "self._tokens.add(num_used - num_reserved, now)", "pass"),
        ("the tokens of the refused count", "num_used = 0", "pass"),
        ("the refused count", "self._requests.change(request, 0, self._clock())", "pass"),
        ("a request is ended twice", "self._is_open = False", "pass"),
        (
            "a limit is one too high",
            "if window.used + amount > limit:",
            "if window.used + amount > limit + 1:",
        ),
        ("requests in progress are not limited", "self.num_open >= most", "False"),
        ("samples are reserved once", "longest * params.num_samples", "longest"),
    ],
    "server/access/windows": [
        ("a use counts on the stroke of a minute", "untils[first] <= now", "untils[first] < now"),
        ("a use that counts no more is changed", "if place >= self._first:", "if True:"),
        ("uses are found by their old places", "place = use - self._num_dropped", "place = use"),
        ("waits for the first use alone", "excess -= self._amounts[place]", "excess = 0"),
    ],
    "drafting/grammar": [
        (
            "a wrong guess comes before what is forced",
            "if guess.tokens[: len(forced)] == forced:",
            "if guess.tokens:",
        ),
    ],
    "sampling/seats": [
        (
            "rows share the state of one grammar",
            "self.sampling.grammar = self.seat.sampling.grammar.copy()",
            "self.sampling.grammar = self.seat.sampling.grammar",
        ),
        (
            "the tokens behind a draft are miscounted",
            "return self.seat.num_output_tokens + self.num_drafts",
            "return self.seat.num_output_tokens + self.num_drafts - 1",
        ),
        ("right drafts are lost", "found.token_ids += found.drafts", "pass"),
        (
            "a row does not see its last draft",
            "self.seat.drafts[: self.num_drafts]",
            "self.seat.drafts[: self.num_drafts - 1]",
        ),
    ],
    "sampling/structured_outputs": [
        (
            "the mask of a row is that of the row before",
            "of_job.append(state.row)",
            "of_job.append(max(0, state.row - 1))",
        ),
    ],
    "sampling/token_history": [
        (
            "history counts drafts",
            "is_counted = num_wrong == num_wrong.index_select(0, firsts)",
            "is_counted = num_wrong >= 0",
        ),
        (
            "history counts the drafts of other rows",
            "for token in row.seat.drafts[: row.num_drafts]",
            "for token in row.seat.drafts",
        ),
        ("a run that was cut short is known", "if run and is_whole else UNKNOWN", "if run else UNKNOWN"),
        (
            "a row behind drafts starts from nothing",
            "counts.index_copy_(0, slots, counts.index_select(0, own_slots))",
            "counts.index_fill_(0, slots, 0)",
        ),
    ],
    "sampling/dry": [
        ("texts keep drafts", "            text.num_known = num_known\n", "            pass\n"),
        ("breakers of drafts stay", "            text.breaker = breaker\n", "            pass\n"),
        ("places of drafts stay", "        self._num_places = num_places\n", "        pass\n"),
        ("repetitions of drafts stay", "self._places[REACH, :num_places] = reach", "pass"),
        ("texts without drafts are charged twice", "if takes_all or not keeps_others:", "if takes_all:"),
        ("texts that wait lose their repetitions", "reach.mul_(token == NO_TOKEN)", "reach.zero_()"),
    ],
    "sampling/logits_edits": [
        (
            "early stops are banned in a request's own row only",
            "positions[row] - q.num_prompt_tokens < p.min_tokens",
            "positions[row] - q.num_prompt_tokens < p.min_tokens and not isinstance(q, DraftRow)",
        ),
    ],
}


def planted(file: str, name: str, old: str, new: str) -> str:
    """Return a file's text with a bug in it."""
    text = (ROOT / "paged" / f"{file}.py").read_text()
    found = text.count(old)
    assert found == 1, f"mutant {name!r} is stale: {old!r} occurs {found} times in {file}.py"
    return text.replace(old, new)


def copy_project(folder: Path) -> None:
    """Copy the package; its kernels and the demo model, which no mutant changes, are links."""
    shutil.copytree(
        ROOT / "paged", folder / "paged", ignore=shutil.ignore_patterns("kernels", "demo", "__pycache__")
    )
    for name in ("kernels", "demo"):
        (folder / "paged" / name).symlink_to(ROOT / "paged" / name)
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))


def run(folder: Path, *arguments: object) -> str | None:
    """Run Python in a copy. Return its output if it fails, "" if not, None if it takes too long."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    try:
        done = subprocess.run(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode not in (0, 1):  # killed or never started, which says nothing about the mutant
        raise RuntimeError(f"exit code {done.returncode} of {arguments}: {done.stderr[-2000:]}")
    return done.stdout + done.stderr if done.returncode else ""


def failure(folder: Path, what: str, *arguments: int) -> str | None:
    """Return the first world or test that fails in a copy; None if none does."""
    if what == "worlds":
        said = run(folder, "-c", WORLDS, *arguments)
    else:
        tests = TESTS if what == "tests" else SAMPLING_TESTS
        said = run(folder, "-m", "pytest", "-qx", "--noconftest", "-p", "no:cacheprovider", *tests)
    if said is None:
        return f"{what} not done after {TIME_LIMIT_S} s"
    if not said:
        return None
    found = re.search(r"^(world \d+: .*)|^(?:FAILED|ERROR) (\S+)", said, re.M)
    if found is None:
        raise RuntimeError(f"it failed, but what did? {said[-2000:]}")
    return found.group(1) or found.group(2)


def _looks_at(file: str | None) -> tuple[tuple[Any, ...], ...]:
    if file is None:
        return LOOKS + LOOKS_AT_SAMPLING
    return LOOKS_AT_SAMPLING if file.startswith("sampling/") else LOOKS


def failures(file: str | None, text: str, all_looks: bool) -> list[str]:
    """Return what fails if a file has this text; for None, what fails without a mutant."""
    found: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        copy_project(Path(name))
        if file is not None:
            (Path(name) / "paged" / f"{file}.py").write_text(text)
        for look in _looks_at(file):
            said = failure(Path(name), *look)
            found += [said] if said else []
            if found and not all_looks:
                break
    return found


def main() -> None:
    """Try every mutant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their names")
    parser.add_argument("--all", action="store_true", help="run everything, even after something has failed")
    args = parser.parse_args()
    chosen = [
        (name, file, planted(file, name, old, new))
        for file, mutants in MUTANTS.items()
        for name, old, new in mutants
        if not args.words or any(word in name for word in args.words)
    ]
    started = time.perf_counter()
    wrong = failures(None, "", all_looks=True)
    if wrong:
        sys.exit(f"no bug is planted and this fails: {'; '.join(wrong)}")
    survivors = []
    for name, file, text in chosen:
        before = time.perf_counter()
        found = failures(file, text, args.all)
        survivors += [] if found else [name]
        print(
            f"{name:42} {time.perf_counter() - before:5.1f} s  {' | '.join(found) or 'SURVIVES'}", flush=True
        )
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught, {time.perf_counter() - started:.0f} s")
    sys.exit(f"not caught: {', '.join(survivors)}" if survivors else 0)


if __name__ == "__main__":
    main()
