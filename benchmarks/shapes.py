"""The attention batches that are modelled and measured, by section. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.costs import paged_attention_cost

# The batches on which comparators that compile for half a minute are measured.
WITH_SLOW = (
    "decode 64 x 8k, block 16",
    "decode 1 x 64k beside 63 x 500",
    "prefill 4 x 4k, D 128, block 16",
)


@dataclass(frozen=True)
class AttentionShape:
    """One batch over a paged cache, with the sizes of its model."""

    section: str
    name: str
    seq_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 4
    head_dim: int = 128
    block_size: int = 16
    cache: str | None = None  # "int8" or "float8_e4m3fn"; None: as the query
    against: tuple[str, ...] = ()  # slow comparators, for a few batches only

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return max(self.query_lens) == 1

    def cost(self, element_size: int) -> tuple[int, int]:
        """Return the least (bytes, FLOPs) that any kernel needs."""
        # One byte, and its share of the float32 scale of a token and head.
        kv_bytes = None if self.cache is None else 1 + 4 / self.head_dim
        return paged_attention_cost(
            self.query_lens,
            self.seq_lens,
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            element_size,
            kv_bytes=kv_bytes,
        )


def attention_shapes() -> list[AttentionShape]:
    """Return the batches that a GPU is measured with."""
    shapes = [decode(64, context) for context in (1024, 2048, 4096, 8192)]
    shapes += [decode(64, context, block_size=64) for context in (1024, 8192)]
    shapes.append(decode(1, 65536, section="long"))
    shapes.append(skewed(65536, 500, 63))
    shapes += [decode(64, 8192, section="quantized", cache=cache) for cache in ("int8", "float8_e4m3fn")]
    for head_dim in (128, 64):
        for block_size in (16, 64):
            shapes += [
                prefill(16384 // length, length, head_dim=head_dim, block_size=block_size)
                for length in (512, 1024, 2048, 4096, 8192, 16384)
            ]
    slow = ("flex_attention",)
    return [replace(shape, against=slow) if shape.name in WITH_SLOW else shape for shape in shapes]


def tiny_shapes() -> list[AttentionShape]:
    """Return small batches of the same sections, for Triton's interpreter."""
    model = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    return [
        decode(2, 70, **model),
        decode(1, 130, section="long", **model),
        skewed(130, 5, 2, **model),
        decode(2, 40, section="quantized", cache="int8", **model),
        prefill(1, 24, **model),
    ]


def decode(
    batch: int,
    context: int,
    *,
    section: str = "decode",
    block_size: int = 16,
    cache: str | None = None,
    **model: int,
) -> AttentionShape:
    """Make a batch of equal contexts with one new token each."""
    return AttentionShape(
        section,
        f"decode {batch} x {_tokens(context)}, block {block_size}{f', {cache}' if cache else ''}",
        (context,) * batch,
        (1,) * batch,
        block_size=block_size,
        cache=cache,
        **model,
    )


def skewed(longest: int, others: int, num_others: int, **model: int) -> AttentionShape:
    """Make a decode of one long sequence beside short ones."""
    return AttentionShape(
        "skewed",
        f"decode 1 x {_tokens(longest)} beside {num_others} x {_tokens(others)}",
        (longest, *(others,) * num_others),
        (1,) * (1 + num_others),
        **model,
    )


def prefill(
    batch: int, length: int, *, head_dim: int = 128, block_size: int = 16, **model: int
) -> AttentionShape:
    """Make a batch of whole prompts, causal."""
    return AttentionShape(
        "prefill",
        f"prefill {batch} x {_tokens(length)}, D {head_dim}, block {block_size}",
        (length,) * batch,
        (length,) * batch,
        head_dim=head_dim,
        block_size=block_size,
        **model,
    )


def _tokens(n: int) -> str:
    return f"{n // 1024}k" if n >= 1024 and n % 1024 == 0 else str(n)
