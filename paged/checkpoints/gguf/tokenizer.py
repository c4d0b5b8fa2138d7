"""Make tokenizer.json and tokenizer_config.json out of a GGUF file's metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ...base.errors import CheckpointError, UnsupportedModelError
from ...base.validation import shown
from ..tokenizer_patterns import CL100K, O200K, QWEN2, QWEN3_5, TEKKEN
from .metadata import Metadata

_PREFIX = "tokenizer.ggml."
# The types of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
_SPACE = "▁"
# Special tokens of tokenizer_config.json.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_PHI3_PLAIN = ("<unk>", "<s>", "<|endoftext|>")
# llama.cpp ends at these too, whatever their type and where the metadata name only one of them.
_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",  # gpt-oss
    "<|call|>",
    "<|flush|>",  # Solar Open
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",  # Kimi K2
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",  # Gemma
    "<turn|>",  # Gemma 4
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",  # DeepSeek
    "[e~[",  # MiniMax-M2
)
# Tokens for the middle of a text (FIM), by the keys that name one. Without the key the first name counts.
_MIDDLES = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLD_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_ENDING_MIDDLES = ("fim_pad", "fim_rep", "fim_sep")  # an answer ends at these too
# Where all of these tokens are, <|end|> ends a part of an answer.
_OF_PARTS = (
    *(("<|return|>", "<|call|>"), ("<|return|>", "<|calls|>")),  # gpt-oss
    *(("<|flush|>", "<|call|>"), ("<|flush|>", "<|calls|>")),  # Solar Open
)


class PreTokenizer(NamedTuple):
    """How a text is split before tokenization, and what else the pre-tokenizer's name in the metadata
    implies.

    expression: the regular expression of the parts; None means GPT-2's.
    splits_digits: whether each digit is split off first.
    whole_tokens: whether a part that is itself a token is taken without applying merges.
    """

    expression: str | None = None
    splits_digits: bool = False
    whole_tokens: bool = False
    adds_bos: bool = False
    normalizer: str | None = None


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    **dict.fromkeys(("olmo", "mpt"), PreTokenizer(normalizer="NFC")),  # GPT-NeoX's
    **dict.fromkeys(("smollm", "refact", "starcoder", "codeshell"), PreTokenizer(splits_digits=True)),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "lfm2", "falcon-h1", "falcon3", "pixtral"),
        PreTokenizer(CL100K, whole_tokens=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(CL100K)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), PreTokenizer(QWEN2, normalizer="NFC")),
    "qwen35": PreTokenizer(QWEN3_5, normalizer="NFC"),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), PreTokenizer(O200K)),
    "tekken": PreTokenizer(TEKKEN, whole_tokens=True, adds_bos=True),
}


class Vocabulary(NamedTuple):
    """The tokens of a GGUF file, with their ids.

    types: the type of each token. A token whose name marks it as a control token is CONTROL, whatever the
        file says.
    overridden: the tokens whose type here differs from their type in the file.
    """

    metadata: Metadata
    tokens: Sequence[str]
    types: list[int]
    ids: Mapping[str, int]
    overridden: Sequence[str] = ()

    def id_of(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a special token. Raises CheckpointError if there is no such token."""
        key = f"{_PREFIX}{name}_token_id"
        found: int | None = self.metadata.integer(key, None)
        if found is None:
            return default if default is not None and default < len(self.tokens) else None
        if not 0 <= found < len(self.tokens):
            raise CheckpointError(
                f"{self.metadata.path}: {key} is {found}, but there are {len(self.tokens)} tokens"
            )
        return found


