"""Choose the format of each weight by what config.json says of it and by its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...architectures.config import TensorNames
from ...architectures.schemes import Kind, Module, Quantization, Rule, Scheme
from ...base.errors import CheckpointError, UnsupportedModelError
from ..stored import FLOATS, Recognizer, StoredFormat, StoredPart, StoredTensor
from .fp4 import mxfp4_format, nvfp4_format
from .gguf import gguf_format
from .whole_bytes import fp8_format, integer_format
from .words import awq_format, gptq_format, packed_format

_FORMATS: Mapping[Kind, Callable[[Scheme, StoredPart], StoredFormat]] = {
    "gptq": gptq_format,
    "awq": awq_format,
    "packed integers": packed_format,
    "integers": integer_format,
    "fp8": fp8_format,
    "mxfp4": mxfp4_format,
    "nvfp4": nvfp4_format,
}
# Of weights in codes, beside "weight" itself: what is kept in memory, and what is not.
KEPT = (
    *("qweight", "qzeros", "scales", "weight_packed", "weight_zero_point"),
    *("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale"),
)
_TENSORS = (*KEPT, "g_idx", "weight_g_idx", "weight_shape")


def recognizers_of(quantization: Quantization | None, names: TensorNames) -> tuple[Recognizer, ...]:
    """Return the functions that recognize the quantised weights of a checkpoint."""
    if quantization is None:
        return (gguf_format,)  # a GGUF file's tensors say what they are

    def recognize(part: StoredPart) -> StoredFormat | None:
        codes = _codes(part)
        rule = quantization.rule_of(_module(part, names, codes))
        if rule.scheme is None:
            if codes is not None:
                raise _contradiction(codes, rule, "floats")
            return None
        floats = part.get("weight")
        if codes is None and floats is not None:
            if rule.is_certain:
                raise _contradiction(floats, rule, rule.scheme.title)
            return None
        if codes is None and not rule.is_certain:
            return None
        # The floats of gpt-oss are [inputs, outputs], but its codes are not.
        is_right = rule.scheme.kind in ("gptq", "awq") or rule.scheme.producer == "gpt-oss"
        if part.transposed and not is_right:
            raise UnsupportedModelError(
                f"{part.name} is stored as [inputs, outputs], which {rule.scheme.title} is not supported for"
            )
        return _FORMATS[rule.scheme.kind](rule.scheme, part)

    return (recognize,)


def _codes(part: StoredPart) -> StoredTensor | None:
    """Return a tensor by which a part is no plain weight."""
    weight = part.get("weight")
    if weight is not None and weight.dtype not in FLOATS:
        return weight
    return next((found for name in _TENSORS if (found := part.get(name))), None)


def _contradiction(tensor: StoredTensor, rule: Rule, said: str) -> CheckpointError:
    return CheckpointError(
        f"{tensor.path}: {tensor.name} is {tensor.dtype}, but {rule.source} in quantization_config makes it "
        f"{said}"
    )


def _module(part: StoredPart, names: TensorNames, codes: StoredTensor | None) -> Module:
    """Return a part with all names that rules may call it by.

    They are made of those in the checkpoint, or in the classes of transformers, whose prefixes differ.
    """
    stored = codes or part.get("weight")
    known = [] if stored is None else [stored.name.rpartition(".")[0]]
    known += [name.removesuffix(".") for name in names.all_in_checkpoint(f"{part.name}.")]
    is_table = part.name.rpartition(".")[2].startswith("embed_")
    is_stacked = codes is None and stored is not None and stored.name.endswith("]")  # by `experts_of`
    return Module(
        (*dict.fromkeys(known), part.name),
        "Embedding" if is_table else "Stack" if is_stacked else "Linear",
    )
