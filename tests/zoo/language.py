"""Language models as their authors wrote them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import CLASSES, VOCABULARY, Foreign, floats, labels, named, sum_of_cross_entropies, tokens

WIDTH, HEADS, LENGTH = 8, 2, 6


class CausalSelfAttention(nn.Module):
    """With a buffer of ones below the diagonal, as before torch had attention of its own."""

    bias: Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attn_dropout, self.resid_dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("bias", torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = (each.view(b, t, HEADS, c // HEADS).transpose(1, 2) for each in self.c_attn(x).split(c, dim=2))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        y = self.attn_dropout(F.softmax(att, dim=-1)) @ v
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(b, t, c)))


class GptBlock(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=False)
        self.attn = CausalSelfAttention(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    """`model(idx)` returns the logits and None, `model(idx, targets)` the logits and the mean loss."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = nn.ModuleList(GptBlock(dropout) for _ in range(3))
        wte, wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.transformer = nn.ModuleDict({"wte": wte, "wpe": wpe, "h": blocks, "ln_f": nn.LayerNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        wte.weight = self.lm_head.weight  # tied
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.2)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        pos = torch.arange(0, idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer["wte"](idx) + self.transformer["wpe"](pos)
        blocks = self.transformer["h"]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x)
        logits = self.lm_head(self.transformer["ln_f"](x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def own_loss(model: nn.Module, outputs: Any, targets: Tensor) -> Tensor:
    """The model's mean loss, as the sum that it is the mean of."""
    del model
    return outputs[1] * targets.numel()


class RmsNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotated(x: Tensor, freqs_cis: Tensor) -> Tensor:
    """Positions as angles, by complex numbers; x is (samples, tokens, heads, width)."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[:, None]).flatten(3)


class GroupedAttention(nn.Module):
    """Two heads of queries share the keys and values of one."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = 2, 1, WIDTH // 2
        self.wq = nn.Linear(WIDTH, self.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(WIDTH, self.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(WIDTH, self.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(self.n_heads * self.head_dim, WIDTH, bias=False)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        b, t, _ = x.shape
        q = rotated(self.wq(x).view(b, t, self.n_heads, self.head_dim), freqs_cis)
        k = rotated(self.wk(x).view(b, t, self.n_kv_heads, self.head_dim), freqs_cis)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim)
        k, v = (each.repeat_interleave(self.n_heads // self.n_kv_heads, dim=2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = GroupedAttention(), SwiGlu()
        self.attention_norm, self.ffn_norm = RmsNorm(WIDTH), RmsNorm(WIDTH)

    def forward(self, x: Tensor, freqs_cis: Tensor, mask: Tensor | None = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Angles of positions are a complex buffer that isn't saved."""

    freqs_cis: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.norm, self.output = RmsNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        freqs = 1.0 / (100.0 ** (torch.arange(0, WIDTH // 2, 2) / (WIDTH // 2)))
        angles = torch.outer(torch.arange(LENGTH), freqs)
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        t = tokens.shape[1]
        h, mask = self.tok_embeddings(tokens), torch.full((t, t), float("-inf"), device=tokens.device).triu(1)
        for layer in self.layers:
            h = layer(h, self.freqs_cis[:t], mask.to(h.dtype))
        return self.output(self.norm(h))


class Encoder(nn.Module):
    """torch's own encoder, with a mask of padding; the mean over what isn't padding goes to a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.classifier = nn.Linear(WIDTH, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0)
        shares = attention_mask / attention_mask.sum(1, keepdim=True)
        return self.classifier((hidden * shares[..., None]).sum(1))


def padding(num_samples: int) -> Tensor:
    """1 for tokens, 0 for what follows them."""
    ends = torch.randint(2, LENGTH + 1, (num_samples, 1))
    return (torch.arange(LENGTH) < ends).long()


class RelativeAttention(nn.Module):
    """Scores get a bias by distance, which the first layer makes and the others are handed."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.relative = nn.Embedding(2 * LENGTH, HEADS) if has_bias else None

    def forward(self, x: Tensor, context: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if bias is None and self.relative is not None:
            distance = torch.arange(context.shape[1])[None] - torch.arange(x.shape[1])[:, None] + LENGTH
            bias = self.relative(distance.to(x.device)).permute(2, 0, 1)[None]
        split = lambda each: each.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # noqa: E731
        scores = split(self.q(x)) @ split(self.k(context)).transpose(-2, -1)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        return self.o((weights @ split(self.v(context))).transpose(1, 2).flatten(2)), bias


class T5Block(nn.Module):
    def __init__(self, is_decoder: bool, is_first: bool) -> None:
        super().__init__()
        self.self_attention = RelativeAttention(has_bias=is_first)
        self.cross_attention = RelativeAttention(has_bias=False) if is_decoder else None
        self.wi, self.wo = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.norms = nn.ModuleList(RmsNorm(WIDTH) for _ in range(3))

    def forward(
        self, hidden: Tensor, position_bias: Tensor | None = None, encoded: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        normed = self.norms[0](hidden)
        added, position_bias = self.self_attention(normed, normed, position_bias)
        hidden = hidden + added
        if self.cross_attention is not None and encoded is not None:
            hidden = hidden + self.cross_attention(self.norms[1](hidden), encoded, None)[0]
        return hidden + self.wo(F.gelu(self.wi(self.norms[2](hidden)))), position_bias


class T5(nn.Module):
    """One embedding for the encoder, the decoder and the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(T5Block(False, is_first=i == 0) for i in range(2))
        self.decoder = nn.ModuleList(T5Block(True, is_first=i == 0) for i in range(2))
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> dict[str, Tensor]:
        encoded, bias = self.shared(input_ids), None
        for block in self.encoder:
            encoded, bias = block(encoded, position_bias=bias)
        decoded, bias = self.shared(decoder_input_ids), None
        for block in self.decoder:
            decoded, bias = block(decoded, position_bias=bias, encoded=encoded)
        return {"logits": self.lm_head(decoded * WIDTH**-0.5), "encoder_last_hidden_state": encoded}


def of_dictionary(model: nn.Module, outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return sum_of_cross_entropies(model, outputs["logits"], targets)


class Albert(nn.Module):
    """One block that is called four times, and a small embedding that is mapped to the width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mapping = nn.Embedding(VOCABULARY, 4), nn.Linear(4, WIDTH)
        self.block, self.head = GptBlock(0.0), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.mapping(self.embed(idx))
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


class Experts(nn.Module):
    """Each token goes to two of four experts; `aux_loss` of the last call asks for an even load."""

    def __init__(self, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k, self.gate = top_k, nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(SwiGlu() for _ in range(num_experts))
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        probabilities = self.gate(flat).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights, out = weights / weights.sum(-1, keepdim=True), torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == index)
            if token.numel():
                out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        load = F.one_hot(chosen, len(self.experts)).to(x.dtype).mean((0, 1))
        self.aux_loss = len(self.experts) * (load * probabilities.mean(0)).sum()
        return out.view_as(x)


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.moe = nn.Linear(LENGTH, LENGTH), Experts()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.moe(self.norms[1](x))


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(ExpertBlock() for _ in range(2))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def with_even_load(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    losses = [module.aux_loss for module in model.modules() if isinstance(module, Experts)]
    added = sum(loss for loss in losses if loss is not None)
    return sum_of_cross_entropies(model, outputs, targets) + 0.1 * targets.numel() * added


class SelectiveScan(nn.Module):
    """A state-space layer, token by token."""

    def __init__(self, states: int = 4) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.conv1d = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.x_proj = nn.Linear(WIDTH, 1 + 2 * states, bias=False)
        self.dt_proj = nn.Linear(1, WIDTH)
        self.A_log = nn.Parameter(torch.log(torch.arange(1.0, states + 1).repeat(WIDTH, 1)))
        self.D = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.in_proj(x).chunk(2, dim=-1)
        value = F.silu(self.conv1d(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(value).split([1, self.A_log.shape[1], self.A_log.shape[1]], dim=-1)
        dt, a = F.softplus(self.dt_proj(dt)), -torch.exp(self.A_log)
        state, outputs = torch.zeros(len(x), WIDTH, a.shape[1], dtype=x.dtype, device=x.device), list[Tensor]()
        for t in range(x.shape[1]):
            state = torch.exp(dt[:, t, :, None] * a) * state + (dt[:, t] * value[:, t])[..., None] * b[:, t, None]
            outputs.append((state * c[:, t, None]).sum(-1))
        return self.out_proj((torch.stack(outputs, 1) + value * self.D) * F.silu(gate))


class MambaBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = RmsNorm(WIDTH), SelectiveScan()

    def forward(self, hidden: Tensor, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.mixer(self.norm(residual)), residual


class Mamba(nn.Module):
    """Blocks hand on two tensors; the first is given None."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm_f = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.layers, self.lm_head = nn.ModuleList(MambaBlock() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden, residual = self.embedding(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.lm_head(self.norm_f(hidden + residual))


class Bags(nn.Module):
    """Bags of words of several lengths: padding is left out of the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="mean", padding_idx=0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.bag(idx)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


class SharedTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.layers(self.lift(x)), dim=-1)


class Siamese(nn.Module):
    """Both inputs go through one tower; the distance decides."""

    def __init__(self) -> None:
        super().__init__()
        self.tower, self.scale = SharedTower(), nn.Parameter(torch.tensor(2.0))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.scale * (self.tower(left) - self.tower(right)).square().sum(-1)


def contrastive(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    del model
    return F.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")


def same_or_not(num_samples: int) -> Tensor:
    return (torch.rand(num_samples) < 0.5).to(torch.get_default_dtype())


text = partial(Foreign, inputs=tokens(LENGTH), targets=tokens(LENGTH))
PAIRS = named(input_ids=tokens(LENGTH), decoder_input_ids=tokens(LENGTH))
MODELS = {
    "gpt": text(make=Gpt),
    "gpt_dropout": text(make=lambda: Gpt(0.3), draws=True, lacks="NO_RANDOMNESS"),
    "gpt_own_loss": Foreign(
        make=Gpt, inputs=named(idx=tokens(LENGTH), targets=tokens(LENGTH)), targets=tokens(LENGTH), criterion=own_loss
    ),
    "llama": text(
        make=Llama, lacks="SEPARATE_SAMPLES", refuses="compile=torchscript precision=bf16_pure precision=bf16_split"
    ),
    "encoder": Foreign(
        make=Encoder,
        inputs=named(input_ids=tokens(LENGTH), attention_mask=padding),
        targets=labels,
        lacks="MLPS PLAIN_BLOCKS",
        refuses="precision=bf16_pure precision=bf16_split",
    ),
    "t5": Foreign(
        make=T5,
        inputs=PAIRS,
        targets=tokens(LENGTH),
        criterion=of_dictionary,
        lacks="BRANCHES MLPS PLAIN_BLOCKS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "albert": text(make=Albert, lacks="SKIPPABLE"),
    "mixture_of_experts": text(
        make=MixtureOfExperts,
        criterion=with_even_load,
        lacks="BLOCKS BRANCHES MLPS NO_RANDOMNESS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "mamba": text(make=Mamba, lacks="BRANCHES MLPS PLAIN_BLOCKS SEPARATE_SAMPLES SKIPPABLE"),
    "bags": Foreign(make=Bags, inputs=tokens(LENGTH), lacks="MLPS NORMS"),
    "siamese": Foreign(
        make=Siamese,
        inputs=named(left=floats(4), right=floats(4)),
        targets=same_or_not,
        criterion=contrastive,
        lacks="BRANCHES MLPS NORMS SHARDABLE SKIPPABLE",
    ),
}
