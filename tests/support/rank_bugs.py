"""Bugs in models of several processes, for `tests.model_mutants`."""

from tests.support.family_bugs import Mutant

DECODER = "model/decoder"
DRIVER = "ranks/driver"
HOST = "runner/batches/host"
MESSAGES = "ranks/messages"
PLAN = "runner/plan"
STAGE = "ranks/stage"
STREAM = "model/stream"
PIPELINE = "tests/ranks/test_pipeline.py::"


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
        (
            "messages",
            "grown block tables are told of the wrong place",
            MESSAGES,
            "starts[row] // block_size, 1)",
            "starts[row] // block_size - 1, 1)",
        ),
        (
            "stages",
            "positions are those of the last step",
            MESSAGES,
            "start + 1 for start",
            "start for start",
        ),
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
    logits("llama-dynamic"): [
        (
            "messages",
            "lengths for rope are those of the last step",
            MESSAGES,
            "length + longer for length",
            "length + longer + 1 for length",
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
            "steps that were given up are computed",
            DRIVER,
            "        self._launched.clear()\n\n    #",
            "\n    #",
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
}

MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
