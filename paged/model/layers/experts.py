"""Mixtures of experts: a router, the experts, and the shared MLP that every token has besides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from ...architectures.config import LAYERS, ModelConfig
from ...architectures.spec import ExpertsSpec
from ...checkpoints.stored import StoredRows
from ..part import UNDIVIDED
from ..weights.forms import ExpertsForm, Role
from ..weights.loading import Loader
from .linear import Linear
from .mlp import ManyExperts, is_precise, new_mlp
from .norms import RMSNorm

if TYPE_CHECKING:
    from ...kernels.operations import Kernels


class ExpertRouter(Linear):
    """Computes the logits of all experts in float32, and holds the parameters that modify the choice."""

    def __init__(self, config: ModelConfig, layer: int, spec: ExpertsSpec) -> None:
        stored = StoredRows({f"{LAYERS}{layer}.mlp.{spec.router}": spec.num_experts})
        super().__init__(config.hidden_size, stored, bias=spec.router_bias, role="router")
        numbers = torch.empty(spec.num_experts, dtype=torch.float32)
        self.e_score_correction_bias = _parameter(numbers) if spec.correction_bias else None
        self.per_expert_scale = _parameter(numbers) if spec.expert_scales else None

    def load(self, loader: Loader) -> None:
        for name in ("e_score_correction_bias", "per_expert_scale"):
            if (like := getattr(self, name)) is not None:
                setattr(self, name, loader.parameter(self.stored, name, like))
        super().load(loader)


def _parameter(like: Tensor) -> nn.Parameter:
    return nn.Parameter(like.clone(), requires_grad=False)


class Experts(ManyExperts):
    """The sum over a token's experts of weight * down(act(gate(x)) * up(x)), and the shared MLP.

    Experts may have no gate. They may also work on a projection of x, in which case their sum is projected
    back.

    While loading, each projection of an expert is a `Linear`, so that experts are read, quantised and
    converted one matrix at a time, like other weights. Afterwards one grouped product multiplies by all of
    them.
    """

    gate_up_form: ExpertsForm
    down_form: ExpertsForm

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, spec: ExpertsSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kernels = kernels
        name = f"{LAYERS}{layer}.mlp"
        self.router = ExpertRouter(config, layer, spec)
        self.router_norm = None
        if spec.router_scale is not None:
            norm = f"{name}.{spec.router}_norm"
            self.router_norm = RMSNorm(config.hidden_size, config.norm.eps, kernels, norm)
        role: Role = "gated" if spec.gated and spec.activation == "silu" else "layer"
        size = spec.latent_size or config.hidden_size
        num_precise = size if is_precise(layer, len(config.layers)) else 0
        gate_up = []
        down = []
        for expert in range(spec.num_experts):
            own = f"{name}.experts.{expert}"
            gate_up.append(Linear(size, _stored_gate_up(own, spec), bias=spec.bias, role=role))
            stored = StoredRows({f"{own}.{spec.parts[-1]}": size}, transposed=spec.interleaved)
            down.append(Linear(spec.size, stored, bias=spec.bias, num_precise=num_precise))
        self.gate_up = cast(Sequence[Linear], nn.ModuleList(gate_up))
        self.down = cast(Sequence[Linear], nn.ModuleList(down))
        self.shared = None
        if spec.shared is not None:
            self.shared = new_mlp(config, layer, kernels, spec.shared, UNDIVIDED, f"mlp.{spec.shared_name}")
        self.shared_gate = None
        if spec.shared_gate is not None:
            stored = StoredRows({f"{name}.{spec.shared_gate}": 1})
            self.shared_gate = Linear(config.hidden_size, stored, bias=False, role="router")
        self.into_latent = self.out_of_latent = None
        if spec.latent_size is not None:
            assert spec.shared_gate is None, "what is added to a projection has no gate"
            into = StoredRows({f"{name}.fc1_latent_proj": spec.latent_size})
            out_of = StoredRows({f"{name}.fc2_latent_proj": config.hidden_size})
            self.into_latent = Linear(config.hidden_size, into, bias=spec.latent_bias)
            self.out_of_latent = Linear(spec.latent_size, out_of, bias=spec.latent_bias)

    def forward(
        self,
        hidden: Tensor,
        routed_by: Tensor | None = None,
        count: Tensor | None = None,
        adapters: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of the experts' outputs for hidden states [num_tokens, hidden_size].

        routed_by: the router's input; None if it is `hidden`.
        count: `Batch.real_count`. Tokens beyond it are padding and get no experts, so that no weights are
            read for them.
        adapters: see `Batch`.
        """
        spec = self.spec
        kernels = self.kernels
        seen = hidden if routed_by is None else routed_by
        if self.router_norm is not None:
            seen = self.router_norm(seen)
        logits: Tensor = self.router(seen, adapters)
        if spec.router_scale is not None:
            kernels.scale_and_cap(logits, spec.router_scale)
        router = self.router
        chosen, weights = kernels.route(
            logits, spec.routing, router.e_score_correction_bias, router.per_expert_scale, count
        )
        lora = self.gate_up[0].lora  # of all experts
        rows = kernels.sort_by_expert(chosen, spec.num_experts, None if lora is None else adapters)
        taken = hidden if self.into_latent is None else self.into_latent(hidden, adapters)
        inner = self.gate_up_form(taken, rows.offsets, rows.sources)
        if lora is not None and rows.adapters is not None:
            lora.add(kernels.take_rows(taken, rows.sources), inner, rows.adapters)
        if not self.gate_up_form.gated:
            inner = self._activate(inner)
        out = self.down_form(inner, rows.offsets, None)
        if (lora := self.down[0].lora) is not None and rows.adapters is not None:
            lora.add(inner, out, rows.adapters)
        shared = None if self.shared is None else self.shared(hidden, adapters)
        gate = None if self.shared_gate is None else self.shared_gate(hidden, adapters)
        if self.out_of_latent is None:
            return kernels.sum_experts(out, rows.places, weights, shared, gate)
        projected: Tensor = self.out_of_latent(kernels.sum_experts(out, rows.places, weights), adapters)
        if shared is not None:
            kernels.add(shared, projected)
        return projected

    def _activate(self, inner: Tensor) -> Tensor:
        if self.spec.activation == "relu_squared":
            self.kernels.relu_squared(inner)
            return inner
        if self.spec.activation == "clamped_swiglu":
            return self.kernels.clamped_swiglu(inner, self.spec.limit, self.spec.alpha)
        is_silu = self.spec.activation == "silu"
        return (self.kernels.silu_and_mul if is_silu else self.kernels.gelu_and_mul)(inner)

    def finish_loading(self) -> None:
        """Join the weights of all experts."""
        self.gate_up_form = _together(self.gate_up, self.kernels)
        self.down_form = _together(self.down, self.kernels)

    @property
    def is_recordable(self) -> bool:
        """Whether the grouped products launch no torch operation."""
        return self.gate_up_form.is_recordable and self.down_form.is_recordable


