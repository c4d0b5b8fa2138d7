"""How many binaries a model needs: the kernels that batches launch, by what they would compile to."""

import json

import pytest

from tests.aot import run_compiler
from tests.support.absent_gpu import DATA_CENTER_TARGETS
from tests.support.aot_variants import MODELS


@pytest.fixture(scope="module")
def found():
    return json.loads(run_compiler("tests.support.aot_variants"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("target", DATA_CENTER_TARGETS)
def test_batches_do_not_multiply_binaries(found, target, model):
    """One model's batches of any size: a handful of binaries, all of them made by a warm-up."""
    num_kinds = len(MODELS[model][3])  # of layers
    assert found[target]["variants"][model] == {
        "prefill_kernel": num_kinds,
        "decode_kernel": num_kinds,
        "_plan_kernel": num_kinds,
        "_merge_kernel": 1,
        "_rotary_store_kv_kernel": 2,  # and of queries alone
        "_norm_kernel": 8,  # RMS: with residual, without, Gemma 3's, of heads, added, likewise; LayerNorm: 2
        "_activation_kernel": 7,  # silu, clamped, gelu of one tensor and of two; not gated: GELU twice, relu²
        "_route_kernel": 3,  # without groups and with, and for a step that is padded
        "_sort_by_expert_kernel": 2,  # and with adapters
        "_sum_experts_kernel": 2,  # with what is shared and without
        "grouped_linear_kernel": 2,  # few rows for each expert and some
        "_scale_and_cap_kernel": 2,  # of embeddings and of logits
        "_scale_rows_kernel": 1,
        "_copy_blocks_kernel": 1,
        "_short_conv_kernel": 6,  # gated, not gated, and with a bias, each with runs of drafts, too
        "_gated_delta_kernel": 2,  # with runs of drafts, too
        "_mamba2_scan_kernel": 2,  # with runs of drafts, too
        "_gated_norm_kernel": 3,  # before the gate, behind it, and the gate alone
        "_scale_by_sigmoid_kernel": 1,
        "_add_lora_kernel": 2,  # adapters of Q, K and V, and of `down`
        "coded_linear_kernel": 2,  # few rows and some
        "add_splits_kernel": 1,
        "_coded_rows_kernel": 1,
        "_unpack_kernel": 1,
        "_take_parameters_kernel": 1,
        "_penalties_kernel": 1,
        "_maxima_kernel": 2,  # with the deviation of a row and without
        "_coarse_kernel": 1,
        "_gather_kernel": 1,
        "search_kernel": 1,
        "_best_kernel": 2,  # with filters and without
        "_pick_kernel": 1,
    }


@pytest.mark.parametrize("target", DATA_CENTER_TARGETS)
def test_warm_up_compiles_all_that_batches_need(found, target):
    assert found[target]["warm_up"] == {"num_compiled": 21, "ready": 21, "later": []}


@pytest.mark.parametrize("target", DATA_CENTER_TARGETS)
def test_a_listener_is_called_for_every_kernel_that_is_compiled(found, target):
    assert found[target]["compiled"] == [38, 38]


@pytest.mark.parametrize("target", DATA_CENTER_TARGETS)
def test_the_first_product_compiles_for_every_batch(found, target):
    """Of few rows, some, many and most, and the sum of splits; of experts there is nothing to sum or most."""
    assert found[target]["coded"] == [5, 0]
    assert found[target]["experts"] == [3, 0]
