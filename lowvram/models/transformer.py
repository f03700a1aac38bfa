"""A decoder Transformer in the manner of GPT-2.

Shapes: b samples, t tokens of a sequence, d width of the model, e width of the embeddings, v vocabulary, c width of one
head, n heads: those of queries, of keys, of values, or all of them side by side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from itertools import chain, cycle, islice
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config.errors import require
from lowvram.config.transforms import GrowthKind
from lowvram.core.probes.runs import As, Told
from lowvram.core.probes.splits import How, Split, Splits
from lowvram.core.probes.stated import Tail
from lowvram.data.spec import IDS, POSITIONS, DataSpec, Modality
from lowvram.models.attention import NoPositions, Reach, Rotary, dtype_of_scores, grouped_attention, mask_of
from lowvram.models.builtin import OwnModel, OwnModule
from lowvram.models.flex_attention import LEAST_WIDTH
from lowvram.models.local_attention import LocalAttention, LocalKernel
from lowvram.models.widths import InnerWidth, num_kept, of_layer, one_each, usual_width

INITIAL_STD = 0.02  # of every weight, as in GPT-2
OPEN_SIZES = (  # fields that may be null
    "vocab_size",
    "num_kv_heads",
    "num_distinct_layers",
    "embedding_width",
    "mlp_width",
    "head_width",
    "window",
)


class Positions(Enum):
    """How the model knows the order of its tokens. The names are what a user types."""

    learned = "a trained vector per position, added to the embedding (GPT-2)"
    rotary = "queries and keys are turned by an angle that grows with the position (RoFormer)"


@final
@dataclass(frozen=True)
class TransformerConfig(OwnModel):
    """A decoder Transformer: sizes, and what a user may choose about it.

    Raises:
        BadInput: a value out of range; it names `model.<field>`.
    """

    num_layers: int = 4
    width: int = 96
    num_heads: int = 3
    context: int = 128
    positions: Positions = Positions.rotary
    vocab_size: int | None = None
    tied_embeddings: bool = True
    dropout: float = 0.0
    num_kv_heads: int | None = None
    num_distinct_layers: int | None = None
    embedding_width: int | None = None
    mlp_width: int | None = None
    head_width: int | None = None
    window: int | None = None
    global_tokens: int = 0
    local_kernel: LocalKernel = LocalKernel.blocks

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "context"):
            size = getattr(self, name)
            require(size > 0, f"model.{name}", size, "a positive number")
        for name in OPEN_SIZES:
            size = getattr(self, name)
            require(size is None or size > 0, f"model.{name}", size, "a positive number, or null")
        require(self.global_tokens >= 0, "model.global_tokens", self.global_tokens, "at least 0")
        allowed = "0 unless model.window is given: without it each token sees all before it"
        require(self.window is not None or not self.global_tokens, "model.global_tokens", self.global_tokens, allowed)
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and less than 1")
        divides = self.head_width is not None or self.width % self.num_heads == 0
        allowed = f"a divisor of model.width={self.width}, unless model.head_width is given"
        require(divides, "model.num_heads", self.num_heads, allowed)
        divides = self.num_heads % self.kv_heads == 0
        require(divides, "model.num_kv_heads", self.num_kv_heads, f"a divisor of model.num_heads={self.num_heads}")
        most = f"at most model.num_layers={self.num_layers}"
        require(self.distinct_layers <= self.num_layers, "model.num_distinct_layers", self.num_distinct_layers, most)
        turns = self.positions is Positions.learned or self.head_features % 2 == 0
        why = "learned where model.width / model.num_heads, or model.head_width, is odd: rotary turns pairs of features"
        require(turns, "model.positions", self.positions.name, why)
        if self.local_kernel is LocalKernel.flex:
            self.check_flex()

    def check_flex(self) -> None:
        """Raises BadInput where FlexAttention can't be used."""
        reasons = {
            "model.window is null: each token sees all before it": self.window is None,
            f"model.dropout={self.dropout}: FlexAttention drops nothing": self.dropout > 0,
            f"a head has {self.head_features} features: FlexAttention takes {LEAST_WIDTH} or more": (
                self.head_features < LEAST_WIDTH
            ),
        }
        for reason, is_so in reasons.items():
            require(not is_so, "model.local_kernel", self.local_kernel.name, f"blocks where {reason}")

    @property
    def modality(self) -> Modality:
        return Modality.TOKENS

    @property
    def kv_heads(self) -> int:
        """Heads of keys and of values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_features(self) -> int:
        """Features of one head."""
        return self.head_width or self.width // self.num_heads

    @property
    def reach(self) -> Reach | None:
        """What a token attends to; None: to all that aren't later."""
        return None if self.window is None else Reach(self.window, self.global_tokens)

    @property
    def mlp_features(self) -> int:
        """Features between the two layers of the feed-forward network."""
        return self.mlp_width or 4 * self.width

    @property
    def distinct_layers(self) -> int:
        """Blocks with weights of their own. Layers take them in turn (CYCLE of Takase and Kiyono, 2021)."""
        return self.num_distinct_layers or self.num_layers

    def natural_shape(self) -> tuple[int, ...]:
        """The shape of a sample when the data does not say: as long as the model allows."""
        return (self.context,)

    def make(self, spec: DataSpec) -> Transformer:
        """The model for this data. Its tensors hold no values yet: see `Transformer.initialise`.

        Raises:
            BadInput: the data are not tokens, its sequences are longer than the context, or its vocabulary is
                larger than the one that the configuration pins.
        """
        spec.check_modality(self.modality)
        (length,) = spec.shape
        room = f"at most model.context={self.context}: shorten it, or raise model.context"
        require(length <= self.context, "data.sequence_length", length, room)
        vocab_size = self.vocab_size or spec.num_classes
        holds = f"at least {spec.num_classes}, the data's vocabulary (see data.tokenizer): null follows the data"
        require(vocab_size >= spec.num_classes, "model.vocab_size", vocab_size, holds)
        return Transformer(self, vocab_size)

    def pruned(self, ratio: float, multiple: int) -> TransformerConfig:
        """Whole heads leave, heads of keys and values with the queries that they serve, and features of the MLP."""
        kv_heads = num_kept(self.kv_heads, ratio)
        return replace(
            self,
            num_heads=self.num_heads // self.kv_heads * kv_heads,
            num_kv_heads=self.num_kv_heads and kv_heads,
            head_width=self.head_features,
            mlp_width=num_kept(self.mlp_features, ratio, multiple),
            init=None,
        )

    def inner_widths(self) -> list[InnerWidth]:
        """Of each block the heads, then the features of its MLP."""
        rows, columns = self.places_of_heads()
        one = one_each(self.mlp_features)
        of_blocks = [
            (
                usual_width(of_layer(f"{block}.attention.qkv"), f"{block}.attention.merge", rows, columns),
                usual_width(of_layer(f"{block}.mlp.up"), f"{block}.mlp.down", one, one),
            )
            for block in (f"blocks.{index}" for index in range(self.distinct_layers))
        ]
        return list(chain(*of_blocks))

    def places_of_heads(self) -> tuple[Tensor, Tensor]:
        """Of each head of keys and values, with its queries and values: the rows of `Attention.qkv` that make them, and
        the columns of `Attention.merge` that read them."""
        kv_1 = torch.arange(self.kv_heads)[:, None]
        queries = torch.arange(self.num_heads).view(self.kv_heads, -1)
        heads = torch.cat([queries, self.num_heads + kv_1, self.num_heads + self.kv_heads + kv_1], 1)
        features = torch.arange(self.head_features)
        rows, columns = (each[:, :, None] * self.head_features + features for each in (heads, queries))
        return rows.flatten(1), columns.flatten(1)

    def grown(self, factor: int, how: GrowthKind) -> TransformerConfig:
        """Raises BadInput if layers share blocks."""
        allowed = (
            f"null where blocks are copied: layers that share them are more with model.num_layers={self.num_layers}"
        )
        require(self.num_distinct_layers is None, "model.num_distinct_layers", self.num_distinct_layers, allowed)
        return replace(self, num_layers=factor * self.num_layers, init=None)

    def runs_of_blocks(self) -> list[range]:
        return [range(self.num_layers)]

    @property
    def last_layers(self) -> tuple[str, ...]:
        return ("attention.merge", "mlp.down")

    def check_packed(self) -> None:
        """Raises nothing: positions and an attention mask keep the sequences of a row apart."""

    def call(self, model: nn.Module, inputs: Tensor | Mapping[str, Tensor]) -> Tensor:
        return model(inputs[IDS], inputs[POSITIONS]) if isinstance(inputs, Mapping) else model(inputs)