def make_tokenizer(metadata: Metadata) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contents of tokenizer.json and of tokenizer_config.json.

    Raises UnsupportedModelError for an unknown type of tokenizer, and CheckpointError for missing values.
    """
    kind = metadata.text(f"{_PREFIX}model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise UnsupportedModelError(
            f"{metadata.path}: {_PREFIX}model {kind!r} is not supported; supported are gpt2, llama and gemma4"
        )
    vocabulary = read_vocabulary(metadata)
    if kind == "gpt2":
        return _byte_level(vocabulary)
    if kind == "llama":
        defaults = {"bos": 1, "eos": 2, "unk": 0}  # of SentencePiece
        return _sentencepiece(vocabulary, defaults, merges_of(vocabulary, _scores_of(vocabulary)))
    return _sentencepiece(vocabulary, {}, _merges_in(metadata, vocabulary.ids), adds_space=False)


def read_vocabulary(metadata: Metadata) -> Vocabulary:
    """Read the tokens. Raises CheckpointError if a token occurs twice."""
    tokens = metadata.strings(f"{_PREFIX}tokens")
    types = metadata.numbers(f"{_PREFIX}token_type", "iI")
    if len(types) != len(tokens):
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}token_type has {len(types)} values for {len(tokens)} tokens"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for i, token in enumerate(tokens) if ids[token] != i)
        raise CheckpointError(f"{metadata.path}: token {shown(twice)} is there twice")
    vocabulary = Vocabulary(metadata, tokens, [*types], ids)
    by_name = dict.fromkeys(ids[token] for token in _control_names(ids))
    by_name |= dict.fromkeys(i for i, is_named in _middles(vocabulary).values() if not is_named)
    overridden = [i for i in by_name if types[i] != _CONTROL]
    for i in overridden:
        vocabulary.types[i] = _CONTROL
    return vocabulary._replace(overridden=[tokens[i] for i in overridden])


def _control_names(ids: Mapping[str, int]) -> list[str]:
    """Return the known names of ends that a vocabulary has."""
    plain = "</s>" if "<|tool_response>" in ids else None  # in Gemma 4 it is HTML
    return [token for token in _ENDS if token in ids and token != plain]


def _middles(vocabulary: Vocabulary) -> dict[str, tuple[int, bool]]:
    """Return the tokens for the middle of a text by key, and whether the metadata name them."""
    found = {}
    for key, names in _MIDDLES.items():
        keys = (f"{_PREFIX}{each}_token_id" for each in (key, _OLD_KEYS.get(key, key)))
        named = [i for each in keys if (i := vocabulary.metadata.integer(each, None)) is not None]
        known = [vocabulary.ids[name] for name in names if name in vocabulary.ids]
        # Numbers that no token has are left out, as in llama.cpp.
        if fitting := [i for i in named if 0 <= i < len(vocabulary.tokens)]:
            found[key] = fitting[0], True
        elif known:
            found[key] = known[0], False
    return found


def _byte_level(vocabulary: Vocabulary) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a tokenizer like GPT-2's."""
    metadata = vocabulary.metadata
    name = metadata.text(f"{_PREFIX}pre", None)
    if name is None:  # before May 2024; llama.cpp splits by a rule that few models were trained with
        raise UnsupportedModelError(
            f"{metadata.path}: {_PREFIX}pre, which says how texts are split, is missing: convert it again"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"{metadata.path}: {_PREFIX}pre {name!r} is not supported; supported are "
            f"{', '.join(PRE_TOKENIZERS)}"
        )
    kind = PRE_TOKENIZERS[name]
    specials = {ours: vocabulary.id_of(theirs) for ours, theirs in _SPECIAL.items()}
    # Without those that pad the vocabulary.
    used = (i for i, kind in enumerate(vocabulary.types) if kind != _UNUSED or i in specials.values())
    ids = {vocabulary.tokens[i]: i for i in used}
    model = {
        "type": "BPE",
        "vocab": ids,
        "merges": _merges_in(metadata, ids),
        "ignore_merges": kind.whole_tokens,
    }
    steps: list[dict[str, Any]] = []
    if kind.splits_digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if kind.expression is not None:
        pattern = {"Regex": kind.expression}
        steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    is_gpt2 = kind.expression is None
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    steps.append({**byte_level, "use_regex": is_gpt2})
    whole = {
        "normalizer": kind.normalizer and {"type": kind.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": {**byte_level, "use_regex": True},
        "model": model,
    }
    return _finished(vocabulary, whole, specials, adds_bos=kind.adds_bos)


def _merges_in(metadata: Metadata, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that a file lists."""
    return [_halves(metadata, ids, merge) for merge in metadata.strings(f"{_PREFIX}merges")]


def _halves(metadata: Metadata, ids: Mapping[str, int], merge: str) -> tuple[str, str]:
    first, _, second = merge.partition(" ")
    if not (first in ids and second in ids and first + second in ids):
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}merges has {shown(merge)}, which makes no token of two"
        )
    return first, second


def _scores_of(vocabulary: Vocabulary) -> Sequence[float]:
    """Return the scores of tokens."""
    metadata = vocabulary.metadata
    scores: Sequence[float] = metadata.numbers(f"{_PREFIX}scores", "fd")
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}scores has {len(scores)} values for {len(vocabulary.tokens)} tokens"
        )
    if any(map(math.isnan, scores)):
        raise CheckpointError(f"{metadata.path}: {_PREFIX}scores has a value that is NaN")
    return scores


def _sentencepiece(
    vocabulary: Vocabulary,
    defaults: Mapping[str, int],
    merges: Sequence[tuple[str, str]],
    *,
    adds_space: bool = True,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make a tokenizer like that of SentencePiece, which has a token for each byte.

    defaults: the ids of special tokens that the file does not name. merges: pairs, the first ones first.
    adds_space: whether a text begins with a space where the file does not say.
    """
    metadata = vocabulary.metadata
    for key in ("remove_extra_whitespaces", "precompiled_charsmap"):
        if metadata.values.get(_PREFIX + key):
            raise UnsupportedModelError(f"{metadata.path}: {_PREFIX}{key} is not supported")
    specials = {ours: vocabulary.id_of(theirs, defaults.get(ours)) for ours, theirs in _SPECIAL.items()}
    unknown = None if specials["unk"] is None else vocabulary.tokens[specials["unk"]]
    adds_space = metadata.flag(f"{_PREFIX}add_space_prefix", adds_space)
    replaced: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if adds_space:
        replaced.insert(0, {"type": "Prepend", "prepend": _SPACE})
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    whole = {
        "normalizer": {"type": "Sequence", "normalizers": replaced},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "vocab": dict(vocabulary.ids),
            "merges": merges,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": True,
        },
    }
    return _finished(vocabulary, whole, specials, adds_bos=True)


def merges_of(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that can be merged to a token, best score first.

    At equal scores, longer tokens come first, as in transformers' conversion.
    """
    merged = (_NORMAL, _USER_DEFINED, _UNUSED)
    ids = {token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] in merged}
    found = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            first = ids.get(token[:cut])
            second = ids.get(token[cut:]) if first is not None else None
            if first is not None and second is not None:
                found.append((-scores[i], -cut, cut - len(token), i, first, second, token))
    found.sort()
    return [(token[:-cut], token[-cut:]) for _, cut, *_, token in found]


def _finished(
    vocabulary: Vocabulary, whole: dict[str, Any], specials: Mapping[str, int | None], *, adds_bos: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Add the special tokens and the rule by which a text begins or ends with them."""
    metadata = vocabulary.metadata
    named = {name: i for name, i in specials.items() if i is not None}
    whole = {"version": "1.0", "truncation": None, "padding": None, **whole}
    whole["added_tokens"] = _added_tokens(vocabulary, named)
    before = _added_at(metadata, "bos", named, metadata.flag(f"{_PREFIX}add_bos_token", adds_bos))
    after = _added_at(metadata, "eos", named, metadata.flag(f"{_PREFIX}add_eos_token", False))
    whole["post_processor"] = _template(vocabulary, before, after)
    settings: dict[str, Any] = {f"{name}_token": vocabulary.tokens[i] for name, i in named.items()}
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if (template := _chat_template(metadata)) is not None:
        settings["chat_template"] = template
    return whole, settings


def _added_at(metadata: Metadata, name: str, named: Mapping[str, int], is_added: bool) -> list[int]:
    if not is_added:
        return []
    if name not in named:
        raise CheckpointError(
            f"{metadata.path}: {_PREFIX}add_{name}_token is true, but {_PREFIX}{name}_token_id is missing"
        )
    return [named[name]]


def _added_tokens(vocabulary: Vocabulary, named: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split."""
    found = []
    # Phi-3's take the blanks after them, as llama.cpp knows by its name.
    is_phi3 = vocabulary.metadata.architecture == "phi3" and (
        vocabulary.metadata.text(f"{_PREFIX}model") == "llama"
    )
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        is_special = kind in (_CONTROL, _UNKNOWN) or i in named.values()
        if token and (is_special or kind == _USER_DEFINED):
            takes_blanks = is_phi3 and token not in _PHI3_PLAIN
            flags = {"single_word": False, "lstrip": False, "rstrip": takes_blanks, "normalized": False}
            found.append({"id": i, "content": token, **flags, "special": is_special})
    return found


def _template(vocabulary: Vocabulary, before: list[int], after: list[int]) -> dict[str, Any] | None:
    """Return the post-processor that adds these tokens."""
    if not before and not after:
        return None

    def special(i: int, part: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": vocabulary.tokens[i], "type_id": part}}

    def text(name: str, part: int) -> list[dict[str, Any]]:
        sequence = {"Sequence": {"id": name, "type_id": part}}
        return [*(special(i, part) for i in before), sequence, *(special(i, part) for i in after)]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": text("A", 0) + text("B", 1),
        "special_tokens": {
            vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
            for i in {*before, *after}
        },
    }


def _chat_template(metadata: Metadata) -> str | list[dict[str, str]] | None:
    """Return the chat template, or all if there are several."""
    default: str | None = metadata.text("tokenizer.chat_template", None)
    names = metadata.strings("tokenizer.chat_templates", [])
    if not names:
        return default
    named = [{"name": name, "template": metadata.text(f"tokenizer.chat_template.{name}")} for name in names]
    return named if default is None else [{"name": "default", "template": default}, *named]


def read_ends(metadata: Metadata) -> list[int]:
    """Return the ids of tokens that end an answer: those named in the metadata, and tokens of known names."""
    vocabulary = read_vocabulary(metadata)
    default = 2 if metadata.text(f"{_PREFIX}model") == "llama" else None
    found = {vocabulary.id_of("eos", default), vocabulary.id_of("eot"), vocabulary.id_of("eom")}
    found |= {i for key, (i, _) in _middles(vocabulary).items() if key in _ENDING_MIDDLES}
    found |= {vocabulary.ids[token] for token in _control_names(vocabulary.ids)}
    if any(vocabulary.ids.keys() >= {*tokens} for tokens in _OF_PARTS):
        found.discard(vocabulary.ids.get("<|end|>"))
    if "<|tool_response>" in vocabulary.ids:
        found.discard(vocabulary.ids.get("</s>"))
    return sorted(i for i in found if i is not None)
