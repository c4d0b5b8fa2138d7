"""Bugs in models of several processes, for `tests.model_mutants`."""

from tests.support.family_bugs import Mutant

DECODER = "model/decoder"
DRIVER = "ranks/driver"
HOST = "runner/batches/host"
MESSAGES = "ranks/messages"
PLAN = "runner/plan"
STAGE = "ranks/stage"
STREAM = "model/stream"
MEETING = "tests/ranks/test_meeting.py::"
MORTAL = "tests/ranks/test_mortal_ranks.py::test_tokens_are_those_of_one_process_wherever_ranks_end"
PIPELINE = "tests/ranks/test_pipeline.py::"
WRITTEN = "tests/ranks/test_messages.py::test_what_is_read_is_what_was_written"


def logits(model: str) -> str:
    """Return the test that compares the logits of stages with those of one process."""
    return f"{PIPELINE}test_logits_are_those_of_one_process[{model}]"


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
            "messages go on after a new group",
            DRIVER,
            "        self.reset()\n        return None",
            "        return None",
        ),
        (
            "deaths",
            "followers go on with the messages of the last group",
            "ranks/follower",
            "self._reader = MessageReader(",
            "self._reader = getattr(self, '_reader', None) or MessageReader(",
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
