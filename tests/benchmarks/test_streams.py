"""The table of streams beside llama.cpp, and llama.cpp's loop over a library that is made up."""

import ctypes

import numpy as np
import pytest

from benchmarks.peers.fleet import Way
from benchmarks.peers.llama_cpp_library import Batch
from benchmarks.peers.llama_cpp_peer import LlamaCpp
from benchmarks.peers.streams import shown, table
from benchmarks.peers.worker import Server

VOCAB_SIZE = 97


def next_token(tokens):
    """Depend on every token and on its place."""
    return sum((i + 3) * token for i, token in enumerate(tokens)) % VOCAB_SIZE


def generated(prompt, n):
    tokens = [*prompt]
    for _ in range(n):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Library:
    """A model whose KV is its tokens."""

    def __init__(self, num_sequences):
        self.stored = [[] for _ in range(num_sequences)]
        self.steps = []  # the number of tokens of each

    def llama_memory_seq_rm(self, _memory, sequence, start, end):
        assert end == -1
        del self.stored[sequence][start:]
        return True

    def llama_decode(self, _context, batch):
        self.logits = {}
        self.steps.append(batch.n_tokens)
        for row in range(batch.n_tokens):
            assert batch.n_seq_id[row] == 1
            tokens = self.stored[batch.seq_id[row][0]]
            assert batch.pos[row] == len(tokens)
            tokens.append(batch.token[row])
            if batch.logits[row]:
                logits = (ctypes.c_float * VOCAB_SIZE)()
                logits[next_token(tokens)] = 1.0
                self.logits[row] = logits
        return 0

    def llama_get_logits_ith(self, _context, row):
        return ctypes.addressof(self.logits[row])


@pytest.fixture
def peer():
    """llama.cpp's loop for three sequences, eight tokens a step."""
    made = LlamaCpp.__new__(LlamaCpp)
    made.lib, made.context, made.memory = Library(3), None, None
    made.budget, made.vocab_size, made.argmax = 8, VOCAB_SIZE, np.argmax
    made.kept = [[] for _ in range(3)]
    ids = [(ctypes.c_int32 * 1)() for _ in range(8)]
    made.batch = Batch(
        token=(ctypes.c_int32 * 8)(),
        pos=(ctypes.c_int32 * 8)(),
        n_seq_id=(ctypes.c_int32 * 8)(),
        seq_id=(ctypes.POINTER(ctypes.c_int32) * 8)(
            *[ctypes.cast(x, ctypes.POINTER(ctypes.c_int32)) for x in ids]
        ),
        logits=(ctypes.c_int8 * 8)(),
    )
    return made


def test_sequences_are_batched_and_continue_with_their_kv(peer):
    prompts = [[5, 6, 7], [9] * 20, [1, 2]]
    server = Server("llama_cpp")
    server.system = peer
    out = server.phases(prompts, 4)
    assert out["tokens"] == [generated(prompt, 4) for prompt in prompts]
    # 25 tokens of prompts, no token twice, then three steps of three sequences.
    assert peer.lib.steps == [8, 8, 8, 1, 3, 3, 3]
    # A prompt that parts from the last one, one that repeats it, and one that is its beginning.
    others = [[5, 6, 8, 9], [9] * 20, [1]]
    tokens, _ = peer.run(others, [2, 2, 2], None)
    assert tokens == [generated(prompt, 2) for prompt in others]
    assert peer.lib.steps[7:] == [2 + 1 + 1, 3]


def test_the_table_has_medians_and_ratios():
    def run(prefill_s, decode_s, peak):
        return {"prefill_s": prefill_s, "decode_s": decode_s, "peak_rss_mib": peak}

    ours, theirs, alone = Way("paged", "int8"), Way("llama_cpp", "Q8_0"), Way("paged", "bfloat16")
    runs = {
        8: {ours: [run(9, 2.0, 999)], theirs: [run(9, 4.0, 1)], alone: [run(9, 9, 9)]},
        1: {
            ours: [run(1.0, 1.0, 400.0), run(0.5, 1.0, 500.0), run(0.1, 1.0, 300.0)],
            theirs: [run(2.0, 0.5, 100.0)],
            alone: [run(1.0, 1.0, 1.0)],
        },
    }
    rows = table(runs, {ours: [1.0, 3.0], theirs: [1.0], alone: [1.0]}, 512, 128)
    assert [row["way"] for row in rows] == ["paged-int8", "llama_cpp-Q8_0", "paged-bfloat16"]
    assert rows[0]["ratios"] == {
        "prompt/s": 4.0,
        "decode/s 1": 0.5,
        "decode/s 8": 2.0,
        "load s": 0.5,
        "peak MiB": 0.2,
    }
    assert (rows[0]["prompt/s"], rows[0]["decode/s 8"], rows[0]["peak MiB"]) == (1024, 8 * 127 / 2, 500)
    assert rows[1]["ratios"] == rows[2]["ratios"] == {}
    assert shown(rows[0])["prompt/s"] == "1,024 (4.00)"
    assert shown(rows[1])["peak MiB"] == "100"
