"""Layers that keep a state in place of K and V: the gated delta rule, Mamba-2, and short convolutions."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn

from ...architectures.config import LAYERS, ModelConfig
from ...architectures.states import StateSpec
from ...checkpoints.stored import StoredRows, ValueCheck
from ..batch import Batch, Queries
from ..cache.kv_cache import KVCache
from ..cache.states import LayerStates
from ..exchanges import gather
from ..part import Shard
from ..state_columns import of_heads, own_columns
from ..weights.loading import Loadable, Loader
from .linear import Linear
from .norms import RMSNorm
from .rotary import TokenRows

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


def new_state_layer(config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> StateLayer:
    """Make the recurrent sublayer of a layer."""
    kinds: dict[str, type[StateLayer]] = {"delta": GatedDelta, "mamba2": Mamba2, "conv": ShortConv}
    return kinds[config.states[layer].kind](config, layer, kernels, shard)


class Sequences(NamedTuple):
    """The sequences of a step, with the seats that hold their states."""

    seats: Tensor  # i32[num_seqs]: the slots of states
    seq_lens: Tensor  # i32[num_seqs]
    cu_seqlens_q: Tensor  # i32[num_seqs + 1]
    runs: Tensor | None  # i32[num_seqs, 2], see `Batch.runs`


class StateLayer(nn.Module):
    """A recurrent sublayer, in place of attention, called in two steps.

    `project` computes everything up to the output projection, and updates the states of the sequences.
    `attend` applies the output projection, which only some of the tokens may need.
    """

    inputs: Linear  # makes what the state takes of hidden states
    output: Linear
    input_size: int  # the numbers of a token that change the state
    is_gathered = False  # whether what `project` returns is that of all shards

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = kernels
        self.shard = shard
        self.spec = shard.state(config.states[layer])

    def project(
        self,
        hidden: Tensor,
        rows: TokenRows,
        batch: Batch,
        kv_cache: KVCache,
    ) -> Tensor:  # [num_tokens, hidden_size] -> [num_tokens, num_heads, value_dim]
        """Update the states with the new tokens. Return the tokens' outputs before the output projection."""
        assert kv_cache.states is not None, "a model with states has a cache of them"
        assert batch.seats is not None, "the batch of such a model says where they are"
        queries = batch.queries
        sequences = Sequences(batch.seats, queries.seq_lens, queries.cu_seqlens_q, batch.runs)
        made: Tensor = self.inputs(hidden, rows.adapters)
        return self.advance(made, kv_cache.states.layer(self.layer), sequences)

    def advance(self, made: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        """Compute `project` from the output of the input projection, for the states of this layer."""
        raise NotImplementedError

    def apply_runs(self, states: LayerStates, sequences: Sequences) -> None:
        """Apply the accepted tokens of last runs to the states, outside of a step.

        Each sequence computes one token whose input is zero. Its effect is discarded: the next run takes its
        place.
        """
        inputs = states.last_inputs
        num_tokens = len(sequences.seats)
        zeros = inputs.new_zeros(num_tokens, self.input_size)
        self.advance_inputs(zeros, states, sequences)

    def advance_inputs(self, inputs: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        """Update the states with tokens of these inputs, [num_tokens, input_size]. Return the outputs."""
        raise NotImplementedError

    def attend(
        self,
        query: Tensor,
        queries: Queries,  # noqa: ARG002
        kv_cache: KVCache,  # noqa: ARG002
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Apply the output projection to what `project` returned. Return [n, hidden_size].

        queries and kv_cache are arguments of `Attention.attend`. They have no effect.
        """
        made = query.flatten(1)
        whole = made if self.is_gathered else gather(made, self.shard)
        return gather(self.output(whole, adapters), self.shard)

    def _new_output(self, config: ModelConfig, name: str, num_inputs: int, *, bias: bool) -> Linear:
        stored = StoredRows({name: config.hidden_size})
        if not self.shard.is_whole:
            stored = stored.take(self.shard.share(config.hidden_size))
        return Linear(num_inputs, stored, bias=bias)


class GatedDelta(StateLayer):
    """A short convolution, then the gated delta rule (Yang et al. 2024), as in Qwen3-Next and Qwen3.5."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> None:
        super().__init__(config, layer, kernels, shard)
        whole = config.states[layer]
        name = f"{LAYERS}{layer}.linear_attn"
        stored = _stored_inputs(whole, name)
        conv = StoredRows({f"{name}.conv1d": whole.columns})
        gates = StoredRows({name: whole.num_heads})
        if not shard.is_whole:
            own = own_columns(whole, shard)
            heads = shard.share(whole.num_heads)
            values = of_heads(heads, whole.value_dim, whole.columns)
            first = whole.columns + whole.num_heads * whole.value_dim
            others = [of_heads(heads, 1, first + i * whole.num_heads) for i in range(2)]
            stored = stored.take(*own, values, *others)
            conv = conv.take(*own)
            gates = gates.take(heads)
        # int4 keeps the gates in int8: there are few.
        num_gates = 2 * self.spec.num_heads
        self.input_size = self.spec.columns + num_gates
        self.inputs = Linear(config.hidden_size, stored, bias=False, num_precise=num_gates)
        self.conv = ConvWeight(conv, whole.width, bias=False)
        self.decay = Decay(gates, whole)
        self.norm = RMSNorm(whole.value_dim, config.norm.eps, kernels, f"{name}.norm")
        num_values = whole.num_heads * whole.value_dim
        self.output = self._new_output(config, f"{name}.out_proj", num_values, bias=False)

    def advance(self, made: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        spec = self.spec
        sizes = [spec.columns, spec.num_heads * spec.value_dim, 2 * spec.num_heads]
        qkv, gate, gates = torch.split(made, sizes, dim=1)
        out = self._advance(qkv, gates, states, sequences)
        normed = self.kernels.gated_norm(out, self.norm.weight, gate, self.norm.eps)
        return normed.view(out.shape)

    def advance_inputs(self, inputs: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        qkv, gates = torch.split(inputs, [self.spec.columns, 2 * self.spec.num_heads], dim=1)
        return self._advance(qkv, gates, states, sequences)

    def _advance(self, qkv: Tensor, gates: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        seats, seq_lens, cu_seqlens_q, runs = sequences
        where = seats, seq_lens, cu_seqlens_q
        conv = self.conv
        decay = self.decay
        assert states.matrices is not None, "the delta rule keeps matrices"
        kept = states.last_inputs
        qkv = self.kernels.short_conv(
            qkv, conv.weight, conv.bias, kept, *where, states.run_columns, runs, gated=False
        )
        return self.kernels.gated_delta(
            qkv, gates, decay.rates, decay.dt_bias, states.matrices, *where, states.run_rows, runs
        )


class Mamba2(StateLayer):
    """The state space of Mamba-2 (Dao & Gu 2024) behind a short convolution."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> None:
        super().__init__(config, layer, kernels, shard)
        whole = config.states[layer]
        name = f"{LAYERS}{layer}.mamba"
        # The gate z of outputs, then x, B and C, which are convolved, and the time step of each head.
        stored = StoredRows({f"{name}.in_proj": whole.num_inputs}, transposed=config.transposed_weights)
        conv = StoredRows({f"{name}.conv1d": whole.columns})
        heads = StoredRows({name: whole.num_heads})
        norm = StoredRows({f"{name}.norm": whole.num_values})
        # The groups of a norm may be of heads of several shards.
        self.is_gathered = whole.norm is not None and whole.num_key_heads % shard.count != 0
        if not shard.is_whole:
            own = own_columns(whole, shard)
            values = own[0]
            convolved = [range(whole.num_values + each.start, whole.num_values + each.stop) for each in own]
            steps = of_heads(shard.share(whole.num_heads), 1, whole.num_values + whole.columns)
            stored = stored.take(values, *convolved, steps)
            conv = conv.take(*own)
            heads = heads.take(shard.share(whole.num_heads))
            if not self.is_gathered:
                norm = norm.take(values)
        self.input_size = self.spec.columns + self.spec.num_heads
        self.inputs = Linear(config.hidden_size, stored, bias=whole.bias, num_precise=self.spec.num_heads)
        self.conv = ConvWeight(conv, whole.width, bias=whole.conv_bias)
        self.decay = Decay(heads, whole)
        self.norm = None if whole.norm is None else Weights(norm)
        self.eps = config.norm.eps
        # [groups, size of one] of what is normalised
        num_groups = (whole if self.is_gathered else self.spec).num_key_heads
        self.groups = num_groups, whole.num_values // whole.num_key_heads
        self.output = self._new_output(config, f"{name}.out_proj", whole.num_values, bias=whole.output_bias)

    def advance(self, made: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        spec = self.spec
        gate, x, steps = torch.split(made, [spec.num_values, spec.columns, spec.num_heads], dim=1)
        out = self._advance(x, steps, states, sequences)
        if self.is_gathered:
            out = gather(out.flatten(1), self.shard)
            gate = gather(gate, self.shard)
        weight = None if self.norm is None else self.norm.weight
        first = spec.norm == "gate_first"
        grouped = out.view(len(out), *self.groups)
        gated = self.kernels.gated_norm(grouped, weight, gate, self.eps, gate_first=first)
        return gated.view(len(gated), -1, spec.value_dim)

    def advance_inputs(self, inputs: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        x, steps = torch.split(inputs, [self.spec.columns, self.spec.num_heads], dim=1)
        return self._advance(x, steps, states, sequences)

    def _advance(self, x: Tensor, steps: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        seats, seq_lens, cu_seqlens_q, runs = sequences
        where = seats, seq_lens, cu_seqlens_q
        conv = self.conv
        decay = self.decay
        assert states.matrices is not None, "Mamba-2 keeps matrices"
        x = self.kernels.short_conv(
            x, conv.weight, conv.bias, states.last_inputs, *where, states.run_columns, runs, gated=False
        )
        given = decay.rates, decay.dt_bias, decay.D, states.matrices
        return self.kernels.mamba2_scan(
            x, steps, *given, *where, states.run_rows, runs, limits=self.spec.limits
        )


class ShortConv(StateLayer):
    """The gated short convolution of LFM2: out(C * conv(B * x))."""

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, shard: Shard) -> None:
        super().__init__(config, layer, kernels, shard)
        whole = config.states[layer]
        name = f"{LAYERS}{layer}.conv"
        stored = StoredRows({f"{name}.in_proj": 3 * whole.columns})
        conv = StoredRows({f"{name}.conv": whole.columns})
        if not shard.is_whole:
            own = shard.share(whole.columns)
            stored = stored.take(
                *(range(i * whole.columns + own.start, i * whole.columns + own.stop) for i in range(3))
            )
            conv = conv.take(own)
        self.inputs = Linear(config.hidden_size, stored, bias=whole.bias)
        self.conv = ConvWeight(conv, whole.width, bias=whole.conv_bias)
        self.input_size = 3 * self.spec.columns
        self.output = self._new_output(config, f"{name}.out_proj", whole.columns, bias=whole.output_bias)

    def advance(self, made: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        return self.advance_inputs(made, states, sequences)[:, None]

    def advance_inputs(self, inputs: Tensor, states: LayerStates, sequences: Sequences) -> Tensor:
        seats, seq_lens, cu_seqlens_q, runs = sequences
        where = seats, seq_lens, cu_seqlens_q
        conv = self.conv
        kept = states.last_inputs
        return self.kernels.short_conv(
            inputs, conv.weight, conv.bias, kept, *where, states.run_columns, runs, gated=True
        )


class ConvWeight(Loadable):
    """The weights of a depthwise convolution (one filter per column), f32[width, columns]."""

    def __init__(self, stored: StoredRows, width: int, *, bias: bool) -> None:
        super().__init__(stored)
        numbers = torch.empty(stored.num_rows, 1, width, dtype=torch.float32)
        self.weight = nn.Parameter(numbers, requires_grad=False)
        own = torch.empty(stored.num_rows, dtype=torch.float32)
        self.bias = nn.Parameter(own, requires_grad=False) if bias else None

    def load(self, loader: Loader) -> None:
        super().load(loader)
        by_row = self.weight.squeeze(1).t().contiguous()
        self.weight = nn.Parameter(by_row, requires_grad=False)


class Weights(Loadable):
    """The weights of a norm, one number for each stored row."""

    def __init__(self, stored: StoredRows) -> None:
        super().__init__(stored)
        self.weight = nn.Parameter(torch.empty(stored.num_rows), requires_grad=False)


class Decay(Loadable):
    """The decay of each head's state: a factor e^(rate softplus(a + dt_bias)) with rate -e^A_log.

    For Mamba-2 the module also has D: the inputs times D are added to the outputs.
    """

    rates: Tensor
    dt_bias: Tensor
    D: Tensor

    def __init__(self, stored: StoredRows, spec: StateSpec) -> None:
        super().__init__(stored)
        numbers = torch.empty(stored.num_rows, dtype=torch.float32)
        names = ["A" if spec.has_rates else "A_log", "dt_bias"] + ["D"] * (spec.kind == "mamba2")
        for name in names:
            self.register_parameter(name, nn.Parameter(numbers.clone(), requires_grad=False))
        self.has_rates = spec.has_rates

    def load(self, loader: Loader) -> None:
        if self.has_rates:
            check = ValueCheck(
                lambda x: ~(x <= 0) | x.isinf(), "be finite and not above 0, as a decay's rate"
            )
            self.rates = loader.parameter(self.stored, "A", cast(Tensor, self.A), check).data
            del self.A
        else:
            check = ValueCheck(
                lambda x: ~x.float().exp().isfinite(), "have a finite power of e, as a decay's"
            )
            self.rates = -loader.parameter(self.stored, "A_log", cast(Tensor, self.A_log), check).exp()
            del self.A_log
        finite = ValueCheck(lambda x: ~x.isfinite(), "be finite")
        for name, parameter in list(self.named_parameters()):
            setattr(self, name, loader.parameter(self.stored, name, parameter, finite))


def _stored_inputs(spec: StateSpec, name: str) -> StoredRows:
    """Return the stored rows of Q, K and V, of the output's gate, and of the gates b and a, in this order."""
    num_values = spec.num_values
    if spec.stored != "by_key_head":
        sizes = {"qkv": spec.columns, "z": num_values, "b": spec.num_heads, "a": spec.num_heads}
        if spec.stored == "by_part":
            return StoredRows({f"{name}.in_proj_{part}": size for part, size in sizes.items()})
        first = spec.columns + num_values
        gates = torch.arange(first, spec.num_inputs, device="cpu").view(spec.num_key_heads, 2, -1)
        index = torch.cat([torch.arange(first, device="cpu"), gates.transpose(0, 1).flatten()])
        sizes = {"qkv": spec.columns, "z": num_values, "ba": 2 * spec.num_heads}
        return StoredRows({f"{name}.in_proj_{part}": size for part, size in sizes.items()}, index)
    parts = {f"{name}.in_proj_qkvz": spec.columns + num_values, f"{name}.in_proj_ba": 2 * spec.num_heads}
    shares = spec.num_heads // spec.num_key_heads  # value heads of a key head
    own = shares * spec.value_dim
    rows = torch.arange(spec.columns + num_values, device="cpu").view(spec.num_key_heads, -1)
    gates = torch.arange(2 * spec.num_heads, device="cpu").view(spec.num_key_heads, -1) + rows.numel()
    columns = torch.split(rows, [spec.key_dim, spec.key_dim, own, own], dim=1)
    index = torch.cat([part.flatten() for part in (*columns, *torch.split(gates, shares, dim=1))])
    return StoredRows(parts, index)
