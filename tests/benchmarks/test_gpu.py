"""The programs that check, time and model the kernels on GPUs, tried without one. No time is asserted."""

import json
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import coded_cases, roofline, timing
from benchmarks.cases import attention_case
from benchmarks.coded_cases import FORMATS
from benchmarks.compiled import hot_loop
from benchmarks.expert_cases import TINY_FORMS, ExpertsCase, MixtureShape, expert_cases
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu import gpu_tests, sanitizer
from benchmarks.gpu.comparators import COMPARATORS, Skip, adapt
from benchmarks.gpu.report import attention_table, write_report
from benchmarks.shapes import WITH_SLOW, attention_shapes, decode, prefill, skewed, tiny_shapes
from paged.kernels.backend import load_kernels
from paged.kernels.codes import coded_linear
from tests.support.served import eventually

ROOT = Path(__file__).parents[2]
TINY = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory):
    """Run `python -m benchmarks.gpu --tiny` once. Return its result, its folder and its output."""
    out = tmp_path_factory.mktemp("results")
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = out.glob("*.json")
    return json.loads(path.read_text()), out, done.stdout


def test_a_tiny_run_has_every_section(tiny_run):
    result, _, _ = tiny_run
    assert list(result["sections"]) == ["tests", *gpu.SECTIONS]
    for name, section in result["sections"].items():
        assert section["error"] is None, name
        assert section["rows"], name
    assert result["limits"]["bytes_per_s"] > 0
    for tests in result["sections"]["tests"]["rows"]:
        assert tests["passed"] == tests["ran"] > 0
        assert tests["failed"] == tests["error"] == tests["unfinished"] == 0


def test_a_tiny_run_proves_and_compares_every_batch(tiny_run):
    result, _, _ = tiny_run
    rows = [row for section in result["sections"].values() for row in section["rows"] if "us" in row]
    assert {row["case"] for row in rows} >= {shape.name for shape in tiny_shapes()}
    for row in rows:
        assert 0 <= row["relative_error"] < 3e-3, row["case"]
        assert row["of_limit"] == pytest.approx(row["limit_us"] / row["us"])
        for comparator in row.get("comparators", {}).values():
            assert comparator.get("theirs_over_ours", 0) > 0 or comparator["skipped"]
    by_name = {row["case"]: row["comparators"] for row in rows if "comparators" in row}
    assert by_name["decode 2 x 70, block 16"]["flex_attention"] == {"skipped": "measured on other batches"}
    assert "us" in by_name["prefill 1 x 24, D 32, block 16"]["sdpa_flash"]


def test_a_tiny_run_has_every_format_of_codes(tiny_run):
    rows = tiny_run[0]["sections"]["coded_linear"]["rows"]
    assert [row["case"] for row in rows] == [f"{name}, tiny, {n} rows" for name in FORMATS for n in (1, 20)]
    for row in rows:
        assert row["floats"]["us"] == pytest.approx(row["floats"]["theirs_over_ours"] * row["us"])


def test_a_tiny_run_has_experts(tiny_run):
    rows = tiny_run[0]["sections"]["experts"]["rows"]
    products = [f"{form}, {linear}" for form in TINY_FORMS for linear in ("gate and up", "down")]
    assert [row["case"] for row in rows] == [f"{name}, 5 tokens" for name in ("routing", *products)]
    for row in rows[1:]:
        assert row["others"]["loop"]["theirs_over_ours"] > 0
        assert "us" in row["others"]["grouped_mm"] or row["others"]["grouped_mm"]["skipped"]


def test_a_product_of_experts_proves_itself_right_before_it_is_timed(monkeypatch):
    shape = MixtureShape(3, 2, 32, 32)
    case, down = expert_cases(shape, "int8", (5,), load_kernels("triton"), torch.randn)
    assert case.check() < 1e-6
    assert down.check() < 1e-6
    torch.testing.assert_close(case.others()["loop"](), case.run())
    product = ExpertsCase.product
    monkeypatch.setattr(ExpertsCase, "product", lambda *given: product(*given) * 1.01)
    with pytest.raises(AssertionError, match="relative error"):
        case.check()
    monkeypatch.setattr(ExpertsCase, "product", lambda *given: product(*given) + len(given[1]) / 1e6)
    with pytest.raises(AssertionError, match="other bits alone"):
        case.check()


