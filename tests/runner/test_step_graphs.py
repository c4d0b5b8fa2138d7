"""A replayed step is bitwise equal to the model's forward."""

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig

from paged import SamplingParams
from paged.kernels import reference
from paged.kernels.cpu import backend as numba_kernels
from paged.kernels.cpu.attention.paged_attention import SPLIT_KEYS
from paged.kernels.cpu.launch.graph import Graph, Recorder, column
from paged.kernels.cpu.launch.machine_code import MachineCode
from paged.kernels.cpu.launch.tasks import Launch, Task
from paged.kernels.cpu.target import HAS_DOT
from paged.kernels.steps import NotRecordableError
from paged.model.decoder import Decoder
from tests.support.checkpoints import (
    SHAPE,
    assert_all_free,
    checkpoint,
    new_engine,
    ragged_prompts,
    random_model,
)

CASES = {
    "llama": {},
    "llama-tied-bias": {},
    "llama-linear": {"kv_cache_dtype": "int8"},
    "llama-llama3": {"quantization": "int8"},
    "mistral": {"max_num_seqs": 3},
    "ministral3": {},
    "qwen2-mixed": {"block_size": 8},
    "qwen3": {"quantization": "int8"},
    "phi3": {},
    "phi3-longrope": {},
    "granite": {},
    "granite-swa": {"num_blocks": 96},
    "olmo3": {"num_blocks": 96},
    "gemma2": {"num_blocks": 72},
    "gemma3": {"num_blocks": 120},
    "gemma4": {"num_blocks": 96},
    "gemma4-keys-as-values": {"num_blocks": 96, "kv_cache_dtype": "int8"},
    "gemma4-unified": {"num_blocks": 96},
    "smollm3": {"num_blocks": 48},
    "glm4": {},
    "qwen2_moe": {"quantization": "int8"},
    "gpt_oss": {},
    "nemotron_h_moe": {},
    "falcon_h1": {"quantization": "int8"},
    "gpt2": {},
    "gpt_neox": {"quantization": "int8"},
}
if HAS_DOT:  # elsewhere bfloat16 is left to torch in part
    CASES |= {name: {"dtype": "bfloat16", "deterministic": True} for name in ("demo", "qwen2")}


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("long")
    random_model(LlamaConfig(**{**SHAPE, "max_position_embeddings": 2 * SPLIT_KEYS + 64})).save_pretrained(
        directory
    )
    return directory


def run(engine, prompts, params):
    """Return tokens and log-probabilities, which are equal only if the logits are bitwise equal."""
    outputs = [output.outputs[0] for output in engine.generate(prompts, params, use_tqdm=False)]
    assert_all_free(engine)
    return [(o.token_ids, [{t: p.logprob for t, p in d.items()} for d in o.logprobs]) for o in outputs]


def graphs_of(engine):
    return [graph for graph in engine.runner.graphs._graphs.values() if graph is not None]


@pytest.mark.parametrize("name", CASES)
def test_replay_is_bitwise_equal_to_the_model(name, monkeypatch):
    """While requests come and go, are preempted and share prefixes. Unwritten memory is NaN."""
    prompts = ragged_prompts([1, 9, 40, 17, 3, 40, 60, 33])
    prompts[5] = prompts[2]
    params = [
        SamplingParams(temperature=0.0, max_tokens=n, logprobs=1) for n in (30, 9, 25, 2, 40, 14, 33, 28)
    ]
    options = {"num_blocks": 24, "max_num_batched_tokens": 48, **CASES[name]}
    plain = new_engine(name if name == "demo" else checkpoint(name), **options)
    plain.runner.graphs = None
    expected = run(plain, prompts, params)
    engine = new_engine(name if name == "demo" else checkpoint(name), **options)
    replay, num_replays = Graph.replay, 0

    def poisoned(graph):
        nonlocal num_replays
        num_replays += 1
        engine.runner.graphs._memory.fill_(0xFF)  # NaN
        return replay(graph)

    monkeypatch.setattr(Graph, "replay", poisoned)
    assert run(engine, prompts, params) == expected
    kinds = {key[0] for key, graph in engine.runner.graphs._graphs.items() if graph is not None}
    assert kinds == {False, True}, "prompts and decodes"
    assert num_replays > 20


