"""What users of vLLM type works, or says why not; docs/vllm-names.md lists it."""

import asyncio
import dataclasses
import inspect
import json
import pydoc
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paged
from paged import LLM, AsyncLLMEngine, ConfigError, EngineConfig, RequestError, SamplingParams
from paged.base import from_vllm
from paged.base.from_vllm import SECRETS, missing_of, neutral_of
from tests.support.from_vllm import CONFIGS, VLLM, config_rows, method_rows, name_rows
from tests.support.parameter_changes import CHANGES
from tests.support.vllm_examples import NO_FEATURE, OTHERS, RUN


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM("demo", device="cpu", dtype="float32", num_blocks=64)


WRONG = "surely no value of this"


def given(name: str, default):
    """Return vLLM's default as a user would write it."""
    return paged.RequestOutputKind(default) if name == "output_kind" else default


def test_every_name_of_vllm_is_treated_and_no_other():
    rows = [*method_rows(), *name_rows()]
    assert all(row.treatment in ("same", "other", "refused") for row in rows)
    for name, (owner, neutral) in CONFIGS.items():
        ours = {field.name for field in dataclasses.fields(owner)}
        assert not ours & neutral.keys()  # an option that came to exist is no longer neutral
        assert VLLM[name].keys() <= ours | neutral.keys()
        assert len([*config_rows(name)]) == len(VLLM[name])
        assert all(reason for _, reason in neutral.values())
    for row in name_rows():
        if row.treatment == "same" and "." not in row.name:
            assert hasattr(paged, row.name)


def test_a_name_stands_once_in_the_file():
    tables = tomllib.loads(Path(from_vllm.__file__).with_name("vllm.toml").read_text())
    used = set(tables.pop("reasons"))
    for owner, reasons in {**tables.pop("missing"), **tables}.items():
        parts = [part if isinstance(part, dict) else dict.fromkeys(part) for part in reasons.values()]
        names = [name for part in parts for name in (*part, *part.get("empty", ())) if name != "empty"]
        assert len(names) == len({*names}), owner
        used -= reasons.keys()
    assert not used  # every text that has a name stands somewhere


def test_the_file_is_read_at_the_first_unknown_name():
    """Reading takes 20 ms, which the start of a command need not pay."""
    code = (
        "import sys, paged.commands.cli; from paged import *; EngineConfig('demo', seed=1)\n"
        "StructuredOutputsParams(regex='a'); SamplingParams(n=2); repr(SamplingParams)\n"
        "assert 'tomllib' not in sys.modules\n"
        "SamplingParams(flat_logprobs=False); assert 'tomllib' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_of_vllm_are_accepted_and_change_nothing(name):
    owner, neutral = CONFIGS[name]
    required = {"EngineArgs": {"model": "demo"}, "BeamSearchParams": {"beam_width": 2, "max_tokens": 4}}
    start = required.get(name, {"json": "{}"} if name == "StructuredOutputsParams" else {})
    defaults = {k: given(k, v) for k, v in VLLM[name].items() if k not in start and v != "required"}
    assert owner(**start, **{k: v for k, v in defaults.items() if k in neutral}) == owner(**start)
    if name != "StructuredOutputsParams":
        changed = owner(**start, **defaults)
        different = {f.name for f in dataclasses.fields(owner)} if changed != owner(**start) else set()
        different = {name for name in different if getattr(changed, name) != getattr(owner(**start), name)}
        assert different <= {"watermark"}  # the one default that differs on purpose


@pytest.mark.parametrize("name", CONFIGS)
def test_other_values_are_refused_by_name_and_reason(name):
    owner, neutral = CONFIGS[name]
    start = {"EngineArgs": {"model": "demo"}, "BeamSearchParams": {"beam_width": 2, "max_tokens": 4}}.get(
        name, {}
    )
    for argument, (_, reason) in neutral.items():
        with pytest.raises((ConfigError, RequestError)) as error:
            owner(**start, **{argument: WRONG})
        written = argument if argument in SECRETS else f"{argument}='{WRONG}'"
        assert f"got {written}: " in str(error.value)
        assert reason in str(error.value)


def test_a_value_of_another_type_is_not_neutral():
    with pytest.raises(ConfigError, match="data_parallel_size=True"):
        EngineConfig("demo", data_parallel_size=True)
    with pytest.raises(ConfigError, match="data_parallel_size=2: of the ways to use several devices"):
        LLM("demo", data_parallel_size=2)


def test_code_that_is_trusted_never_runs(tmp_path, caplog):
    EngineConfig("demo", trust_remote_code=False)
    assert not caplog.messages
    assert EngineConfig("demo", trust_remote_code=True) == EngineConfig("demo")
    assert caplog.messages == [
        "trust_remote_code=True has no effect: no code of the checkpoint runs. A native architecture needs "
        "none, and any other is refused"
    ]
    code = {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["XForCausalLM"], "auto_map": code}))
    (tmp_path / "modeling_x.py").write_text("raise SystemExit")
    with pytest.raises(paged.UnsupportedModelError, match=r"own code \(auto_map\) is never run"):
        LLM(str(tmp_path), trust_remote_code=True)