@final
class Transformer(OwnModule):
    """Predicts the next token at every position (Radford et al., 2019, "GPT-2")."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        width = config.embedding_width or config.width
        self.num_layers, self.reach = config.num_layers, config.reach
        self.residual_std = INITIAL_STD / math.sqrt(2 * config.num_layers)
        self.factor_std = 1 / math.sqrt(width)
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.widen, self.narrow = make_factor(config)
        learned = config.positions is Positions.learned
        self.position_embedding = PositionEmbedding(config) if learned else NoPositions()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.distinct_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(width, vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_bt: Tensor, positions_bt: Tensor | None = None, first: int | None = None) -> Tensor:
        """Token numbers (int64) to logits (b, t, v).

        Args:
            positions_bt: of rows of several sequences, in which each counts its tokens from 0; None: each row is one.
            first: the position of the first token of each row, where these are runs of longer rows.
        """
        x_btd = self.widen(self.token_embedding(tokens_bt))
        places: tuple[Tensor, ...] = ()
        if positions_bt is not None:
            places = (positions_bt, mask_of(positions_bt, dtype_of_scores(x_btd), self.reach))
        elif first is not None:
            places = (torch.arange(first, first + tokens_bt.shape[1], device=x_btd.device)[None],)
        x_btd = self.dropout(self.position_embedding(x_btd, *places[:1]))
        for block in islice(cycle(self.blocks), self.num_layers):
            x_btd = block(x_btd, *places)
        return self.after_blocks(x_btd)

    def after_blocks(self, x_btd: Tensor) -> Tensor:
        """To logits (b, t, v)."""
        return self.head(self.narrow(self.norm(x_btd)))

    def tail(self) -> Tail | None:
        """Of all blocks, unless layers share them: then a block has several outputs."""
        return Tail(self.found_blocks().blocks, "after_blocks") if len(self.blocks) == self.num_layers else None

    def splits(self) -> Splits:
        """Whole heads, those of keys and values with the queries that they serve, and features of the MLP."""
        layers, units, counts = dict[str, Split](), dict[str, int](), list[tuple[str, str]]()
        for block in self.found_blocks().blocks:
            attention = self.get_submodule(f"{block}.attention")
            assert isinstance(attention, Attention)
            width = attention.merge.in_features // attention.heads[0]
            packed = tuple(width * number for number in attention.heads)
            layers[f"{block}.attention.qkv"] = Split(How.columns, packed)
            layers[f"{block}.attention.merge"] = layers[f"{block}.mlp.down"] = Split(How.rows)
            layers[f"{block}.mlp.up"] = Split(How.columns)
            counts.append((f"{block}.attention", "heads"))
            if isinstance(attention.rotate, Rotary):
                counts.append((f"{block}.attention.rotate", "num_value_heads"))
            units["heads of keys and values"] = attention.heads[1]
        return Splits(layers, units, tuple(counts))

    def told(self) -> Told:
        return Told("first", As.first)

    def branches(self) -> tuple[tuple[str, ...], ...]:
        """Of each block its attention and its MLP."""
        return tuple((f"{block}.attention", f"{block}.mlp") for block in self.found_blocks().blocks)

    @torch.no_grad()
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one tensor in place with its initial value, as GPT-2 does.

        Weights are N(0, 0.02); those that write into the residual stream are N(0, 0.02 / sqrt(2 layers)),
        so that the stream's variance does not grow with depth. Norms start at one, biases at zero. The embeddings'
        factor preserves the variance of its input, in both directions.

        Args:
            name: the dotted name in `named_parameters()`, or another name of a tied one.
            generator: on the device of `tensor`.

        Raises:
            KeyError: no tensor of this model has this name.
        """
        match name.split(".")[-2:]:
            case [_, "bias"]:
                tensor.zero_()
            case ["norm" | "attention_norm" | "mlp_norm", "weight"]:
                tensor.fill_(1.0)
            case ["merge" | "down", "weight"]:
                tensor.normal_(0.0, self.residual_std, generator=generator)
            case ["widen" | "narrow", "weight"]:
                tensor.normal_(0.0, self.factor_std, generator=generator)
            case ["token_embedding" | "position_embedding" | "qkv" | "up" | "head", "weight"]:
                tensor.normal_(0.0, INITIAL_STD, generator=generator)
            case _:
                raise KeyError(name)