@pytest.mark.parametrize("name", ["llama-tied-bias", "gpt2", "gpt_neox"])
def test_the_first_step_of_a_model_with_biases_is_recorded(name):
    engine = new_engine(checkpoint(name))
    engine.generate(ragged_prompts([5]), SamplingParams(temperature=0.0, max_tokens=2), use_tqdm=False)
    assert len(graphs_of(engine)) == len(engine.runner.graphs._graphs) == 3  # with that of the start


def test_lengths_over_a_split(long_checkpoint):
    """A sequence that grows by a split needs a new plan, alone and with others."""
    params = SamplingParams(temperature=0.0, logprobs=1, max_tokens=20)
    prompts = ragged_prompts([2 * SPLIT_KEYS - 6, SPLIT_KEYS - 3])
    engines = [new_engine(long_checkpoint, num_blocks=300) for _ in range(2)]
    engines[0].runner.graphs = None
    expected, found = ([run(e, p, params) for p in (prompts[:1], prompts)] for e in engines)
    assert found == expected
    assert len(graphs_of(engines[1])) >= 2


@pytest.mark.parametrize("name", ["llama", "demo"])
def test_other_number_of_threads(name):
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=1)
    engine = new_engine(name if name == "demo" else checkpoint(name))
    before, expected = torch.get_num_threads(), None
    try:
        for num_threads in (1, 2, 7):  # 7 is more than there are cores, so some threads start late
            torch.set_num_threads(num_threads)
            expected = expected or run(engine, ragged_prompts([5, 30, 80]), params)
            assert run(engine, ragged_prompts([5, 30, 80]), params) == expected
    finally:
        torch.set_num_threads(before)
    assert len(graphs_of(engine)) >= 2


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("llama-dynamic", {}, "the angles of its rotary embedding"),
        ("llama", {"dtype": "float16"}, "a part of its linear layers in torch.float16"),
    ],
)
def test_a_model_that_torch_computes_in_part_says_so_at_start(name, options, reason, monkeypatch, caplog):
    """Where it does not say so, each shape of step is tried once, and a warning follows."""
    params = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    engine = new_engine(checkpoint(name), **options)
    assert engine.runner.graphs is None
    assert f"steps are not recorded, because torch computes {reason}" in caplog.text
    expected = run(engine, ragged_prompts([5, 30]), params)
    monkeypatch.setattr(Decoder, "obstacle_to_recording", None)
    engine = new_engine(checkpoint(name), **options)
    assert run(engine, ragged_prompts([5, 30]), params) == expected
    assert not graphs_of(engine)
    assert caplog.text.count("if it were recorded, which failed") == 1


def test_what_torch_computes_is_not_recorded():
    x = torch.rand(3, 32)
    with Recorder():
        numba_kernels.silu_and_mul(x.view(6, 16)).flatten()
    with pytest.raises(NotRecordableError, match="add"), Recorder():
        x + 1


@pytest.mark.parametrize("where", ["__enter__", "__exit__"])
def test_after_an_interrupted_recording_kernels_run(where, monkeypatch):
    x, exits = torch.rand(6, 16), TorchDispatchMode.__exit__

    def interrupted(mode: TorchDispatchMode, *error: object) -> None:
        if where == "__exit__":
            exits(mode, *error)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TorchDispatchMode, where, interrupted)
        with pytest.raises(KeyboardInterrupt), Recorder():
            pass
    assert torch.allclose(numba_kernels.silu_and_mul(x), reference.silu_and_mul(x))