def test_a_mistyped_argument_of_vllm_is_recognized():
    with pytest.raises(paged.UnknownArgumentError, match="did you mean 'tensor_parallel_size'"):
        LLM("demo", tensor_paralel_size=1)


def test_methods_take_the_arguments_of_vllm(demo):
    neutral = dict.fromkeys(("lora_request", "tokenization_kwargs", "mm_processor_kwargs"))
    params = SamplingParams(max_tokens=1)
    assert len(demo.generate("a", params, use_tqdm=False, **neutral)) == 1
    assert (
        len(
            demo.chat(
                [{"role": "user", "content": "a"}], params, use_tqdm=False, chat_template="plain", **neutral
            )
        )
        == 1
    )
    assert len(demo.embed("a", use_tqdm=False, pooling_params=None, **neutral)) == 1
    for method in ("generate", "chat", "encode", "embed", "score", "beam_search", "reset_prefix_cache"):
        call = getattr(demo, method)
        required = [p for p in inspect.signature(call).parameters.values() if p.default is p.empty]
        arguments = [None for p in required if p.kind is p.POSITIONAL_OR_KEYWORD]
        with pytest.raises(RequestError, match="prompt_adapter_request=1: prompt adapters"):
            call(*arguments, prompt_adapter_request=1)
        with pytest.raises(paged.UnknownArgumentError, match="'lora_requests'"):
            call(*arguments, lora_requests=None)
    theirs = {argument for names in VLLM["LLM"].values() for argument in names}
    assert neutral_of("calls").keys() - {"prompt_adapter_request"} <= theirs


def test_missing_names_say_what_to_use(demo):
    for name, reason in missing_of("LLMEngine").items():
        with pytest.raises(AttributeError, match=f"LLMEngine has no '{name}': ") as error:
            getattr(demo, name)
        assert str(error.value).endswith(reason)
    with pytest.raises(AttributeError, match="paged has no 'ModelRegistry': docs"):
        paged.ModelRegistry  # noqa: B018
    with pytest.raises(AttributeError, match="LLMEngine has no 'generat'"):
        demo.generat  # noqa: B018
    for owner in (LLM, AsyncLLMEngine, SamplingParams):
        for name, reason in missing_of(owner.__name__).items():
            said = re.escape(f"{owner.__name__} has no '{name}': {reason}")
            with pytest.raises(AttributeError, match=said):
                getattr(owner, name)


def test_importing_what_is_missing_says_what_to_use():
    for name, reason in missing_of("paged").items():
        said = re.escape(f"paged has no '{name}': {reason}")
        with pytest.raises(AttributeError, match=said):
            getattr(paged, name)
        package, _, last = f"paged.{name}".rpartition(".")
        for line in (f"import paged.{name}", f"from {package} import {last}", f"from paged.{name} import X"):
            with pytest.raises(ImportError, match=said):
                exec(line, {})
    # Names that neither has are Python's to report, and those that are here are found where vLLM has them.
    for line in ("import paged.inputs2", "import other.inputs", "from paged import Nonsense"):
        with pytest.raises(ImportError) as error:
            exec(line, {})
        assert "paged has no" not in str(error.value)
    namespace = {}
    exec("from paged.sampling_params import BeamSearchParams", namespace)
    assert namespace["BeamSearchParams"] is paged.BeamSearchParams


