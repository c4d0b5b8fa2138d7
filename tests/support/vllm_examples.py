"""The offline examples of vLLM's documentation: which run here with another import, and why others do not.

Paths are those of vLLM's repository, below examples/ or docs/. The scripts in tests/vllm_scripts use what the
example uses, in the same way; `from vllm.anything import X` becomes `from paged import X`.
"""

from __future__ import annotations

# Each script, and the example or page whose calls it makes.
RUN = {
    "basic": "examples/basic/offline_inference/basic.py",
    "chat_flags": "examples/basic/offline_inference/chat.py",
    "chat": "examples/offline_inference/chat.py",
    "embed": "examples/offline_inference/embedding.py",
    "default_sampling": "examples/offline_inference/basic_with_model_default_sampling.py",
    "generate_flags": "examples/offline_inference/basic/generate.py",
    "llm_engine": "examples/deployment/llm_engine_example.py",
    "async_streaming": "examples/deployment/async_llm_streaming.py",
    "prefix_cache": "examples/features/automatic_prefix_caching/automatic_prefix_caching_offline.py",
    "reproducibility": "examples/features/batch_invariance/reproducibility_offline.py",
    "structured_outputs": "examples/features/structured_outputs/structured_outputs_offline.py",
    "matryoshka": "examples/pooling/embed/embed_matryoshka_fy_offline.py",
    "tokenizer_template": "docs/getting_started/quickstart.md",
    "one_prompt": "docs/models/generative_models.md (generate)",
    "beam_search": "docs/models/generative_models.md (beam_search)",
    "pooling": "docs/models/pooling_models.md",
    "ngram_speculation": "docs/features/speculative_decoding/n_gram.md",
    "draft_model": "docs/features/speculative_decoding/draft_model.md",
    "memory": "docs/configuration/conserving_memory.md",
    "token_prompts": "docs/features/prompt_embeds.md and others (vllm.inputs)",
    "logits_processor": "docs/features/custom_logitsprocs.md (functions of a request)",
}
# Examples whose feature is here in another form: the reason, and a call of theirs with what it raises.
OTHERS: dict[str, tuple[str, str, str]] = {
    "examples/basic/offline_inference/embed.py": (
        "prints by a helper of vLLM's own",
        "from paged.utils.print_utils import print_embeddings",
        "internal to vLLM",
    ),
    "examples/basic/offline_inference/manual_prompt_rendering.py": (
        "generate takes the text itself",
        "from paged.renderers.inputs.preprocess import parse_model_prompt",
        "No module named 'paged.renderers'",
    ),
    "examples/basic/offline_inference/score.py": (
        "scores are log-probabilities of continuations",
        "llm.score('a', ['b'], chat_template='x')",
        "chat_template='x': score takes texts or token ids",
    ),
    "examples/features/automatic_prefix_caching/prefix_caching_offline.py": (
        "`del llm` frees the memory",
        "from paged.distributed import cleanup_dist_env_and_memory",
        "of the ways to use several devices",
    ),
    "examples/features/context_extension/context_extension_offline.py": (
        "config.json has the rotary embedding",
        "LLM('demo', hf_overrides={'max_model_len': 9})",
        "edit config.json in a copy of the directory",
    ),
    "examples/features/logits_processor/dry.py, top_n_sigma.py": (
        "SamplingParams has these filters, and functions of a request",
        "LLM('demo', logits_processors=[print])",
        "SamplingParams",
    ),
    "examples/features/profiling/simple_profiling_offline.py": (
        "torch.profiler sees a step",
        "llm.start_profile()",
        "use torch.profiler around generate",
    ),
    "examples/features/reset_kv/reset_kv_offline.py": (
        "running requests keep their blocks",
        "llm.reset_prefix_cache(reset_running_requests=True)",
        "running requests keep their blocks",
    ),
    "examples/features/speculative_decoding/spec_decode_offline.py, test_ngram.py": (
        "stats() has the counts",
        "llm.get_metrics()",
        r"stats\(\) has the counts",
    ),
    "examples/features/torchrun/torchrun_example_offline.py": (
        "torchrun -m paged does it",
        "LLM('demo', distributed_executor_backend='external_launcher')",
        "distributed_executor_backend",
    ),
    "examples/features/data_parallel/data_parallel_offline.py": (
        "`paged run-batch --replicas` does it",
        "LLM('demo', data_parallel_size=2)",
        "--replicas of `paged serve`",
    ),
    "examples/generate/trace_replay_offline.py": (
        "score reports on given tokens",
        "SamplingParams(trace_decode_token_ids=[1])",
        r"`score\(prompt, continuations\)` reports on given tokens",
    ),
    "examples/offline_inference/gguf_inference.py": (
        "needs the hub; tests/engine/test_gguf.py loads files",
        "LLM('nothing.gguf')",
        "no such directory or GGUF file",
    ),
    "examples/tool_calling/chat_with_tools_offline.py": (
        "tokenizers are loaded with transformers; without this option it runs",
        "LLM('demo', tokenizer_mode='mistral')",
        "the tokenizer is loaded with transformers",
    ),
    "examples/ray_serving/batch_llm_inference.py": (
        "docs/ray.md: paged.ray.data",
        "from paged import vLLMEngineProcessorConfig",
        "cannot import name|paged has no",
    ),
}
# Those of features that are not here.
NO_FEATURE = (
    "examples/basic/offline_inference/classify.py, reward.py",
    "examples/disaggregated/",
    "examples/features/logits_processor/custom*.py",
    "examples/features/lora/",
    "examples/features/pause_resume/",
    "examples/features/prompt_embed/",
    "examples/features/routed_experts/",
    "examples/features/sharded_state/",
    "examples/features/speculative_decoding/extract_hidden_states_offline.py, mlpspeculator_offline.py",
    "examples/generate/last_hidden_states_offline.py, multimodal/, qwen_1m_offline.py",
    "examples/pooling/classify/, reward/, score/, token_classify/, token_embed/",
    "examples/rl/",
)