@final
class PositionEmbedding(nn.Module):
    """Adds a trained vector per position."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.context, config.width))

    def forward(self, x_btd: Tensor, positions_bt: Tensor | None = None) -> Tensor:
        return x_btd + (self.weight[: x_btd.shape[1]] if positions_bt is None else self.weight[positions_bt])


def make_factor(config: TransformerConfig) -> tuple[nn.Module, nn.Module]:
    """From embeddings to the model's width, and back for the head (Lan et al., 2020, "ALBERT")."""
    if config.embedding_width is None:
        return nn.Identity(), nn.Identity()
    widen = nn.Linear(config.embedding_width, config.width, bias=False)
    narrow = Narrow(config.width, config.embedding_width)
    if config.tied_embeddings:
        narrow.weight = widen.weight
    return widen, narrow


@final
class Narrow(nn.Module):
    """The embeddings' factor before the head: (b, t, d) to (b, t, e). With tied embeddings its weight (d, e) is that of
    `widen`, so that the head applies the same embedding matrix as the input."""

    def __init__(self, width: int, embedding_width: int) -> None:
        super().__init__()
        self.weight: Tensor = nn.Parameter(torch.empty(width, embedding_width))

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd @ self.weight


@final
class Block(nn.Module):
    """Attention, then a feed-forward network; each reads a normalised input and is added to it: (b, t, d).
    Positions and the attention mask keep packed sequences of a row apart."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor, positions_bt: Tensor | None = None, mask_b1tt: Tensor | None = None) -> Tensor:
        x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd), positions_bt, mask_b1tt))
        return x_btd + self.dropout(self.mlp(self.mlp_norm(x_btd)))


@final
class Attention(nn.Module):
    """Causal attention with several heads, by torch's fused kernels: no (t, t) matrix is kept.

    With fewer heads of keys and values, each serves a group of queries (Ainslie et al., 2023, "GQA").
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads = (config.num_heads, config.kv_heads, config.kv_heads)  # of queries, keys, values
        self.dropout = config.dropout
        self.attend = grouped_attention if config.reach is None else LocalAttention(config.reach, config.local_kernel)
        self.rotate = Rotary(config.kv_heads) if config.positions is Positions.rotary else NoPositions()
        # One projection for all three: under autocast its input is then cast, and saved for backward, once.
        self.qkv = nn.Linear(config.width, config.head_features * sum(self.heads))
        self.merge = nn.Linear(config.num_heads * config.head_features, config.width)

    def forward(self, x_btd: Tensor, positions_bt: Tensor | None = None, mask_b1tt: Tensor | None = None) -> Tensor:
        qkv_btnc = self.qkv(x_btd).unflatten(-1, (sum(self.heads), -1))
        q_bntc, k_bntc, v_bntc = self.rotate(qkv_btnc, positions_bt).transpose(1, 2).split(self.heads, dim=1)
        y_bntc = self.attend(q_bntc, k_bntc, v_bntc, self.dropout if self.training else 0.0, mask_b1tt)
        return self.merge(y_bntc.transpose(1, 2).flatten(2))


@final
class MLP(nn.Module):
    """The feed-forward network: out to a larger width and back."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.mlp_features)
        self.down = nn.Linear(config.mlp_features, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_btd), approximate="tanh"))