@pytest.mark.parametrize("method", [name for name in VLLM["LLM"] if name not in missing_of("LLMEngine")])
def test_arguments_have_the_order_of_vllm(method):
    ours = inspect.signature(getattr(LLM, method)).parameters.values()
    names = [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
    theirs = VLLM["LLM"][method]
    if method == "score":
        theirs = ["prompt", "continuations", *theirs[2:]]
    assert names == theirs


def test_arguments_go_by_position(demo, capsys):
    params = SamplingParams(max_tokens=1)
    conversation = [{"role": "user", "content": "a"}]
    (output,) = demo.chat(conversation, params, False, None, None, "{{ messages[0].content }}b")
    assert output.prompt == "ab"
    assert len(demo.generate("a", params, False, None, [0.0])) == 1
    assert len(demo.embed("a", False)) == len(demo.encode("a", None, False)) == 1
    assert len(demo.score("a", ["b"], False)) == 1
    beams = paged.BeamSearchParams(beam_width=2, max_tokens=1)
    assert len(demo.beam_search("a", beams, None, False)) == 1
    demo.reset_prefix_cache(False, False)
    assert capsys.readouterr().err == ""  # no bar
    with pytest.raises(RequestError, match="takes no LoRA adapters, got lora_request 'a'"):
        demo.generate("a", params, False, "a")


def test_signatures_are_those_of_the_config():
    options = inspect.signature(EngineConfig).parameters
    assert [*inspect.signature(LLM).parameters] == [*options]
    asynchronous = inspect.signature(AsyncLLMEngine).parameters
    assert set(asynchronous) == {*options, "stream_interval_s"}
    for name, parameter in options.items():
        assert inspect.signature(LLM).parameters[name].default == parameter.default
        assert re.search(rf"^ *{name}: ", LLM.__init__.__doc__ or "", re.MULTILINE)
        assert name not in neutral_of("EngineArgs")


def test_dir_and_help_show_the_public_names():
    assert set(paged.__all__) <= set(dir(paged))
    assert "kv_cache_dtype: " in pydoc.render_doc(paged.LLM)


def test_repr_names_model_dtype_and_device(demo):
    assert repr(demo) == "LLMEngine(model='demo', dtype=float32, device=cpu)"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_assignment_is_construction(name):
    value, others = CHANGES[name]
    params = SamplingParams(**others)
    before = params.clone()
    assert not setattr(params, name, value)
    assert params == SamplingParams(**{**others, name: value})
    assert params != before or name == "ignore_eos"  # whose change is the default
    with pytest.raises(RequestError) as constructed:
        SamplingParams(**{name: object()})
    with pytest.raises(RequestError, match=re.escape(str(constructed.value).partition(" at 0x")[0])):
        setattr(before, name, object())
    assert before == SamplingParams(**others)  # as it was


def test_what_is_assigned_together_is_checked_together():
    params = SamplingParams(max_tokens=4, logit_bias={1: 1.0})
    with pytest.raises(RequestError, match="min_tokens 5 is more than max_tokens 4"):
        params.min_tokens = 5
    params.skip_clone = True  # as to the constructor
    for error, name in ((paged.UnknownArgumentError, "top_pp"), (RequestError, "truncate_prompt_tokens")):
        with pytest.raises(error, match=name):
            setattr(params, name, 0.5)
    own = params.clone()
    own.logit_bias[1] = 2.0
    assert params.logit_bias == {1: 1.0}
    with pytest.raises(TypeError, match="unhashable"):
        hash(params)
    beams = paged.BeamSearchParams(beam_width=2, max_tokens=4)
    beams.max_tokens = 5
    assert beams == paged.BeamSearchParams(beam_width=2, max_tokens=5)
    with pytest.raises(dataclasses.FrozenInstanceError, match=r"EngineConfig .*replace\(old, seed=1\)"):
        EngineConfig("demo").seed = 1


def test_a_running_request_does_not_see_assignments(demo):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={7: 100.0})
    demo.add_request("a", "x", params)
    params.max_tokens, params.temperature, params.logit_bias = 2, 1.0, {8: 100.0}
    demo.add_request("b", "x", params)
    outputs = {}
    while demo.has_unfinished_requests():
        params.max_tokens = 1  # while they run
        outputs |= {output.request_id: output.outputs[0] for output in demo.step()}
    assert {name: list(output.token_ids) for name, output in outputs.items()} == {"a": [7] * 6, "b": [8] * 2}


