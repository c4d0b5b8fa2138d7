"""Bugs in models of several processes, for `tests.model_mutants`."""

from tests.support.family_bugs import Mutant

DECODER = "model/decoder"
DRIVER = "ranks/driver"
GRAPH = "kernels/cpu/launch/graph"
HOST = "runner/batches/host"
MESSAGES = "ranks/messages"
PLAN = "runner/plan"
STAGE = "ranks/stage"
STORED = "model/weights/stored"
STREAM = "model/stream"
MEETING = "tests/ranks/test_meeting.py::"
MORTAL = "tests/ranks/test_mortal_ranks.py::test_tokens_are_those_of_one_process_wherever_ranks_end"
PIPELINE = "tests/ranks/test_pipeline.py::"
WRITTEN = "tests/ranks/test_messages.py::test_what_is_read_is_what_was_written"


def logits(model: str) -> str:
    """Return the test that compares the logits of stages with those of one process."""
    return f"{PIPELINE}test_logits_are_those_of_one_process[{model}]"


def shards(case: str) -> str:
    """Return the test that compares the steps of shards with those of one process."""
    return f"tests/model/test_shards.py::test_each_step_has_the_bits_of_one_process[{case}]"


def codes(name: str) -> str:
    """Return the test that compares shards of weights in codes with one process."""
    return f"tests/model/test_shards.py::test_weights_in_codes_have_the_bits_of_one_process[{name}]"


