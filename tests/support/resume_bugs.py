"""Bugs in how requests go on in another engine process, for `tests.model_mutants`."""

from tests.support.family_bugs import Mutant

SENT = "server/sent_request"
DEATHS = "tests/server/test_deaths.py"
ROUND = f"{DEATHS}::test_outputs_are_those_of_a_run_without_deaths"
# Test: (part, name, file, old, new).
BUGS = {
    f"{ROUND}[3]": [
        (
            "tokens",
            "those that were sent are counted again",
            "text/outputs",
            "self._num_tokens_shown = request.inputs.num_given_tokens",
            "self._num_tokens_shown = 0",
        ),
        ("tokens", "the last one is computed again", SENT, "*sample.token_ids]", "*sample.token_ids[:-1]]"),
        (
            "samples",
            "the number of a sample, and so its seed, is lost",
            "engine/request_factory",
            "[output.sample for output in resumed]",
            "range(len(resumed))",
        ),
        ("samples", "ended ones go on", SENT, "            if sample.end is None\n", ""),
        (
            "log-probabilities",
            "their sum begins anew",
            "text/outputs",
            "self._cumulative = request.inputs.given_logprob",
            "self._cumulative = 0.0",
        ),
        (
            "log-probabilities",
            "those of the prompt are reported twice",
            SENT,
            "params = msgspec.structs.replace(params, prompt_logprobs=msgspec.UNSET)",
            "pass",
        ),
        (
            "text",
            "what was held back is lost",
            "text/outputs",
            "self._num_characters_shown = self.transcript.num_visible",
            "self._num_characters_shown = len(self.transcript._text)",
        ),
        ("times", "those of two clocks are mixed", SENT, "if first is None or self._is_first:", "if True:"),
    ],
    f"{DEATHS}::test_what_can_happen_while_an_engine_is_replaced": [
        ("deadline", "it counts from the resumption", SENT, "if self.has_waited and", "if False and"),
        (
            "deadline",
            "it stops while a request waits",
            "server/supervisor",
            "is not None:\n            assert self._loop",
            "is None:\n            assert self._loop",
        ),
    ],
    f"{DEATHS}::test_a_request_that_ends_each_process_ends_four": [
        ("suspects", "they are not alone", "server/supervisor", " or request.is_suspect:", ":"),
        (
            "suspects",
            "deaths alone are forgiven",
            "server/supervisor",
            "if request.suspicion.is_proven:",
            "if False:",
        ),
    ],
    f"{DEATHS}::test_suspicion": [
        ("suspects", "a token clears them", "server/deaths", "return is_long and", "return True or"),
        ("suspects", "steps alone clear them", "server/deaths", "return is_long and", "return"),
    ],
    f"{DEATHS}::test_restarts_for_a_request_that_is_found_do_not_count_others_do": [
        ("suspects", "explained deaths count", "server/deaths", "not (self.is_explained or", "not (False or"),
        ("suspects", "no death counts", "server/deaths", "not (self.is_explained or", "not (True or"),
    ],
    f"{DEATHS}::test_totals_go_on_from_process_to_process": [
        (
            "totals",
            "those of a dead process are lost",
            "scheduler/stats",
            "return replace(self, **totals)",
            "return self",
        ),
    ],
    f"{DEATHS}::test_a_router_forgets_a_replica": [
        ("router", "it remembers what is gone", "routing/router", "holders.discard(replica)", "pass"),
    ],
    "tests/scheduler/test_scheduler.py::test_max_waiting_bounds_the_queue": [
        (
            "queue",
            "it refuses what was accepted",
            "scheduler/scheduler",
            "refusal = None if request.inputs.is_resumed else self.refusal(request)",
            "refusal = self.refusal(request)",
        ),
    ],
    "tests/scheduler/test_policies.py::test_a_resumed_prompt_is_charged_once": [
        ("tenants", "they are charged twice", "scheduler/policies", " or request.inputs.is_resumed):", "):"),
    ],
}
MUTANTS = [Mutant(test, *bug) for test, bugs in BUGS.items() for bug in bugs]