def _stored_gate_up(name: str, spec: ExpertsSpec) -> StoredRows:
    """Return the stored rows of an expert's gates and ups, gates first, or of its ups alone."""
    if not spec.interleaved:
        return StoredRows({f"{name}.{part}": spec.size for part in spec.parts[:-1]})
    index = torch.arange(2 * spec.size, device="cpu").view(-1, 2).t().flatten()
    return StoredRows({f"{name}.gate_up_proj": 2 * spec.size}, index, transposed=True)


def _together(experts: Iterable[Linear], kernels: Kernels) -> ExpertsForm:
    """Return the form of all experts' weights and biases."""
    experts = [*experts]
    biases = [expert.bias for expert in experts if expert.bias is not None]
    forms = [expert.form for expert in experts]
    return forms[0].of_experts(forms, biases or None, kernels)


class ExpertsBeside(nn.Module):
    """The experts of Gemma 4. They read the residual, as the MLP does, and their output is added to the
    MLP's.

    Each output is normalised before the addition. The inputs of the experts and of the MLP have different
    norms.
    """

    def __init__(self, config: ModelConfig, layer: int, kernels: Kernels, spec: ExpertsSpec) -> None:
        super().__init__()
        name = f"{LAYERS}{layer}"
        self.experts = Experts(config, layer, kernels, spec)

        def norm_of(part: str) -> RMSNorm:
            return RMSNorm(config.hidden_size, config.norm.eps, kernels, f"{name}.{part}")

        # The residual is stored as it is in every model that has these.
        self.before = norm_of("pre_feedforward_layernorm_2")
        self.after = norm_of("post_feedforward_layernorm_2")
        self.after_mlp = norm_of("post_feedforward_layernorm_1")

    def forward(
        self, out: Tensor, residual: Tensor, count: Tensor | None = None, adapters: Tensor | None = None
    ) -> Tensor:
        """Add the experts' output for `residual` to the MLP's output `out`, in place. Return `out`."""
        self.after_mlp.into(out, out)
        self.after.into(self.experts(self.before(residual), residual, count, adapters), out, add=True)
        return out
