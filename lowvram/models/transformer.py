"""A decoder Transformer in the manner of GPT-2.

Shapes: b samples, t tokens of a sequence, d width of the model, h heads, c width of one head, v vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowvram.config import BadInput, require
from lowvram.data.spec import DataSpec, Modality

INITIAL_STD = 0.02  # of every weight, as in GPT-2
ROTARY_BASE = 10_000.0  # positions that the slowest pair of features tells apart, as in RoFormer


class Positions(Enum):
    """How the model knows the order of its tokens. The names are what a user types."""

    learned = "a trained vector per position, added to the embedding (GPT-2)"
    rotary = "queries and keys are turned by an angle that grows with the position (RoFormer)"


@final
@dataclass(frozen=True)
class TransformerConfig:
    """A decoder Transformer: sizes, and what a user may choose about it.

    Raises:
        BadInput: a value out of range; it names `model.<field>`.
    """

    modality: ClassVar[Modality] = Modality.TOKENS

    num_layers: int = 4
    width: int = 96
    num_heads: int = 3
    context: int = 128
    positions: Positions = Positions.rotary
    vocab_size: int | None = None
    tied_embeddings: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_layers", "width", "num_heads", "context"):
            size = getattr(self, name)
            require(size > 0, f"model.{name}", size, "a positive number")
        vocab_size = self.vocab_size
        sensible = vocab_size is None or vocab_size > 0
        require(sensible, "model.vocab_size", vocab_size, "a positive number, or null")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and less than 1")
        divides = self.width % self.num_heads == 0
        require(divides, "model.num_heads", self.num_heads, f"a divisor of model.width={self.width}")
        turns = self.positions is Positions.learned or self.width // self.num_heads % 2 == 0
        why = "learned where model.width / model.num_heads is odd: rotary turns pairs of features"
        require(turns, "model.positions", self.positions.name, why)

    def natural_shape(self) -> tuple[int, ...]:
        """The shape of a sample when the data does not say: as long as the model allows."""
        return (self.context,)

    def make(self, spec: DataSpec) -> Transformer:
        """The model for this data. Its tensors hold no values yet: see `Transformer.initialise`.

        Raises:
            BadInput: the data are not tokens, its sequences are longer than the context, or its vocabulary is
                larger than the one that the configuration pins.
        """
        if spec.modality is not self.modality:
            allowed = f"a source of {self.modality.value} for this model: data=auto follows the model"
            raise BadInput("data", spec.modality.value, allowed)
        (length,) = spec.shape
        room = f"at most model.context={self.context}: shorten it, or raise model.context"
        require(length <= self.context, "data.sequence_length", length, room)
        vocab_size = self.vocab_size or spec.num_classes
        holds = f"at least {spec.num_classes}, the data's vocabulary: null follows the data"
        require(vocab_size >= spec.num_classes, "model.vocab_size", vocab_size, holds)
        return Transformer(self, vocab_size)


@final
class Transformer(nn.Module):
    """Predicts the next token at every position (Radford et al., 2019, "GPT-2")."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.residual_std = INITIAL_STD / math.sqrt(2 * config.num_layers)
        self.token_embedding = nn.Embedding(vocab_size, config.width)
        learned = config.positions is Positions.learned
        self.position_embedding = PositionEmbedding(config) if learned else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, vocab_size, bias=False)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def forward(self, tokens_bt: Tensor) -> Tensor:
        """Token numbers (int64) to logits (b, t, v)."""
        x_btd = self.dropout(self.position_embedding(self.token_embedding(tokens_bt)))
        for block in self.blocks:
            x_btd = block(x_btd)
        return self.head(self.norm(x_btd))

    def repeated_blocks(self) -> list[nn.Module]:
        """The repeated units, in the order of the forward pass."""
        return list(self.blocks)

    @torch.no_grad()
    def initialise(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Fill one tensor in place with its initial value, as GPT-2 does.

        Weights are N(0, 0.02); those that write into the residual stream are N(0, 0.02 / sqrt(2 layers)),
        so that the stream's variance does not grow with depth. Norms start at one, biases at zero.

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

    def forward(self, x_btd: Tensor) -> Tensor:
        return x_btd + self.weight[: x_btd.shape[1]]


@final
class Block(nn.Module):
    """Attention, then a feed-forward network; each reads a normalised input and is added to it: (b, t, d)."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_btd: Tensor) -> Tensor:
        x_btd = x_btd + self.dropout(self.attention(self.attention_norm(x_btd)))
        return x_btd + self.dropout(self.mlp(self.mlp_norm(x_btd)))


@final
class Attention(nn.Module):
    """Causal attention with several heads, by torch's fused kernels: no (t, t) matrix is kept."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.rotate = Rotary() if config.positions is Positions.rotary else nn.Identity()
        # One projection for all three: under autocast its input is then cast, and saved for backward, once.
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.merge = nn.Linear(config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        qkv_bt3hc = self.qkv(x_btd).unflatten(-1, (3, self.num_heads, -1))
        q_bhtc, k_bhtc, v_bhtc = self.rotate(qkv_bt3hc).transpose(1, 3).unbind(2)
        dropout = self.dropout if self.training else 0.0
        y_bhtc = F.scaled_dot_product_attention(q_bhtc, k_bhtc, v_bhtc, dropout_p=dropout, is_causal=True)
        return self.merge(y_bhtc.transpose(1, 2).flatten(2))


@final
class Rotary(nn.Module):
    """Turns each pair of features of queries and keys by its frequency times the position (Su et al., 2021).

    The product of a query and a key then depends on their distance only. The angles are computed when they
    are used: a table would be one more state to place and to keep in fp32.
    """

    def forward(self, qkv_bt3hc: Tensor) -> Tensor:
        cos_t11c, sin_t11c = rotary_angles(qkv_bt3hc)
        first, second = qkv_bt3hc[:, :, :2].chunk(2, dim=-1)
        turned = (first * cos_t11c - second * sin_t11c, first * sin_t11c + second * cos_t11c)
        # The values are copied too: as a view they would keep the unturned projection alive until backward.
        return torch.cat([torch.cat(turned, dim=-1), qkv_bt3hc[:, :, 2:]], dim=2)


def rotary_angles(qkv_bt3hc: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (t, 1, 1, c / 2), in the dtype of the input."""
    num_positions, width = qkv_bt3hc.shape[1], qkv_bt3hc.shape[-1]
    exact = torch.promote_types(qkv_bt3hc.dtype, torch.float32)  # bf16 can't count positions past 256
    options = {"dtype": exact, "device": qkv_bt3hc.device}
    frequencies_c = ROTARY_BASE ** -torch.arange(0, 1, 2 / width, **options)
    angles_t11c = torch.arange(num_positions, **options)[:, None, None, None] * frequencies_c
    return angles_t11c.cos().to(qkv_bt3hc.dtype), angles_t11c.sin().to(qkv_bt3hc.dtype)


@final
class MLP(nn.Module):
    """The feed-forward network: out to four times the width and back."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x_btd: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x_btd), approximate="tanh"))