def test_without_memory_to_record_steps_still_run(monkeypatch):
    prompts, params = ragged_prompts([3, 9]), SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    expected = run(new_engine(checkpoint("llama")), prompts, params)

    def full(_: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(Recorder, "__enter__", full)
    engine = new_engine(checkpoint("llama"))
    assert run(engine, prompts, params) == expected
    assert not graphs_of(engine)


def test_steps_are_recorded_at_first_use_and_the_last_used_are_kept(monkeypatch):
    monkeypatch.setattr("paged.runner.step_graphs.MOST_GRAPHS", 2)
    engine = new_engine(checkpoint("llama"), enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    for length, kept in ((5, [8, 5]), (9, [5, 9]), (5, [9, 5]), (17, [5, 17])):
        run(engine, ragged_prompts([length]), params)
        assert [key[1] for key in engine.runner.graphs._graphs] == kept


def test_tensors_needed_at_the_same_time_share_no_memory():
    """Random launches read what was written for them, and the output is intact at the end."""
    generator, task = random.Random(0), Task("test.none", ("out", "first", "second"))
    task.code = MachineCode(0, None, None)  # it is not launched
    saved = 0
    for _ in range(100):
        recorder = Recorder()
        tensors = recorder.allocated = [torch.empty(generator.randint(1, 200)) for _ in range(12)]
        reads = [(0, 0), *((generator.randrange(i), generator.randrange(i)) for i in range(1, 12))]
        for out, read in zip(tensors, reads, strict=True):
            addresses = [tensor.data_ptr() for tensor in (out, *(tensors[i] for i in read))]
            recorder.launches.append(Launch(task, task._layout.pack(0, 0, 1, 0, 0, *addresses)))
        output = generator.randrange(12)
        graph = Graph(recorder, [], [tensors[output]], num_threads=1)
        memory = torch.zeros(graph.num_bytes, dtype=torch.uint8)
        graph.use_memory(memory)
        rows = (
            graph._table[:, [column(name, task) for name in ("out", "first", "second")]] - memory.data_ptr()
        )
        for number, ((to, *sources), out) in enumerate(zip(rows.tolist(), tensors, strict=True)):
            memory[to : to + out.nbytes] = number
            for source, i in zip(sources, reads[number], strict=True):
                assert (memory[source : source + tensors[i].nbytes] == i).all()
        saved += sum(tensor.nbytes for tensor in tensors) > graph.num_bytes
        assert (graph._outputs[0].view(torch.uint8) == output).all()
    assert saved > 90


def test_eager_engine_records_nothing_and_gives_the_same_tokens():
    prompts, params = ragged_prompts([3, 9]), SamplingParams(temperature=0.0, max_tokens=8)
    eager, recorded = (
        new_engine(checkpoint("llama"), attention_backend="numba", enforce_eager=is_eager)
        for is_eager in (True, False)
    )
    assert eager.runner.graphs is None
    assert recorded.runner.graphs is not None
    tokens = [
        [o.outputs[0].token_ids for o in engine.generate(prompts, params, use_tqdm=False)]
        for engine in (eager, recorded)
    ]
    assert tokens[0] == tokens[1]


PARAMS = {
    "greedy": {},
    "filters": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01, "typical_p": 0.9},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.5},
    "log-probabilities": {"logprobs": 3},
    "log-probabilities of drawn tokens": {"logprobs": 3, "temperature": 1.0},
    "log-probabilities of the prompt": {"prompt_logprobs": 3},
    "edits": {"min_tokens": 4, "logit_bias": {5: 1.0}},
}


LARGE = 5 * 4096  # rows of the demo's logits


class _LargeOperations(TorchDispatchMode):
    """Collects the operations of torch that compute or copy many numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_large = isinstance(out, torch.Tensor) and out.numel() >= LARGE
        if is_large and "empty" not in str(func) and not any(r.alias_info for r in func._schema.returns[:1]):
            self.found.add(str(func))
        if is_large and func is torch.ops.aten.copy_.default:
            self.found.add(str(func))
        return out


@pytest.mark.parametrize("name", PARAMS)
def test_steps_leave_no_large_operation_to_torch(name):
    """The threads of torch's OpenMP library would look for work for milliseconds after one."""
    engine = new_engine("demo", max_num_seqs=20)
    prompts = ragged_prompts([40 + i for i in range(19)])
    # Some of them draw their tokens, and some end early.
    params = [SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **PARAMS[name]})] * 10
    params += [SamplingParams(max_tokens=3)] * 9
    engine.generate(prompts, params, use_tqdm=False)
    with _LargeOperations() as large:
        engine.generate(prompts, params, use_tqdm=False)
    assert not large.found
