"""vLLM's offline API (version 0.33): what is accepted here without effect, and what is refused, and why.

Names that are neither here nor in vLLM are unknown. `docs/from-vllm.md` is made from these tables.
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ..errors import PagedError
from .validation import shown

logger = logging.getLogger(__name__)


class Neutral(NamedTuple):
    """The values of an argument of vLLM that change nothing here, and why others are refused."""

    values: tuple[Any, ...]
    reason: str


ANY_BOOL = (None, True, False)
SECRETS = ("hf_token",)  # are in no message
_EMPTY: tuple[Any, ...] = (None, "", [], {}, set())
ONE_DEVICE = "this version runs in one process on one device"
TEXT_ONLY = "this version takes text and token ids alone"
NO_LORA = "LoRA adapters are not supported yet"
NO_MAMBA = "state-space and linear-attention models are not supported yet"
NO_EXPERTS = "mixtures of experts are not supported yet"
NO_SPECULATION = "speculative decoding is not supported yet"
NO_OFFLOAD = "weights stay on the device; swap_space is for KV"
NO_TRANSFER = "KV is not transferred between engines yet; save_prefix and load_prefix carry it in a file"
NO_COMPILATION = "paged compiles its kernels itself and uses no CUDA graphs"
NO_METRICS = "`LLMEngine.stats()` has the counts; traces and other metrics are not supported yet"
NO_SLEEP = "an engine cannot give its memory back yet; delete it and make a new one"
NO_WEIGHT_UPDATES = "weights cannot be replaced while an engine lives; make a new one"
NO_POOLING = "`embed(prompts, pooling=..., normalize=...)` has the options of embeddings"
SAFETENSORS = "weights are read from safetensors files alone"
NOT_YET = "not supported yet"


def _table(reason: str, names: str) -> dict[str, Neutral]:
    """Return arguments and their neutral values besides None: name=value, or a name if that is empty."""
    table = {}
    for item in names.split():
        name, _, value = item.partition("=")
        table[name] = Neutral((None, ast.literal_eval(value)) if value else _EMPTY, reason)
    return table


ENGINE_ARGS: dict[str, Neutral] = {
    **_table(
        ONE_DEVICE,
        "tensor_parallel_size=1 pipeline_parallel_size=1 data_parallel_size=1 "
        "prefill_context_parallel_size=1 decode_context_parallel_size=1 "
        "distributed_executor_backend='uni' data_parallel_hybrid_lb=False data_parallel_external_lb=False "
        "data_parallel_multi_port_external_lb=False data_parallel_backend='mp' master_addr='127.0.0.1' "
        "master_port=29501 nnodes=1 node_rank=0 dcp_kv_cache_interleave_size=1 numa_bind=False "
        "disable_custom_all_reduce=False enable_hc_sp=False enable_dbo=False ubatch_size=0 "
        "dbo_decode_token_threshold=32 dbo_prefill_token_threshold=512 dp_sync_interval=16 "
        "ray_workers_use_nsight=False worker_cls='auto' worker_extension_cls "
        "enable_batch_sharded_sampling=False enable_shm_tensor_arena=False enable_nccl_comm_suspend=False "
        "fault_tolerance_config enable_fault_tolerance=False data_parallel_rank data_parallel_start_rank "
        "data_parallel_size_local data_parallel_address data_parallel_rpc_port "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind_nodes numa_bind_cpus "
        "dcp_comm_backend dcp_q_replicate cp_kv_cache_interleave_size disable_nccl_for_dp_synchronization "
        "max_parallel_loading_workers",
    ),
    **_table(
        NO_EXPERTS,
        "enable_expert_parallel=False enable_ep_weight_filter=False moe_backend='auto' "
        "all2all_backend='allgather_reducescatter' enable_elastic_ep=False enable_eplb=False "
        "expert_placement_strategy='linear' enable_return_routed_experts=False elastic_ep_max_dp_size "
        "eplb_config",
    ),
    **_table(
        TEXT_ONLY,
        "enable_prompt_embeds=False allowed_local_media_path language_model_only=False "
        "enable_mm_embeds=False interleave_mm_strings=False mm_processor_cache_gb=4 "
        "mm_processor_cache_type='lru' mm_hasher_algorithm='blake3' mm_shm_cache_max_object_size_mb=128 "
        "mm_encoder_only=False mm_encoder_tp_mode='weights' mm_encoder_fp8_scale_save_margin=1.5 "
        "skip_mm_profiling=False video_pruning_method='evs' mm_tensor_ipc='direct_rpc' "
        "mm_processor_device='auto' mm_ipc_gpu_memory_gb=0 mm_device_do_normalize=True "
        "disable_chunked_mm_input=False enable_mm_processor_stats=False allowed_media_domains "
        "limit_mm_per_prompt media_io_kwargs mm_processor_kwargs mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "video_pruning_rate diffusion_config",
    ),
    **_table(
        NO_LORA,
        "enable_lora=False max_loras=1 max_lora_rank=16 fully_sharded_loras=False lora_dtype='auto' "
        "enable_tower_connector_lora=False specialize_active_lora=False "
        "enable_mixed_moe_lora_format=False enable_moe_shared_loras=False default_mm_loras max_cpu_loras "
        "lora_target_modules max_lora_cls_labels",
    ),
    **_table(
        NO_MAMBA,
        "mamba_cache_dtype='auto' mamba_ssm_cache_dtype='auto' mamba_backend='triton' "
        "enable_mamba_shared_prefix_checkpoint=False replayssm_buffer_len=16 use_replayssm=False "
        "enable_mamba_cache_stochastic_rounding=False mamba_cache_philox_rounds=0 mamba_config "
        "mamba_block_size mamba_cache_mode mamba_ssu_algorithm gdn_prefill_backend kda_prefill_backend "
        "kda_decode_backend engram_config",
    ),
    **_table(NO_SPECULATION, "speculative_config spec_method spec_model spec_tokens"),
    **_table(
        NO_OFFLOAD,
        "offload_backend='auto' cpu_offload_gb=0 offload_group_size=0 offload_num_in_group=1 "
        "offload_prefetch_step=1 cpu_offload_params offload_params",
    ),
    **_table(
        NO_TRANSFER,
        "kv_offloading_backend='native' kv_transfer_config kv_events_config ec_transfer_config "
        "ec_manager_config kv_offloading_size",
    ),
    **_table(
        NO_COMPILATION,
        "linear_backend='auto' sparse_indexer_topk_backend='auto' optimization_level=2 "
        "performance_mode='balanced' monokernel=False enable_flashinfer_autotune=False "
        "jit_monitor_mode='warn' jit_monitor_verbose=False compilation_config cudagraph_capture_sizes "
        "max_cudagraph_capture_size ir_op_priority kernel_config attention_config",
    ),
    **_table(
        NO_METRICS,
        "aggregate_engine_logging=False per_request_spec_decode_metrics='none' kv_cache_metrics=False "
        "kv_cache_metrics_sample=0.01 cudagraph_metrics=False enable_layerwise_nvtx_tracing=False "
        "enable_mfu_metrics=False enable_logging_iteration_details=False show_hidden_metrics_for_version "
        "otlp_traces_endpoint collect_detailed_traces custom_histogram_buckets profiler_config "
        "aux_output_config",
    ),
    **_table(
        NO_SLEEP,
        "enable_sleep_mode=False sleep_mode_backend='cumem' sleep_mode_offload_cudagraph=False "
        "enable_cumem_allocator=False sleep_preserve_parameter_names",
    ),
    **_table(NO_WEIGHT_UPDATES, "weight_transfer_config"),
    **_table(
        SAFETENSORS,
        "safetensors_prefetch_num_threads=8 safetensors_prefetch_block_size=16777216 "
        "safetensors_load_strategy model_loader_extra_config model_weights",
    ),
    **_table("edit config.json in a copy of the directory", "hf_config_path hf_overrides"),
    **_table(
        NOT_YET,
        "model_class_overrides return_sampling_mask=False enable_trace_replay=False "
        "async_scheduling=False kv_cache_dtype_skip_layers prefix_match_unit max_num_scheduled_tokens "
        "kv_sharing_fast_prefill=False io_processor_plugin watermark_config additional_config "
        "watchdog_config",
    ),
    **_table(NO_POOLING, "pooler_config"),
    **_table("max_num_seqs is the limit of running requests", "max_num_active_seqs"),
    **_table("max_waiting is the limit of waiting requests", "max_num_queued_tokens"),
    **_table("reasoning stays in the text", "reasoning_config reasoning_parser_plugin"),
    **_table("logs go through Python's logging", "logging_config log_level log_config_file"),
    **_table("an option of vLLM's server", "renderer_num_workers=1 tokens_only=False shutdown_timeout=0"),
    "device_ids": Neutral((None,), f"{ONE_DEVICE}, named by device"),
    "disable_log_stats": Neutral(ANY_BOOL, "must be True or False; an engine logs no statistics"),
    "trust_remote_code": Neutral(ANY_BOOL, "must be True or False; code in a checkpoint is never run"),
    "load_format": Neutral((None, "auto", "safetensors", "hf"), SAFETENSORS),
    "ignore_patterns": Neutral((None, [], ["original/**/*"]), SAFETENSORS),
    "pt_load_map_location": Neutral((None, "cpu"), SAFETENSORS),
    "use_tqdm_on_load": Neutral(ANY_BOOL, "must be True or False; loading shows no bar"),
    "download_dir": Neutral((None,), "set the environment variable HF_HOME"),
    "hf_token": Neutral(
        (None, True), "log in with `hf auth login`, or set the environment variable HF_TOKEN"
    ),
    "code_revision": Neutral((None,), "code in a checkpoint is never run"),
    "config_format": Neutral((None, "auto", "hf"), "config.json is read in Hugging Face's format"),
    "tokenizer_mode": Neutral((None, "auto", "hf"), "the tokenizer is loaded with transformers"),
    "runner": Neutral((None, "auto", "generate", "pooling"), "one engine generates, embeds and scores"),
    "task": Neutral((None, "auto", "generate", "embed"), "one engine generates, embeds and scores"),
    "convert": Neutral((None, "auto", "none", "embed"), "one engine generates, embeds and scores"),
    "served_model_name": Neutral((None,), "`paged run-batch --served-model-name` names the model"),
    "model_impl": Neutral((None, "auto", "vllm"), "models run in paged's own modules alone"),
    "max_logprobs": Neutral((None, 20, -1), "SamplingParams takes logprobs up to 1024, and -1"),
    "logprobs_mode": Neutral((None, "raw_logprobs"), "log-probabilities are those of the unchanged logits"),
    "use_fp64_gumbel": Neutral((None, False), "the noise of sampling is float32"),
    "enable_chunked_prefill": Neutral((None, True), "long prompts are always computed in chunks"),
    "scheduler_reserve_full_isl": Neutral(ANY_BOOL, "must be True or False"),
    "long_prefill_token_threshold_adaptive": Neutral((None, False), NOT_YET),
    "prefill_schedule_interval": Neutral((None, 1), "every step may compute prompts"),
    "stream_interval": Neutral((None, 1), "`AsyncLLMEngine(stream_interval_s=...)` is in seconds"),
    "scheduler_cls": Neutral((None,), "scheduling_policy takes a name or a Policy"),
    "disable_sliding_window": Neutral((None, False), "windows are part of a model"),
    "disable_cascade_attn": Neutral(ANY_BOOL, "must be True or False; results do not depend on it"),
    "disable_hybrid_kv_cache_manager": Neutral((None, False), "each layer group has a block table"),
    "kv_cache_memory_bytes": Neutral((None,), "num_blocks sets the size of the KV cache"),
    "prefix_caching_hash_algo": Neutral((None, "sha256"), "prefixes are hashed by SHA-256"),
    "prefix_cache_retention_interval": Neutral((None, 0), NOT_YET),
    "swa_bounded_replay": Neutral(ANY_BOOL, "must be True or False"),
    "quantization_config": Neutral((None,), "quantization takes 'int8' or 'int4'"),
    "allow_deprecated_quantization": Neutral((None, False), "quantization takes 'int8' or 'int4'"),
    "structured_outputs_config": Neutral((None, {}), "grammars are compiled by llguidance"),
    "logits_processors": Neutral((None, []), "they are a field of SamplingParams"),
    "reasoning_parser": Neutral((None, ""), "reasoning stays in the text"),
    "fail_on_environ_validation": Neutral((None, False), "variables of vLLM's are not read"),
    "override_generation_config": Neutral(
        (None, {}), "give SamplingParams, or a directory as generation_config"
    ),
    "chat_template": Neutral((None,), "it is an argument of chat()"),
    "num_gpu_blocks_override": Neutral((None,), "its name is num_blocks"),
    "max_num_queued_reqs": Neutral((None,), "its name is max_waiting"),
}

# What the log says of an argument that is True.
_NOTES = {
    "trust_remote_code": "trust_remote_code=True has no effect: no code of the checkpoint runs. A native "
    "architecture needs none, and any other is refused"
}

# Options of `vllm serve` alone.
SERVER_ARGS: dict[str, Neutral] = {
    "api_server_count": Neutral((None, 0, 1), "one process answers HTTP; replicas starts several engines"),
    "headless": Neutral((None, False), ONE_DEVICE),
    "uvicorn_log_level": Neutral((None, "info"), "log_format sets the form of the log"),
    **dict.fromkeys(
        ("disable_log_requests", "enable_log_requests", "disable_uvicorn_access_log"),
        Neutral(ANY_BOOL, "must be True or False; each request writes one line to the log"),
    ),
    "max_log_len": Neutral((None,), "prompts are not logged"),
    "enable_log_outputs": Neutral((None, False), "outputs are not logged"),
    "allow_credentials": Neutral((None, False), "requests from browsers bear their key in a header"),
    **dict.fromkeys(
        ("allowed_methods", "allowed_headers"),
        Neutral((None, '["*"]', "*"), "allowed_origins names the websites that may call the server"),
    ),
    "lora_modules": Neutral(_EMPTY, NO_LORA),
    "chat_template_content_format": Neutral((None, "auto", "string"), "templates get the content as text"),
    "response_role": Neutral((None, "assistant"), "answers have the role assistant"),
    **_table(
        "ssl_certfile and ssl_keyfile serve HTTPS; certificates of clients are not supported yet",
        "ssl_ca_certs ssl_cert_reqs=0",
    ),
    "enable_ssl_refresh": Neutral((None, False), "start the server again for a new certificate"),
    "middleware": Neutral(_EMPTY, NOT_YET),
    "tool_parser_plugin": Neutral(_EMPTY, "tool_call_parser names a parser; plugins are not supported yet"),
    "tool_server": Neutral(_EMPTY, NOT_YET),
    "return_tokens_as_token_ids": Neutral((None, False), "return_token_ids in a body returns token ids"),
    "enable_request_id_headers": Neutral(ANY_BOOL, "must be True or False; every response has x-request-id"),
    "disable_fastapi_docs": Neutral(ANY_BOOL, "must be True or False; /openapi.json describes the routes"),
    "enable_force_include_usage": Neutral(
        (None, False), "stream_options of a body asks for the usage of a stream"
    ),
    "enable_server_load_tracking": Neutral((None, False), "/metrics has the requests in progress"),
    "enable_tokenizer_info_endpoint": Neutral((None, False), NOT_YET),
}

SAMPLING_PARAMS: dict[str, Neutral] = {
    **_table(
        "prompt_logprobs reports on every prompt token",
        "prompt_logprob_token_ids prompt_logprob_start",
    ),
    "watermarking": Neutral((None, False), NOT_YET),
    "logprob_token_ids": Neutral((None,), "logprobs=-1 reports the whole vocabulary"),
    "flat_logprobs": Neutral((None, False), "logprobs are a list of dicts"),
    "stream_interval": Neutral((None, 1), "`AsyncLLMEngine(stream_interval_s=...)` is in seconds"),
    "skip_clone": Neutral(ANY_BOOL, "must be True or False; SamplingParams are immutable"),
    "output_text_buffer_length": Neutral((None, 0), "it follows from the stop strings"),
    "extra_args": Neutral((None, {}), "logits_processors are functions, which may have any state"),
    "skip_reading_prefix_cache": Neutral((None, False), "a cache_salt of its own shares no blocks"),
    "thinking_token_budget": Neutral((None, -1), NOT_YET),
    "repetition_detection": Neutral((None,), "the DRY and repetition penalties prevent repetitions"),
    "routed_experts_prompt_start": Neutral((None, 0), NO_EXPERTS),
    "trace_decode_token_ids": Neutral((None,), "`score(prompt, continuations)` reports on given tokens"),
    "guided_decoding": Neutral((None,), "its name is structured_outputs"),
    "truncate_prompt_tokens": Neutral((None, -1), "cut the prompt's token ids"),
}

STRUCTURED_OUTPUTS_PARAMS: dict[str, Neutral] = {
    "disable_any_whitespace": Neutral((None, False), "JSON may have a space or an indented line break"),
    "disable_additional_properties": Neutral(
        (None, False), 'write "additionalProperties": false in the schema'
    ),
    "whitespace_pattern": Neutral((None,), "JSON may have a space or an indented line break"),
}

BEAM_SEARCH_PARAMS: dict[str, Neutral] = {
    "include_stop_str_in_output": Neutral((None, False), "the text of a beam ends before EOS"),
    "skip_special_tokens": Neutral((None, True), "the text of a beam has no special tokens"),
    "structured_outputs": Neutral((None,), NOT_YET),
    "allowed_token_ids": Neutral((None,), NOT_YET),
    "watermarking": Neutral((None, False), NOT_YET),
}

# Arguments of generate, chat, encode, embed, score and beam_search.
CALL_ARGS: dict[str, Neutral] = {
    "lora_request": Neutral((None,), NO_LORA),
    "prompt_adapter_request": Neutral((None,), NO_LORA),
    "tokenization_kwargs": Neutral(
        (None, {}), 'a prompt may be {"prompt": ..., "add_special_tokens": False}'
    ),
    "mm_processor_kwargs": Neutral((None, {}), TEXT_ONLY),
    "chat_template": Neutral((None,), "score takes texts or token ids, no conversations"),
    "chat_template_content_format": Neutral((None, "auto", "string"), "templates get the content as text"),
    "pooling_params": Neutral((None,), NO_POOLING),
    "pooling_task": Neutral((None, "embed"), NO_POOLING),
    "reset_running_requests": Neutral((None, False), "running requests keep their blocks"),
    "reset_connector": Neutral((None, False), NO_TRANSFER),
    "concurrency_limit": Neutral((None,), "max_num_seqs is the limit of running requests"),
}

# Methods, classes and modules that do not exist here, by the class or package that has them in vLLM.
MISSING: dict[str, dict[str, str]] = {
    "LLMEngine": {
        **dict.fromkeys(
            ("from_engine_args", "from_vllm_config"),
            "LLMEngine(model, **options) takes the options of EngineConfig",
        ),
        "get_world_size": ONE_DEVICE,
        "reset_mm_cache": TEXT_ONLY,
        "enqueue": "add_request queues a prompt, and step runs it",
        "enqueue_chat": "add_request queues a prompt, and step runs it",
        "wait_for_completion": "step returns finished outputs while has_unfinished_requests()",
        "collective_rpc": ONE_DEVICE,
        "apply_model": "runner.model is the torch module",
        "start_profile": "use torch.profiler around generate()",
        "stop_profile": "use torch.profiler around generate()",
        "classify": "models that classify are not supported yet",
        **dict.fromkeys(("sleep", "wake_up", "release_kv_cache_memory"), NO_SLEEP),
        "get_metrics": "stats() has the counts",
        **dict.fromkeys(
            (
                "init_weight_transfer_engine",
                "shutdown_weight_transfer_engine",
                "start_weight_update",
                "start_draft_weight_update",
                "update_weights",
                "finish_weight_update",
                "update_weight_version",
                "get_weight_version",
            ),
            NO_WEIGHT_UPDATES,
        ),
    },
    "AsyncLLMEngine": {
        **dict.fromkeys(
            ("from_engine_args", "from_vllm_config"),
            "AsyncLLMEngine(model, **options) takes the options of EngineConfig",
        ),
    },
    "paged": {
        **dict.fromkeys(
            ("EngineArgs", "AsyncEngineArgs", "engine.arg_utils"), "EngineConfig has the options of an engine"
        ),
        "from_engine_args": "LLMEngine(model, **options) takes the options of EngineConfig",
        "ModelRegistry": "docs/add-a-model.md shows how a model is added",
        "PoolingParams": NO_POOLING,
        **dict.fromkeys(("PoolingOutput", "PoolingRequestOutput"), "encode returns EmbeddingRequestOutput"),
        **dict.fromkeys(
            ("ClassificationOutput", "ClassificationRequestOutput"),
            "models that classify are not supported yet",
        ),
        **dict.fromkeys(("ScoringOutput", "ScoringRequestOutput"), "score returns ScoreOutput"),
        "PromptType": "a prompt is text, a list of token ids, a TextPrompt or a TokensPrompt",
        "initialize_ray_cluster": ONE_DEVICE,
        "inputs": "`from paged import TextPrompt, TokensPrompt`",
        "outputs": "`from paged import RequestOutput, CompletionOutput`, and the other outputs",
        "logprobs": "`from paged import Logprob`",
        "beam_search": "`from paged import BeamSearchOutput, BeamSearchSequence`",
        "pooling_params": NO_POOLING,
        "engine.llm_engine": "`from paged import LLMEngine`",
        "engine.async_llm_engine": "`from paged import AsyncLLMEngine`",
        "entrypoints": "`from paged import LLM`; the server is the command `paged serve`",
        "lora": NO_LORA,
        **dict.fromkeys(("multimodal", "assets"), TEXT_ONLY),
        "distributed": ONE_DEVICE,
        "model_executor": "docs/add-a-model.md shows how a model is added",
        **dict.fromkeys(("tokenizers", "transformers_utils"), "`LLM.get_tokenizer()` returns the tokenizer"),
        **dict.fromkeys(("envs", "platforms", "plugins", "utils", "v1"), "internal to vLLM"),
    },
    "RequestOutput": {
        "lora_request": NO_LORA,
        **dict.fromkeys(("encoder_prompt", "encoder_prompt_token_ids"), "models are decoders alone"),
        "num_cache_creation_tokens": "num_cached_tokens has the prefix hits",
        "prompt_token_id_logprobs": "prompt_logprobs reports on every prompt token",
        **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), NO_TRANSFER),
    },
    "CompletionOutput": {
        "routed_experts": NO_EXPERTS,
        "lora_request": NO_LORA,
        "sampling_mask": NOT_YET,
        "spec_decode_metrics": NO_SPECULATION,
        "weight_versions": NO_WEIGHT_UPDATES,
    },
    "SamplingParams": {
        "from_optional": "`SamplingParams` takes None for most fields itself",
        **dict.fromkeys(
            ("update_from_generation_config", "update_from_tokenizer"), "`LLMEngine.params_of(...)` does it"
        ),
        **dict.fromkeys(
            (
                "sampling_type",
                "eos_token_id",
                "all_stop_token_ids",
                "bad_words_token_ids",
                "num_logprobs",
                "verify",
                "for_sampler_warmup",
            ),
            "internal to vLLM",
        ),
    },
}


def without_neutral(
    owner: str,
    given: Mapping[str, Any],
    neutral: Mapping[str, Neutral],
    error: type[PagedError],
    written: str | None = None,
) -> dict[str, Any]:
    """Return the arguments of `owner` without those of vLLM at their neutral value.

    written: the argument as the user wrote it, for messages; by default name=value.

    Raises `error`, which names the argument and what to do, for another value.
    """
    kept = dict(given)
    for name in kept.keys() & neutral.keys():
        value = kept.pop(name)
        values, reason = neutral[name]
        if not any(value is v or (type(value) is type(v) and value == v) for v in values):
            if written is None:
                written = name if name in SECRETS else f"{name}={shown(value)}"
            raise error(f"{owner} got {written}: {reason}")
        if value is True and name in _NOTES:
            logger.warning(_NOTES[name])
    return kept


def missing(owner: str, name: str) -> str:
    """Return the message for a name that does not exist, with what to use in place of one of vLLM's."""
    reason = MISSING.get(owner, {}).get(name)
    return f"{owner} has no {name!r}" + (f": {reason}" if reason else "")


class ExplainsMissing(type):
    """The type of a class whose missing attributes say what to use instead."""

    if not TYPE_CHECKING:  # a type checker would take every attribute to exist

        def __getattr__(cls, name: str) -> NoReturn:
            raise AttributeError(missing(cls.__name__, name), name=name, obj=cls)


class MissingNames:
    """The last import hook of Python: says what to use for a module of vLLM, and for a name of `vllm`.

    `from paged import EngineArgs` looks for a module paged.EngineArgs where paged has no such attribute.
    """

    @staticmethod
    def find_spec(full_name: str, *_: object) -> None:
        """Return that there is no such module. Raises ImportError if vLLM has it."""
        package, _dot, name = full_name.partition(".")
        if package == __package__ and name in MISSING["paged"]:
            raise ImportError(missing("paged", name), name=full_name)