def test_a_stream_does_not_see_assignments():
    async def run():
        async with AsyncLLMEngine("demo", device="cpu", num_blocks=64) as engine:
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            stream = engine.generate("x", params)
            params.max_tokens = 1
            return [output async for output in stream][-1]

    assert len(asyncio.run(run()).outputs[0].token_ids) == 3


def test_flags_are_those_of_an_engine():
    parser = paged.EngineArgs.add_cli_args(paged.FlexibleArgumentParser())
    flags = "--model demo --max_num_seqs 3 -pp=2 --no-enable-prefix-caching --dtype=half"
    args = parser.parse_args(
        [
            *flags.split(),
            "--pipeline-layers",
            "2",
            "2",
            '--tenant-weights={"a": 2}',
            "--scheduling-policy=fair",
        ]
    )
    config = paged.EngineArgs.from_cli_args(args)
    expected = EngineConfig(
        "demo", max_num_seqs=3, enable_prefix_caching=False, pipeline_parallel_size=2,
        pipeline_layers=[2, 2], dtype="half",
        tenant_weights={"a": 2}, scheduling_policy="fair",
    )  # fmt: skip
    assert dataclasses.asdict(config) == dataclasses.asdict(expected)
    for names in ("q_proj v_proj", '["q_proj","v_proj"]'):
        args = parser.parse_args(["--model=demo", "--enable-lora", "--lora-target-modules", *names.split()])
        assert paged.EngineArgs.from_cli_args(args).lora_target_modules == ["q_proj", "v_proj"]
    wrong = parser.parse_args(["--model", "demo", "--enable-tower-connector-lora"])
    with pytest.raises(ConfigError, match="got enable_tower_connector_lora=True: adapters"):
        LLM(**vars(wrong))
    with pytest.raises(ConfigError, match="give --model"):
        paged.EngineArgs.from_cli_args(parser.parse_args([]))
    with pytest.raises(ConfigError, match="engine_args must be EngineArgs or EngineConfig, got 3"):
        LLM.from_engine_args(3)


def test_the_switch_is_named_of_several_options_of_vllm():
    switch = {"enable_expert_parallel": True}
    for given in ({**switch, "all2all_backend": "x"}, {"all2all_backend": "x", **switch}):
        with pytest.raises(ConfigError, match="got enable_expert_parallel=True: "):
            EngineConfig("demo", **given)
    # Without a switch it is the first that was given, whatever the order of a set would be.
    with pytest.raises(ConfigError, match="got lora_dtype='x'"):
        EngineConfig("demo", lora_dtype="x", max_lora_cls_labels=9, fully_sharded_loras=False)


def test_examples_of_vllm_run_or_say_why_not(demo):
    assert sorted(RUN) == [script.stem for script in SCRIPTS]
    assert len(RUN) >= 20
    assert len({*RUN.values(), *OTHERS, *NO_FEATURE}) == len(RUN) + len(OTHERS) + len(NO_FEATURE)
    for reason, code, message in OTHERS.values():
        assert reason
        with pytest.raises((paged.PagedError, AttributeError, ImportError), match=message):
            exec(code, {"LLM": LLM, "SamplingParams": SamplingParams, "llm": demo})


SCRIPTS = sorted((Path(__file__).parent / "vllm_scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_for_vllm_run_with_another_import_and_model(script, tmp_path, monkeypatch):
    text = re.sub(r"from vllm[\w.]* import", "from paged import", script.read_text())
    text = re.sub(r'model(="|": ")[^"]+"', r'model\1demo"', text)
    monkeypatch.setattr(sys, "argv", [script.name])
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_BATCH_INVARIANT"):
        monkeypatch.setenv(name, "")  # so that what a script sets is taken back
    changed = tmp_path / script.name
    changed.write_text(text)
    runpy.run_path(str(changed), run_name="__main__")
