"""One start of an engine, timed; a script, since both checkouts run it, each with its own `paged`.

    python -P one_start.py MODEL [--classes]

Prints a line of JSON. Without --classes the model needs no tokenizer; with it a model class of transformers
is imported at the end.
"""

import json
import sys
import time

from benchmarks.common import peak_rss_mib


def main() -> None:
    """Import paged, start an engine, generate one token; measure each."""
    model = sys.argv[1]
    with_classes = "--classes" in sys.argv
    phases = [("before", 0.0, peak_rss_mib())]
    times = [time.perf_counter()]

    def note(name: str) -> None:
        times.append(time.perf_counter())
        phases.append((name, times[-1] - times[-2], peak_rss_mib()))

    import paged

    note("import paged")
    engine = paged.LLMEngine(
        model, device="cpu", num_blocks=64, max_model_len=256, skip_tokenizer_init=not with_classes
    )
    note("start")
    params = paged.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt = "def f(x):" if with_classes else [5, 6, 7]
    (output,) = engine.generate([prompt], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    note("first token")
    modules = {"native": modules_of_transformers()}
    if with_classes:
        from transformers import LlamaForCausalLM  # noqa: F401  (imported to be measured)

        note("model class")
        modules["with a model class"] = modules_of_transformers()
    rows = [
        {"phase": name, "seconds": seconds, "peak MiB": peak, "more MiB": peak - phases[max(0, i - 1)][2]}
        for i, (name, seconds, peak) in enumerate(phases)
    ]
    print(json.dumps({"paged": paged.__file__, "phases": rows, "modules": modules}))


def modules_of_transformers() -> list[str]:
    """Return the modules of transformers that are imported."""
    return [name for name in sys.modules if name.split(".")[0] == "transformers"]


if __name__ == "__main__":
    main()