# Test: (part, name, file, old, new).
BUGS = {
    logits("llama, 4 layers"): [
        ("stages", "what is left to add is not handed on", STREAM, "spec.norms.after_mlp is None", "False"),
        (
            "steps in flight",
            "a batch of other seats is advanced",
            HOST,
            "if not changed.isdisjoint(each.seats)",
            "if False",
        ),
        ("messages", "decodes go on with the tokens of the step before", HOST, "plan.last_tokens or ", ""),
    ],
    logits("gemma4"): [
        (
            "stages",
            "layers get the inputs of others",
            "model/layers/layer_inputs",
            "start = (layer - part.layers.start) * size + own.start",
            "start = own.start",
        ),
        (
            "stages",
            "inputs of earlier layers are sent",
            STREAM,
            "inputs[:, -self.inputs :]",
            "inputs[:, : self.inputs]",
        ),
    ],
    logits("demo in int8"): [
        (
            "heads",
            "a tied head of the last stage is no head",
            DECODER,
            "(part.is_last and config.tie_word_embeddings)",
            "False",
        ),
    ],
    logits("qwen3_moe"): [
        ("stages", "experts are refused without shards", "model/part", "if count == 1:", "if False:"),
    ],
    f"{PIPELINE}test_stages_of_shards_compute_the_same[olmo2]": [
        (
            "shards",
            "what is gathered is in reversed order",
            "ranks/transport",
            "            for rank in self._ranks\n        ]",
            "            for rank in reversed(self._ranks)\n        ]",
        ),
    ],
    shards("mistral-4"): [
        (
            "shards",
            "a repeated KV head is the next one",
            "model/part",
            "head = self.index * num_kv_heads // self.count",
            "head = (self.index + 1) * num_kv_heads // self.count % num_kv_heads",
        ),
    ],
    shards("olmo2-2"): [
        (
            "shards",
            "Q and K are normalised over a shard's own heads",
            "model/layers/attention",
            "heads = of_shards[:, ::num_copies].reshape(len(qkv), -1)",
            "heads = part.repeat(1, len(norm.weight) // part.shape[1])",
        ),
    ],
    shards("ministral3-2"): [
        (
            "shards",
            "a token is looked up at another shard",
            "model/exchanges",
            "token_ids // widest * len(token_ids)",
            "token_ids % shard.count * len(token_ids)",
        ),
        (
            "shards",
            "a recorded exchange reads other memory than the step's",
            GRAPH,
            "recorded.tensors[number] = _placed(memory[at:], recorded.tensors[number])",
            "pass",
        ),
        (
            "shards",
            "a recorded exchange reads the inputs of the first step",
            GRAPH,
            "recorded.tensors[number] = inputs[own]",
            "pass",
        ),
    ],
    codes("awq"): [
        (
            "shards",
            "words begin with a shard's first row",
            STORED,
            "_place_columns(tensor, layout, run, rows[here] - first,",
            "_place_columns(tensor, layout, run, rows[here] - rows[here][0],",
        ),
    ],
    codes("fp8"): [
        (
            "shards",
            "blocks of rows begin with a shard's first row",
            STORED,
            "entries[_as_slice(rows // layout.rows_per_entry)]",
            "entries[_as_slice((rows - rows[0]) // layout.rows_per_entry)]",
        ),
    ],
    f"{WRITTEN}[0]": [
        ("messages", "positions are those of the last step", MESSAGES, "start + 1 for", "start for"),
    ],
    "tests/ranks/test_messages.py::test_a_decode_that_moves_blocks_is_told_as_a_whole": [
        ("messages", "moves of blocks are not told", MESSAGES, "if moves or len", "if len"),
    ],
    f"{WRITTEN}[2]": [
        (
            "messages",
            "lengths for rope do not grow",
            MESSAGES,
            "length + longer for length",
            "length for length",
        ),
    ],
    "tests/ranks/test_messages.py::test_a_decode_of_64_sequences_takes_less_than_a_kilobyte": [
        (
            "messages",
            "grown block tables are told of the wrong place",
            MESSAGES,
            "starts[row] // block_size, 1)",
            "starts[row] // block_size - 1, 1)",
        ),
    ],
    f"{PIPELINE}test_a_prefix_is_saved_while_steps_are_in_flight": [
        (
            "steps in flight",
            "blocks are read before the steps in flight have written them",
            DRIVER,
            "        self.compute_until()\n        self._transport.send_message(self._writer.read_blocks(",
            "        self._transport.send_message(self._writer.read_blocks(",
        ),
    ],
    f"{PIPELINE}test_a_step_that_fails_is_computed_again": [
        (
            "failures",
            "streams that were given up are not expected",
            STAGE,
            "due, num_tokens = self._due.popleft()",
            "due, num_tokens = self._due.pop()",
        ),
        (
            "failures",
            "results of steps that were given up count",
            "engine/core",
            "self._in_flight.clear()",
            "pass",
        ),
    ],
    f"{PIPELINE}test_steps_are_in_flight_together": [
        (
            "steps in flight",
            "one step is in flight",
            "engine/core",
            "if len(self._in_flight) == self.runner.num_in_flight:",
            "if True:",
        ),
        (
            "steps in flight",
            "the first step takes all decodes",
            "scheduler/scheduler",
            "budget = min(budget, self._share_of_decodes())",
            "pass",
        ),
    ],
    f"{PIPELINE}test_uses_give_what_they_give_in_one_process[chunks]": [
        (
            "messages",
            "followers do not get the last tokens",
            PLAN,
            "[request.token_ids[-1] for request in decodes]",
            "[request.token_ids[0] for request in decodes]",
        ),
    ],
    f"{MORTAL}[stages]": [
        (
            "deaths",
            "an engine goes on without a rank that it has lost",
            DRIVER,
            "is_kept = isinstance(error, Exception) and not isinstance(error, RankError)",
            "is_kept = isinstance(error, Exception)",
        ),
    ],
    f"{MEETING}test_versions_options_and_checkpoints_are_compared": [
        ("meeting", "only rank 0 is compared", "ranks/meeting", "enumerate(facts)", "enumerate(facts[:1])"),
    ],
    f"{MEETING}test_a_probe_tells_ranks_that_hang_or_have_ended": [
        ("probe", "ranks that hang are well", "ranks/heartbeat", "> self.timeout_s + GRACE_S", "> 1e9"),
    ],
}

MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
