"""The records that describe a vision tower, and what its images become. `families.vision` builds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from .spec import NormSpec


class TowerNames(NamedTuple):
    """The names of a vision tower's tensors in a checkpoint, relative to VISION; None for a tensor that the
    tower lacks.

    Names within a layer are relative to `layers` and the layer's number.

    query_key_value: the name of one tensor that holds all three, or the name of each.
    linear: what stands behind the name of a linear layer.
    """

    patch: str
    layers: str
    before_attention: str
    query_key_value: tuple[str, ...]
    output: str
    before_mlp: str
    gate: str | None
    up: str
    down: str
    positions: str | None = None
    first_norm: str | None = None
    last_norm: str | None = None
    after_attention: str | None = None
    after_mlp: str | None = None
    query_norm: str | None = None
    key_norm: str | None = None
    patch_norms: tuple[str, str] | None = None  # before and behind the projection of patches
    linear: str = ""


class AxialRope(NamedTuple):
    """A rotary embedding whose first half of angles is by row, and whose second is by column.

    is_interleaved: whether rows and columns take the frequencies of a head in turns; else both take every
        second one.
    by_halves: whether the first half of a head is rotated by column and the second by row, each half by
        itself.
    """

    theta: float
    is_interleaved: bool = False
    by_halves: bool = False


class AxisTable(NamedTuple):
    """A table of positions with a vector for each column and each row, which are added.

    num_places: of columns, and of rows. by_axis: whether it is stored as [2, num_places, hidden_size], and
        not as [num_places, 2, hidden_size]. Columns come first.
    """

    num_places: int
    by_axis: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSpec:
    """A vision transformer: patches of images, each image a sequence whose patches all see each other.

    grid: number of patches on a side of the table of positions; 0 without a table.
    is_interpolated: whether the table is interpolated to an image's grid; otherwise the grid takes the
        table's first places.
    axes: the table of positions, if it is one of columns and rows.
    frames: number of times that each patch is repeated as a frame of a still video.
    scale: of attention's scores; None: head_dim ** -0.5.
    value_norm: whether values are normalised, without a weight.
    is_clipped: whether the inputs and outputs of linear layers are clamped to bounds in the checkpoint.
    is_flat: whether the projection of patches is stored as that of a linear layer, whose inputs are the
        channels of a pixel after each other.
    """

    names: TowerNames
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    inner_size: int
    patch_size: int
    norm: NormSpec
    activation: Literal["silu", "gelu_tanh", "gelu"]
    gated: bool = False
    bias: bool = True  # of the projections
    patch_bias: bool = True
    grid: int = 0
    rope: AxialRope | None = None
    is_interpolated: bool = False
    axes: AxisTable | None = None
    frames: int = 1
    num_channels: int = 3
    scale: float | None = None
    value_norm: bool = False
    is_clipped: bool = False
    is_flat: bool = False

    @property
    def attended_head_dim(self) -> int | None:
        """The dimension of attention's heads; None: there are no layers."""
        return self.head_dim if self.num_layers else None

    @property
    def num_qkv_heads(self) -> int:
        """The number of heads of Q, K and V."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def patch_numbers(self) -> int:
        """The number of values in a patch."""
        return self.num_channels * self.patch_size**2

    @property
    def num_params(self) -> int:
        """The number of weights, without norms and biases."""
        places = self.grid**2 if self.axes is None else 2 * self.axes.num_places
        return self.num_layer_params + self.hidden_size * (self.patch_numbers + places)

    @property
    def num_layer_params(self) -> int:
        """The number of weights of all layers, without norms and biases."""
        mlp = (3 if self.gated else 2) * self.inner_size
        heads = (self.num_qkv_heads + self.num_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (heads + mlp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """Gemma 3's projector: the mean of squares of patches, a norm, and a product."""

    side: int  # of a square, in patches
    norm: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedSpec:
    """Gemma 4's projector: the mean of squares of patches, a norm without a weight, and a product.

    is_scaled: whether the means are multiplied by hidden_size ** 0.5.
    is_standardised: whether a vector is then subtracted, and another one multiplies the difference.
    """

    side: int  # of a square, in patches
    norm: NormSpec
    is_scaled: bool = True
    is_standardised: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeSpec:
    """Mistral 3's projector: a norm of patches, a product that makes one vector of a square of them, and two
    layers.
    """

    side: int  # of a square, in patches
    norm: NormSpec
    activation: Literal["gelu"] = "gelu"
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """Qwen3-VL's projectors: squares of patches, normalised, and two layers. The last one makes embeddings.

    features: the layers of the tower behind which further projectors make what is added to the outputs of the
        text model's first layers (DeepStack, 2024).
    """

    side: int  # of a square, in patches
    norm: NormSpec
    features: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessingSpec:
    """How an image becomes patches; see `images.processing`.

    rule: how the size follows from that of the image.
    sizes: the numbers of the rule.
    resample: the filter, by Pillow's number.
    scale: multiplies the numbers of pixels; mean, std: of the numbers so far, for each channel.
    is_centred: whether the numbers x so far become 2 (x - 0.5).
    """

    rule: Literal["fixed", "longest_edge", "area", "tokens"]
    sizes: tuple[int, ...]
    resample: int
    scale: float | None = None
    mean: tuple[float, float, float] | None = None
    std: tuple[float, float, float] | None = None
    is_centred: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionSpec:
    """The description of how a model reads images.

    family: how images are processed and prompts are written: a key of `images.families.FAMILIES`.
    processing: how the processor's configuration says that images become patches.
    projector: makes embeddings of the text model's size.
    token_id: the token that stands for each embedding of an image.
    tokens_per_image: number of embeddings of every image; None if it depends on the image's size.
    sees_itself: whether each token of an image attends to all tokens of the image, including later ones.
    only_in_windows: whether it does so only in layers with a sliding window.
    padding_id: the token whose per-layer vectors the tokens of images have, in models with such vectors.
    names: the tensor names of the text model and the tower together.
    """

    family: str
    tower: TowerSpec
    projector: PoolSpec | EmbedSpec | MergeSpec | StackSpec
    token_id: int
    tokens_per_image: int | None
    sees_itself: bool
    only_in_windows: bool = False
    padding_id: int = 0
    boundary_ids: tuple[int, ...] = ()  # the tokens before and behind an image, or between its rows
    processing: ProcessingSpec | None = None
    # How many of a head's frequencies rotate by a token's time, row and column; None: all by its position
    sections: tuple[int, int, int] | None = None

    @property
    def num_features(self) -> int:
        """How many vectors of the text model's size an embedding has besides itself."""
        return len(self.projector.features) if isinstance(self.projector, StackSpec) else 0

    @property
    def most_tokens(self) -> int | None:
        """The most embeddings of an image; None if that is not limited by a number."""
        if self.processing is not None and self.processing.rule == "tokens":
            return self.processing.sizes[0]
        return self.tokens_per_image

    @property
    def square(self) -> int:
        """The pixels on a side of the square that one embedding stands for."""
        return self.tower.patch_size * self.projector.side
