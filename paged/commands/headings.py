"""Headings of options in `--help`, and the classes of commands and groups that print them."""

from __future__ import annotations

import difflib
import sys
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..base.docstrings import docstring_of
from ..base.errors import UnknownArgumentError
from .option_texts import OBJECTS
from .several_values import one_value_each
from .spelling import spelled_out
from .written import options_as_written

SERVER, MODEL, SAMPLING, OUTPUT, SCHEDULING, MEMORY = HEADINGS = (
    "Server",
    "Model",
    "Sampling",
    "Output",
    "Scheduling",
    "Memory",
)
# The heading of each field, by the name of its class, which not every command imports. Fields that are not
# named here have the last one of their class.
_FIELDS: dict[str, dict[str, str]] = {
    "EngineConfig": {
        MODEL: """model tokenizer revision tokenizer_revision generation_config dtype quantization device
            attention_backend num_threads pipeline_parallel_size tensor_parallel_size pipeline_layers
            rank_timeout_s deterministic enforce_eager async_scheduling cudagraph_capture_sizes
            max_cudagraph_capture_size speculative_config
            enable_lora max_loras max_lora_rank max_cpu_loras lora_target_modules
            skip_tokenizer_init weights_cache verify_weights_cache language_model_only limit_mm_per_prompt
            mm_processor_kwargs""",
        SAMPLING: "seed",
        MEMORY: """kv_cache_dtype block_size max_model_len num_blocks gpu_memory_utilization
            cpu_memory_utilization enable_prefix_caching state_snapshots state_interval watermark
            swap_space mm_processor_cache_gb""",
        SCHEDULING: "",
    },
    "SamplingParams": {
        OUTPUT: """min_tokens max_tokens stop stop_token_ids include_stop_str_in_output ignore_eos logprobs
            prompt_logprobs detokenize skip_special_tokens spaces_between_special_tokens""",
        SCHEDULING: "priority timeout_s",
        MEMORY: "cache_salt",
        SAMPLING: "",
    },
    "ServeOptions": {
        MODEL: """chat_template default_chat_template_kwargs trust_request_chat_template
            enable_auto_tool_choice tool_call_parser reasoning_parser lora_modules
            allow_runtime_lora_updating""",
        SCHEDULING: "replicas router stream_interval_s",
        SERVER: "",
    },
    "ApiAddress": {SERVER: ""},
    "Shown": {OUTPUT: ""},
    "AdapterOption": {MODEL: ""},
}


# The parser's error: click's in older versions of Typer, that of Typer's own copy in newer ones.
NO_SUCH_OPTION: type[Any] = sys.modules[typer.BadParameter.__module__].NoSuchOption


def heading_of(owner: type[Any], name: str) -> str:
    """Return the help heading of a field's option; for a class without headings, the name of the class."""
    headings = _FIELDS.get(owner.__name__, {owner.__name__.removesuffix("Config"): ""})
    return next((heading for heading, names in headings.items() if name in names.split()), [*headings][-1])


def _with_help(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a command with the docstring of its function as help.

    Typer takes it from there, too, but `python -OO` has none there.
    """
    callback = options.get("callback")
    return {**options, "help": options.get("help") or (docstring_of(callback) if callback else None)}


class GroupedCommand(TyperCommand):
    """A command that lists its options under headings in its help, in plain text.

    `vllm_options` accepts or refuses vLLM's flags that do not exist here.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **_with_help(options))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments into the context. Raises ConfigError for an unsupported flag of vLLM."""
        while True:
            try:
                # An unfinished line, which is completed, may lack the value of a key.
                spelled = args if ctx.resilient_parsing else self._spelled_out(args)
                return super().parse_args(ctx, one_value_each(self.params, spelled))
            except NO_SUCH_OPTION as error:
                from .vllm_options import without_flag

                left = without_flag(ctx.command_path, args, error.option_name)
                if left is None:
                    raise
                args = left

    def _spelled_out(self, args: list[str]) -> list[str]:
        options: list[Any] = [each for each in self.params if each.param_type_name == "option"]
        takes_value = {
            flag: not each.is_flag for each in options for flag in (*each.opts, *each.secondary_opts)
        }
        objects = [flag for each in options if each.name in OBJECTS for flag in each.opts]
        return spelled_out(args, takes_value, objects)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. An error about an option names its flag."""
        flags = {
            each.name: each.opts[0] if ctx.params.get(each.name) is not False else each.secondary_opts[0]
            for each in self.params
            if each.param_type_name == "option"
            and ctx.get_parameter_source(each.name).name == "COMMANDLINE"
            and (each.secondary_opts or ctx.params.get(each.name) is not False)
        }
        with options_as_written(flags):
            return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading."""
        sections = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                own = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections[getattr(parameter, "rich_help_panel", None) or own].append(record)
        # Those of the command itself come first.
        for heading in sorted(sections, key=lambda h: HEADINGS.index(h) if h in HEADINGS else -1):
            with formatter.section(heading):
                formatter.write_dl(sections[heading])


class UnknownCommandError(UnknownArgumentError):
    """A command that does not exist."""


class CommandGroup(TyperGroup):
    """A group that answers an unknown command with a list of its commands."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **_with_help(options))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name. Raises UnknownCommandError."""
        name = args[0]
        names = self.list_commands(ctx)
        if name not in names and not name.startswith("-") and not ctx.resilient_parsing:
            nearest = difflib.get_close_matches(name, names, n=1)
            guess = f"did you mean {nearest[0]!r}? it has " if nearest else "it has "
            raise UnknownCommandError(
                f"{ctx.command_path} has no command {name!r}; {guess}{', '.join(names)}"
            )
        return super().resolve_command(ctx, args)
