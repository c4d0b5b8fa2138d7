"""Every part of a model family, and every format of weights, has a named bug, and a test that notices it."""

from dataclasses import fields
from typing import get_args

from paged.architectures.config import ModelConfig
from paged.architectures.families.reading import ROPE_TYPES
from paged.architectures.schemes import Kind
from paged.architectures.spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, NormSpec
from paged.kernels.routing import RoutingOptions
from tests.aot import run_compiler
from tests.model_mutants import MUTANTS, SHARES
from tests.mutants import planted
from tests.support import family_bugs, format_bugs

# The records of a model, and the fields that every family has: a test of any of them fails without one.
RECORDS = (ModelConfig, LayerSpec, AttentionSpec, FeedForwardSpec, ExpertsSpec, RoutingOptions, NormSpec)
SIZES = {
    *("architecture", "vocab_size", "hidden_size", "layers", "norm", "eps", "max_position_embeddings"),
    *("dtype", "layer_bits", "table_bits", "attention", "num_heads", "max_model_len", "has_head"),
    *("num_experts", "num_chosen", "router", "shared_name", "epsilon"),
}
OF_ROPE = {"rotary_dim", "interleaved", "attention_factor", "query_scaling_beta", *ROPE_TYPES} - {"default"}


def test_every_part_has_a_mutant():
    parts = {field.name for record in RECORDS for field in fields(record)} - SIZES | OF_ROPE
    assert {mutant.part for mutant in family_bugs.MUTANTS} == parts
    parts = {*get_args(Kind), "gguf", "rules", "checks", "tied", "panels", "triton"}
    assert {mutant.part for mutant in format_bugs.MUTANTS} == parts
    for mutant in MUTANTS:
        planted(mutant.file, mutant.name, mutant.old, mutant.new)  # fails for a text that is not there


def test_the_first_share_is_caught():
    """`make mutants` tries all SHARES."""
    printed = run_compiler("tests.model_mutants", "--share", "0")  # fails if one survives
    num_mutants = len(MUTANTS[::SHARES])
    assert printed.endswith(f"{num_mutants} of {num_mutants} caught\n")
