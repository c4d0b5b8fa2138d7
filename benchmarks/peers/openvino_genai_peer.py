"""OpenVINO GenAI as a system of the benchmarks: the checkpoint exported by optimum-intel."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.common import CHECKPOINTS
from benchmarks.peers.worker import Options, Tokens

_BITS = {"int8": 8, "int4": 4}
# A scale for every row, or for 32 weights of a row: int4 is then as large as llama.cpp's Q4_0.
_GROUPS = {"int8": {}, "int4": {"group_size": 32, "ratio": 1.0}}


class OpenVino:
    """ContinuousBatchingPipeline. KV has the precision of the weights; with quantised weights it is u8."""

    @staticmethod
    def prepare(options: Options) -> None:
        """Export the checkpoint, once for each precision."""
        directory = _directory(options)
        if (directory / "openvino_model.bin").exists():
            return
        if options.dtype in _BITS:
            from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

            quantization = OVWeightQuantizationConfig(bits=_BITS[options.dtype], **_GROUPS[options.dtype])
            OVModelForCausalLM.from_pretrained(
                options.model, export=True, compile=False, quantization_config=quantization
            ).save_pretrained(directory)
            return
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig

        main_export(
            options.model,
            output=directory,
            task="text-generation-with-past",
            ov_config=OVConfig(dtype="fp32" if options.dtype == "float32" else "bf16"),
            library_name="transformers",
            convert_tokenizer=False,
        )

    def __init__(self, options: Options) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = options.num_requests
        scheduler.max_num_batched_tokens = options.max_batched_tokens
        scheduler.enable_prefix_caching = True
        # Blocks have 32 tokens on a CPU; the last block of every request may be partly filled.
        scheduler.num_kv_blocks = options.num_tokens // 32 + 2 * options.num_requests
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        if options.dtype in ("float32", "bfloat16"):
            precision = "f32" if options.dtype == "float32" else "bf16"
            properties |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            str(_directory(options)), scheduler, "CPU", properties
        )
        self.next_id = 0

    def run(
        self,
        prompts: Tokens,
        max_tokens: list[int],
        batch_size: int | None,  # noqa: ARG002  (it batches as it likes)
    ) -> tuple[Tokens, list[float]]:
        """Run all requests at once."""
        import numpy as np
        from openvino import Tensor
        from openvino_genai import GenerationConfig

        handles = []
        for prompt, n in zip(prompts, max_tokens, strict=True):
            config = GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False)
            handles.append(self.pipeline.add_request(self.next_id, Tensor(np.array([prompt])), config))
            self.next_id += 1
        tokens: Tokens = [[] for _ in prompts]
        first = [0.0] * len(prompts)
        while self.pipeline.has_non_finished_requests():
            self.pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for output in handle.read().values():
                        first[i] = first[i] or time.perf_counter()
                        tokens[i] += output.generated_ids
        return tokens, first


def _directory(options: Options) -> Path:
    return CHECKPOINTS / f"{Path(options.model).name}-openvino-{options.dtype}"
