"""Bugs with names and plain mutations: each finds its place, and a share of them is caught."""

from dataclasses import fields
from typing import get_args

import pytest

from paged.architectures.config import ModelConfig
from paged.architectures.families.reading import ROPE_TYPES
from paged.architectures.schemes import Kind
from paged.architectures.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, NormSpec
from paged.kernels.routing import RoutingOptions
from tests.aot import run_compiler
from tests.mutants import NUM_BUGS, NUM_MUTATIONS, chosen, summary, trial_of
from tests.support.fake_cuda import lacks
from tests.support.plain_mutations import mutations
from tests.support.planting import LISTS, Bug, bugs, read
from tests.support.trials import Result, Trial

# The records of a model, and the fields that every family has: a test of any of them fails without one.
RECORDS = (ModelConfig, LayerSpec, AttentionSpec, FeedForwardSpec, ExpertsSpec, RoutingOptions, NormSpec)
SIZES = {
    *("architecture", "vocab_size", "hidden_size", "layers", "norm", "eps", "max_position_embeddings"),
    *("dtype", "layer_bits", "table_bits", "attention", "num_heads", "max_model_len", "has_head"),
    *("num_experts", "num_chosen", "router", "shared_name", "epsilon"),
}
OF_ROPE = {"rotary_dim", "interleaved", "attention_factor", "query_scaling_beta", *ROPE_TYPES} - {"default"}


def test_every_bug_finds_its_place_and_its_test():
    assert len({trial_of(bug).name for bug in bugs()}) == len(bugs())


def test_every_part_has_a_bug():
    def parts(name):
        return {bug.part for bug in read((LISTS / name).read_text())}

    assert (
        parts("models.txt")
        == {field.name for record in RECORDS for field in fields(record)} - SIZES | OF_ROPE
    )
    others = {"gguf", "rules", "checks", "tied", "panels", "triton"}
    assert parts("weights.txt") == {*get_args(Kind)} | others


@pytest.mark.parametrize(
    ("old", "scope", "why"),
    [
        ("no_such_name + $X", "", "occurs 0 times"),
        ("return $X", "", r"occurs \d+ times"),
        ("pass", "NoClass.free", "are 0 functions"),
        ("1 +", "", "invalid syntax"),
    ],
)
def test_a_bug_without_a_place_is_named(old, scope, why):
    with pytest.raises(LookupError, match=rf"bug 'the bug' in blocks/pool.py.*{why}"):
        Bug("blocks/pool.py", "", "the bug", old, "pass", scope, "").change()


def test_what_survives_is_shown_and_counts():
    (bug,) = read("[blocks/pool.py]\nit | len(...) + self.num_cached => 99 @ num_available")
    caught, survivor = (Result(Trial(bug.name, (), bug.change()), found, 0.1) for found in ("a test", ""))
    said, is_too_many = summary([caught, survivor], most=0.49)
    line = "        return len(self._free) + self.num_cached"
    assert (
        f"SURVIVES it\n    paged/blocks/pool.py:{bug.change().line}\n    -{line}\n    +        return (99)"
        in said
    )
    assert said.endswith("\n1 of 2 caught")
    assert is_too_many
    assert not summary([caught, survivor], most=0.5)[1]


def test_plain_mutations_are_python_and_a_sample_is_stable():
    found = mutations("blocks")
    assert len({mutation.name for mutation in found}) == len(found) > 500
    sample = chosen(found, 50, seed=1)
    assert len(sample) == 50
    assert all(mutation.change().text for mutation in sample)
    others = [mutation for mutation in found if mutation in sample or "digest" not in mutation.name]
    assert len(others) < len(found)
    assert chosen(others, 50, seed=1) == sample


@pytest.mark.skipif(lacks() is not None, reason=str(lacks()))
def test_a_share_is_caught():
    """`make mutants` tries all bugs with names."""
    printed = run_compiler("tests.mutants", "--share", "--no-control")  # fails if one survives
    assert f"\n{NUM_BUGS + NUM_MUTATIONS} of {NUM_BUGS + NUM_MUTATIONS} caught" in printed
