"""Batch: one step as ragged device tensors. The sequences' new tokens are concatenated, without padding."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ..kernels.attention_options import AttentionPlan


@dataclass(slots=True)
class Queries:
    """The new tokens for which attention is computed: in each of num_seqs sequences, the last few tokens."""

    # One per layer group: i32[num_seqs, max_blocks_per_seq], zeros after a sequence's own blocks
    block_tables: tuple[Tensor, ...]
    seq_lens: Tensor  # i32[num_seqs], up to and including these tokens
    cu_seqlens_q: Tensor  # i32[num_seqs + 1], exclusive prefix sum of the number of these tokens
    max_seqlen_q: int
    min_seqlen_q: int
    max_decode_q: int = 1  # of how many new tokens a sequence is a decode, whose keys attention may split
    max_seq_len: int | None = None  # no sequence is longer; None: as long as block tables allow
    last_keys: Tensor | None = None  # i32, the last position that each of these tokens sees; None: its own
    # By a layer's `plan_key`, the stride of its queries and the width of its block table; made by the first
    # such layer
    plans: dict[tuple[int | None, int, int, int], AttentionPlan] = field(default_factory=dict)


@dataclass(slots=True)
class Batch:
    """The tensors of one step. The num_tokens new tokens of all sequences are concatenated."""

    token_ids: Tensor  # i64[num_tokens]
    positions: Tensor  # i64[num_tokens], higher by an offset in a long request: see LongContext
    rope_lens: Tensor | None  # i64[num_tokens], the sequence length for dynamic rope scaling
    slot_mapping: tuple[Tensor, ...]  # one per layer group: i64[num_tokens], where new K and V go
    queries: Queries  # the new tokens
    # i64[num_output_rows]: the new tokens whose final hidden states are needed, first for sampling, then for
    # reports
    output_rows: Tensor
    # output_rows as queries, where a sequence may occur several times; None if there are none
    output_queries: Queries | None
    num_logits: int  # output rows to sample from
    age: int = 0  # how many times the batch was advanced by one token in place
    # i32[num_seqs]: the slot of each sequence's state; None: the model keeps none
    seats: Tensor | None = None
    # i32[num_seqs, 2]: how many tokens of its last run of drafts a sequence applies to its state first, and
    # whether its new tokens are a run; None: there are no drafts
    runs: Tensor | None = None
    # i32[num_tokens], i32[num_output_rows]: the slot of each one's LoRA adapter, -1 without; None: no token
    # has an adapter. In a decode both are the same
    adapters: Tensor | None = None
    output_adapters: Tensor | None = None
    is_decode: bool = False  # output_rows are all new tokens, in order, and all are sampled from
    real_count: Tensor | None = None  # i32[1], the tokens of the step, behind which others pad it; None: all
    # Embeddings in place of those of tokens, as of images: i64[n] and [n, hidden_size]; None: there are none
    given: tuple[Tensor, Tensor] | None = None
    # What is added to these rows behind the first layers, [n, hidden_size] for each: see StackSpec
    features: tuple[Tensor, ...] = ()
    # i64[3, num_tokens]: the time, row and column that each token is rotated by; None: all are its position
    grid_positions: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the launches of the step depend only on its numbers of tokens."""
        return self.given is None and self.grid_positions is None and self.queries.last_keys is None

    def forget_given(self) -> None:
        """Remove the embeddings of images, so that the batch can be reused for tokens only."""
        self.given = self.grid_positions = self.queries.last_keys = None
        self.features = ()

    @property
    def num_tokens(self) -> int:
        """Number of new tokens: the rows of every activation."""
        return self.token_ids.shape[0]

    @property
    def num_output_rows(self) -> int:
        """Number of rows of the final hidden states."""
        return self.output_rows.shape[0]