@pytest.mark.parametrize("name", FORMATS)
def test_a_product_with_codes_proves_itself_right_before_it_is_timed(monkeypatch, name):
    (case,) = coded_cases.coded_cases("small", 16, 256, name, (3,), torch.float32, CPU)
    assert case.check() < 1e-6
    torch.testing.assert_close(case.run_floats(), case.run())
    monkeypatch.setattr(coded_cases, "coded_linear", lambda *given: coded_linear(*given) * 1.01)
    with pytest.raises(AssertionError, match="relative error"):
        case.check()
    monkeypatch.setattr(coded_cases, "coded_linear", lambda x, weight: coded_linear(x, weight) + len(x) / 1e6)
    with pytest.raises(AssertionError, match="other bits alone"):
        case.check()


def test_the_interpreter_s_times_are_marked(tiny_run):
    if torch.cuda.is_available():
        pytest.skip("this run was compiled")
    result, out, printed = tiny_run
    assert result["meaningful"] is False
    assert "the times mean nothing" in printed
    assert "the times mean nothing" in (out / "README.md").read_text()
    assert json.loads(printed.splitlines()[-1])["errors"] == []


def test_pictures_and_tables_are_made_of_the_json(tiny_run, tmp_path):
    result, out, _ = tiny_run
    pictures = {path.name.rsplit("-", 1)[1] for path in out.glob("*.png")}
    assert pictures == {"roofline.png", "decode.png", "prefill.png", "batches.png"}
    made = (out / "README.md").read_text()
    (out / "README.md").unlink()
    command = [sys.executable, "-m", "benchmarks.gpu", "--report", "--out", str(out)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert (out / "README.md").read_text() == made
    for name in ("decode", "layers", "coded_linear", "experts"):
        for row in result["sections"][name]["rows"]:
            assert f"| {row['case']} | " in made
    # The page of a folder that is named results is beside it.
    (tmp_path / "results").mkdir()
    assert write_report(tmp_path / "results") == tmp_path / "README.md"
    assert "Nothing has been measured yet." in (tmp_path / "README.md").read_text()


def test_a_comparator_without_a_graph_is_marked():
    row = {
        "case": "a batch",
        "us": 10.0,
        "gb_per_s": 1.0,
        "tflops": 1.0,
        "of_limit": 0.5,
        "graph": True,
        "comparators": {
            "sdpa_flash": {"us": 20.0, "theirs_over_ours": 2.0, "graph": True},
            "flashinfer": {"us": 5.0, "theirs_over_ours": 0.5, "graph": False},
            "varlen_attn": {"skipped": "needs a GPU"},
        },
    }
    table = attention_table({"decode": {"rows": [row]}})
    assert table.splitlines()[0].endswith("| sdpa_flash ÷ ours | flashinfer ÷ ours |")
    assert table.splitlines()[2] == "| a batch | 10.0 | 1 | 1.0 | 50% | 2.00 | 0.50* |"


def test_a_section_that_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    """Without ceilings there is no limit: the first section fails, and the second one still runs."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--sections", "layers", "ceilings"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    (path,) = tmp_path.glob("*.json")
    sections = json.loads(path.read_text())["sections"]
    assert "the ceilings were not measured" in sections["layers"]["error"]
    assert sections["ceilings"]["error"] is None
    assert "FAILED layers" in done.stdout
    assert "Failed: layers." in (tmp_path / "README.md").read_text()


def test_a_worker_that_dies_loses_one_section(monkeypatch):
    """The first worker dies in its second section; the next one continues after that section."""
    started = []

    def die(command, **_):
        options = json.loads(command[-1])
        started.append(options["sections"])
        events = [{"device": {"name": "a GPU"}}]
        for name in options["sections"]:
            if name == "prefill":
                break
            events += [
                {"section": name, "row": {"case": name}},
                {"section": name, "error": None, "seconds": 1.0},
            ]
        Path(options["events"]).write_text("".join(json.dumps(event) + "\n" for event in events))
        return subprocess.CompletedProcess(command, -11)

    monkeypatch.setattr(subprocess, "run", die)
    found = {"device": None, "sections": {}}
    gpu.run_workers(["decode", "prefill", "engine"], found, True, 0.0, {})
    assert started == [["decode", "prefill", "engine"], ["engine"]]
    errors = {name: section["error"] for name, section in found["sections"].items()}
    assert errors == {"decode": None, "prefill": "the process ended with exit code -11", "engine": None}


def test_comparators_that_crash_or_do_not_compile_are_not_tried(tmp_path):
    lines = [
        {"comparator": "sdpa_flash, D 128", "ready": True, "reasons": ["dense"]},
        {"comparator": "varlen_attn, D 128", "ready": False, "reasons": ["needs a GPU"]},
    ]
    told = tmp_path / "told"
    program = "import sys, time; print(sys.argv[1], flush=True); open(sys.argv[2], 'w'); "
    for last, seconds, why in (
        ("sys.exit(3)", 60, "crashed on a small batch, exit code 3"),
        ("time.sleep(600)", 0, "did not compile in time"),
    ):
        told.unlink(missing_ok=True)
        command = [sys.executable, "-c", program + last, "\n".join(map(json.dumps, lines)), str(told)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            eventually(told.exists)
            not_ready = gpu.ready_comparators(process, time.time() + seconds)
        assert "sdpa_flash, D 128" not in not_ready
        assert not_ready["varlen_attn, D 128"] == "needs a GPU"
        assert not_ready["flashinfer, D 128"] == not_ready["sdpa_flash, D 64"] == why


class FakeCuda:
    """Events that read a clock which every call advances, and graphs with a scripted replay."""

    def __init__(self, monkeypatch, capturable):
        self.now, self.captured = 0.0, None
        fakes = {
            "synchronize": lambda *_: None,
            "Event": lambda **_: FakeEvent(self),
            "Stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
            "current_stream": lambda: SimpleNamespace(wait_stream=lambda _: None),
            "stream": lambda _: nullcontext(),
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: self.captured()),
            "graph": lambda _: nullcontext() if capturable else self.refuse(),
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(timing, "_flush_buffer", lambda _: torch.ones(4))

    def refuse(self):
        raise RuntimeError("operation not permitted when stream is capturing")


class FakeEvent:
    def __init__(self, cuda):
        self.cuda, self.at = cuda, None

    def record(self):
        self.at = self.cuda.now

    def elapsed_time(self, end):
        return end.at - self.at


@pytest.mark.parametrize("capturable", [True, False])
def test_gpu_times_are_medians_of_runs_over_poisoned_outputs(monkeypatch, capturable):
    cuda = FakeCuda(monkeypatch, capturable)
    out, poisoned = torch.zeros(3), []

    def run():
        cuda.now += 5.0 if len(poisoned) % 5 else 500.0  # an outlier now and then
        poisoned.append(bool(out.isnan().all()))
        return out.fill_(1)

    def replay():
        cuda.now += 2.0
        out.fill_(1)

    cuda.captured = replay
    measured = timing._time_on_gpu(run, CPU)
    assert measured.call_seconds == 5e-3
    assert measured.seconds == (2e-3 if capturable else 5e-3)
    assert measured.graph is capturable
    assert sum(poisoned) == measured.runs - 1  # all but the first of the timed ones
    cuda.captured = lambda: None
    if capturable:
        with pytest.raises(AssertionError, match="some of the output was not written"):
            timing._time_on_gpu(run, CPU)
    with pytest.raises(AssertionError, match="some of the output was not written"):
        timing._time_on_gpu(lambda: out, CPU)


def test_without_a_gpu_it_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "benchmarks.gpu.worker", json.dumps({"tiny": False})]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "torch.cuda sees no GPU: `python -m benchmarks.gpu --tiny`" in done.stderr


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("sdpa_flash", prefill(1, 24, **TINY)),
        ("sdpa_flash", decode(2, 70, **TINY)),
        ("flex_attention", prefill(2, 150, **TINY)),
        ("flex_attention", skewed(200, 5, 2, **TINY)),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_comparator_proves_itself_right_before_it_is_timed(monkeypatch, name, shape):
    shape = replace(shape, against=(name,))
    case = attention_case(shape, torch.float32, CPU)
    call = adapt(name, shape, case)
    monkeypatch.setitem(COMPARATORS, name, lambda _: lambda: call() * 1.01)
    with pytest.raises(Skip, match="AssertionError: relative error"):
        adapt(name, shape, case)


def test_a_comparator_that_cannot_do_a_batch_says_why():
    reasons = {}
    for shape in tiny_shapes():
        case = attention_case(shape, torch.float32, CPU)
        for name in ("sdpa_flash", "flex_attention", "varlen_attn"):
            try:
                adapt(name, shape, case)
            except Skip as skip:
                reasons[shape.section, name] = str(skip)
    assert reasons["skewed", "sdpa_flash"] == "dense: the contexts differ in length"
    assert reasons["quantized", "sdpa_flash"] == "its quantised caches have other scales"
    assert reasons["decode", "flex_attention"] == "measured on other batches"
    assert reasons["decode", "varlen_attn"] == "needs a GPU"


def test_tests_that_run_on_a_gpu_are_found():
    names = [Path(file).name for file in gpu_tests.kernel_tests(tiny=False)]
    assert "test_paged_attention.py" in names
    assert "test_aot.py" not in names
    assert names[-1] == "test_attention_variants.py"
    (file,) = gpu_tests.engine_tests(tiny=False)
    tests = gpu_tests.collect(file)
    assert len(tests) >= 60
    assert all("[cuda" in test for test in tests)
    functions = {test.partition("[")[0] for test in tests}
    first = gpu_tests.spread(tests)[: len(functions)]
    assert {test.partition("[")[0] for test in first} == functions  # before the time runs out


@pytest.mark.parametrize(
    ("told", "code", "error"),
    [
        ("ERROR SUMMARY: 0 errors", 0, None),
        ("ERROR SUMMARY: 3 errors", 86, "memcheck found 3 errors"),
        ("RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)", 86, "memcheck found 2 errors"),
        ("ERROR SUMMARY: 0 errors", 1, "the tests ended with exit code 1"),
        ("Target application returned an error", 0, "memcheck printed no summary"),
    ],
)
def test_sanitizer_says_what_it_found(tmp_path, told, code, error):
    """A stand-in for the program says what it would run, that tests passed, and that it found something."""
    said = f"echo $PYTORCH_NO_CUDA_MEMORY_CACHING $@\necho 5 passed\necho '========= {told}'\nexit {code}\n"
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{said}")
    program.chmod(0o700)
    row = sanitizer.sanitize(str(program), "memcheck", ["tests/ops"])
    assert (row["error"], row["passed"]) == (error, 5)
    assert not error or row["tail"].startswith("1 --tool memcheck --target-processes all")
    program.write_text(f"#!/bin/sh\n{said}".replace("5 passed", "deselected"))
    assert sanitizer.sanitize(str(program), "memcheck", ["tests/ops"])["error"] == (error or "no test ran")


def test_sanitizer_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    if sanitizer.find_sanitizer() is None:
        with pytest.raises(SystemExit, match=r"compute-sanitizer is missing: .*; install NVIDIA's CUDA"):
            sanitizer.main()
    program = tmp_path / "bin" / "compute-sanitizer"
    program.parent.mkdir()
    program.touch(0o700)
    assert sanitizer.find_sanitizer() == str(program)


def test_bytes_and_flops_of_a_decode_by_hand():
    """64 sequences of 1024 tokens, 32 heads over 4 KV heads of 128 in bfloat16, in splits of 512."""
    work = roofline.count_work(decode(64, 1024), block_q=2, tile=64)
    queries_and_outputs = 64 * 32 * (128 + 128) * 2
    keys_and_values = 64 * 1024 * 4 * (128 + 128) * 2
    assert work.moved == queries_and_outputs + keys_and_values == 135_266_304
    assert work.flops == 64 * 1024 * 32 * 2 * (128 + 128) == 1_073_741_824
    assert work.partial_bytes == 2 * (64 * 2) * 32 * (128 + 2) * 4  # written and read, with maximum and sum
    assert work.programs == 64 * 2 * 4
    assert work.tiles == 64 * (1024 // 64) * 4
    assert work.launches == 3  # plan, decode, merge


def test_prediction_of_that_decode_by_hand():
    h100 = roofline.GPUS["H100"]
    work = roofline.count_work(decode(64, 1024), block_q=2, tile=64)
    predicted = roofline.predict(h100, work, cycles=400.0, in_flight=10e6)
    assert predicted.limit == pytest.approx(135_266_304 / 3.35e12)
    assert predicted.memory == pytest.approx((135_266_304 + work.partial_bytes) / 3.35e12)
    # 512 programs on 132 SMs are 4 rounds where 3.88 would be all.
    assert predicted.compute == pytest.approx(4 * 8 * 400 / 1.83e9)
    assert predicted.seconds == predicted.memory + 3 * roofline.LAUNCH_S
    starved = roofline.predict(h100, work, cycles=400.0, in_flight=1e6)  # 1 MB a microsecond
    assert starved.memory == pytest.approx((135_266_304 + work.partial_bytes) / 1e12)


def test_work_of_other_batches_by_hand():
    long = roofline.count_work(skewed(65536, 500, 63), block_q=2, tile=64)
    assert long.programs == (64 + 63) * 4  # 64 splits of 1024
    assert long.partial_bytes == 2 * 64 * 32 * 130 * 4  # a sequence of one split writes its output itself
    prompt = roofline.count_work(prefill(2, 40), block_q=16, tile=16)
    assert prompt.programs == 2 * 3 * 4
    assert prompt.tiles == 2 * (1 + 2 + 3) * 4


def test_every_gpu_s_flops_follow_from_its_clock():
    per_cycle = {name: gpu.flops_per_cycle for name, gpu in roofline.GPUS.items()}
    assert per_cycle == pytest.approx(
        {"A100": 2048, "H100": 4096, "H200": 4096, "B200": 8192, "MI300X": 2048}, rel=0.01
    )


def test_names_of_batches_are_unique():
    names = [shape.name for shape in attention_shapes()]
    assert len(set(names)) == len(names)
    assert {shape.section for shape in attention_shapes()} <= set(gpu.SECTIONS)
    assert tuple(shape.name for shape in attention_shapes() if shape.against) == WITH_SLOW


SASS = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
        /*0020*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
        /*0030*/                   MUFU.EX2 R5, R4 ;
        /*0040*/              @P0  BRA 0x10 ;
        /*0050*/                   ISETP.GE.AND P0, PT, R1, R2, PT ;
        /*0060*/                   SEL R3, R4, R5, P0 ;
        /*0070*/                   HMMA.16816.F32.BF16 R4, R4, R8, RZ ;
        /*0080*/                   FSEL R3, R4, -INF , P1 ;
        /*0090*/             @!P1  BRA 0x50 ;
        /*00a0*/                   EXIT ;
"""
AMD = """
.LBB0_1:
\ts_waitcnt lgkmcnt(0)
\tv_mfma_f32_16x16x16_bf16 v[0:3], v[4:5], v[6:7], v[0:3]
\tv_add_f32_e32 v1, v1, v2
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_the_hot_loop_is_the_one_over_full_tiles():
    loop = hot_loop("sm_90", SASS)
    assert (loop.instructions, loop.special, loop.tensor_flops) == (4, 1, 2 * 16 * 8 * 16)
    loop = hot_loop("gfx942", AMD)
    assert (loop.instructions, loop.vector, loop.tensor_flops) == (4, 1, 2 * 16 * 16 * 16)
    with pytest.raises(ValueError, match="no loop with tensor core instructions in the code for sm_90"):
        hot_loop("sm_90", AMD)


def test_roofline_reads_compiled_kernels_and_compares(tmp_path):
    """Predict one decode on sm_90, and compare it with a measurement."""
    name = "decode 64 x 1k, block 16"
    measured = {"case": name, "us": 100.0}
    result = {"device": {"name": "NVIDIA H200"}, "sections": {"decode": {"rows": [measured]}}}
    (tmp_path / "made-up.json").write_text(json.dumps(result))
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.roofline", "--target", "sm_90", "--only", name]
    done = subprocess.run(
        [*command, "--results", str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    h100, h200 = printed["rows"]
    assert (h100["gpu"], h200["gpu"]) == ("H100", "H200")
    assert h100["limit us"] == pytest.approx(135_266_304 / 3.35e6)
    assert 100 < h100["issue"] < 1000
    assert h100["KB/SM"] > h100["needed"]
    (compared,) = printed["compared"]
    assert compared["gpu"] == "H200"
    assert compared["measured / predicted"] == pytest.approx(100 / h200["us"])
    assert re.search("predicted and measured", done.stdout)
