"""Models that generate, or that score what others generate, as their authors wrote them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.foreign import Foreign, floats, named, sum_of_squares

WIDTH, SIZE = 8, 8


def embedding_of(timesteps: Tensor, dim: int) -> Tensor:
    """Sines and cosines of the time, in the format of the weights."""
    freqs = torch.exp(-math.log(100) * torch.arange(dim // 2, device=timesteps.device) / (dim // 2))
    angles = timesteps[:, None].float() * freqs[None].float()
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class ResnetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(WIDTH, 2 * out_channels)
        self.norm2, self.conv2 = nn.GroupNorm(2, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else None

    def forward(self, input_tensor: Tensor, temb: Tensor) -> Tensor:
        hidden = self.conv1(F.silu(self.norm1(input_tensor)))
        scale, shift = self.time_emb_proj(F.silu(temb))[:, :, None, None].chunk(2, dim=1)
        hidden = self.conv2(F.silu(self.norm2(hidden) * (1 + scale) + shift))
        return hidden + (input_tensor if self.conv_shortcut is None else self.conv_shortcut(input_tensor))


class UNet(nn.Module):
    """What goes down is kept and put beside what comes up."""

    def __init__(self) -> None:
        super().__init__()
        self.time_embedding = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.conv_in, self.conv_out = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.down_blocks = nn.ModuleList([ResnetBlock(4, 4), ResnetBlock(4, 8)])
        self.downsample, self.mid_block = nn.Conv2d(4, 4, 3, 2, 1), ResnetBlock(8, 8)
        self.up_blocks = nn.ModuleList([ResnetBlock(16, 4), ResnetBlock(8, 4)])

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        temb = self.time_embedding(embedding_of(timestep, WIDTH).to(self.conv_in.weight.dtype))
        x, skips = self.conv_in(sample), list[Tensor]()
        for index, block in enumerate(self.down_blocks):
            x = block(x, temb)
            skips.append(x)
            x = self.downsample(x) if index == 0 else x
        x = self.mid_block(x, temb)
        for index, block in enumerate(self.up_blocks):
            x = block(torch.cat([x, skips.pop()], dim=1), temb)
            x = F.interpolate(x, scale_factor=2.0, mode="nearest") if index == 0 else x
        return self.conv_out(x)


def timesteps(num_samples: int) -> Tensor:
    return torch.randint(100, (num_samples,))


class EmaCodebook(nn.Module):
    """Codes are the moving means of what is mapped to them; gradients pass through as if nothing was rounded."""

    embed: Tensor
    cluster_size: Tensor
    embed_avg: Tensor

    def __init__(self, num_codes: int = 6) -> None:
        super().__init__()
        codes = torch.randn(num_codes, WIDTH)
        self.register_buffer("embed", codes)
        self.register_buffer("cluster_size", torch.ones(num_codes))
        self.register_buffer("embed_avg", codes.clone())
        self.commitment = torch.zeros(())

    def forward(self, z: Tensor) -> Tensor:
        flat = z.reshape(-1, WIDTH)
        one_hot = F.one_hot(torch.cdist(flat, self.embed).argmin(1), len(self.embed)).to(flat.dtype)
        quantised = (one_hot @ self.embed).view_as(z)
        if self.training:
            self.cluster_size.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
            self.embed_avg.data.mul_(0.9).add_(one_hot.t() @ flat.detach(), alpha=0.1)
            self.embed.data.copy_(self.embed_avg / (self.cluster_size + 1e-5)[:, None])
        self.commitment = (quantised.detach() - z).square().sum()
        return z + (quantised - z).detach()


class VqVae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.levels = nn.ModuleList(EmaCodebook() for _ in range(2))
        self.decoder = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 6))

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        rest, sum_of_codes = z, torch.zeros_like(z)
        for level in self.levels:
            code = level(rest)
            rest, sum_of_codes = rest - code, sum_of_codes + code
        return self.decoder(sum_of_codes)


def with_commitment(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    levels = [module for module in model.modules() if isinstance(module, EmaCodebook)]
    return sum_of_squares(model, outputs, targets) + 0.25 * sum(level.commitment for level in levels)


class Discriminator(nn.Module):
    """Spectral norm on every layer; its buffers change in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        shapes = [(3, 4), (4, 8), (8, 8)]
        self.main = nn.ModuleList(
            nn.Sequential(norm(nn.Conv2d(*shape, 3, 2, 1)), nn.LeakyReLU(0.2, inplace=True)) for shape in shapes
        )
        self.out = norm(nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.main:
            x = layer(x)
        return self.out(x.mean([2, 3])).squeeze(1)


class OldDiscriminator(nn.Module):
    """The same by the function that torch had before parametrizations."""

    def __init__(self) -> None:
        super().__init__()
        norm = nn.utils.spectral_norm
        self.layers = nn.ModuleList(nn.Sequential(norm(nn.Linear(6, 6)), nn.Tanh()) for _ in range(3))
        self.out = norm(nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.out(x).squeeze(1)


def hinge(model: nn.Module, outputs: Tensor, targets: Tensor) -> Tensor:
    del model
    return F.softplus(-outputs * targets).sum()


def real_or_not(num_samples: int) -> Tensor:
    return 2 * torch.randint(2, (num_samples,)).to(torch.get_default_dtype()) - 1


class Energy(nn.Module):
    """Forces are the gradient of the energy by the positions, which the loss differentiates once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(1, WIDTH)
        self.interactions = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(2))
        self.out = nn.Linear(WIDTH, 1)

    def energy(self, positions: Tensor) -> Tensor:
        distances = (positions[:, :, None] - positions[:, None]).square().sum(-1, keepdim=True).add(0.1).rsqrt()
        x = self.embed(distances)
        for interaction in self.interactions:
            x = x + interaction(x)
        return self.out(x).sum((1, 2, 3))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            positions = positions.detach().requires_grad_()
            energy = self.energy(positions)
            (gradient,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        return energy, -gradient


def energy_and_forces(model: nn.Module, outputs: tuple[Tensor, Tensor], targets: dict[str, Tensor]) -> Tensor:
    del model
    energy, forces = outputs
    return (energy - targets["energy"]).square().sum() + (forces - targets["forces"]).square().sum()


class Coupling(nn.Module):
    """Half of the numbers decide how the other half is scaled and moved."""

    mask: Tensor

    def __init__(self, is_even: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 12))
        self.register_buffer("mask", (torch.arange(6) % 2 == int(is_even)).to(torch.get_default_dtype()))

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        s, t = self.net(x * self.mask).chunk(2, dim=1)
        s = torch.tanh(s) * (1 - self.mask)
        return x * torch.exp(s) + t * (1 - self.mask), log_det + s.sum(1)


class Flow(nn.Module):
    """The likelihood of its inputs: there are no targets but a weight of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = nn.ModuleList(Coupling(i % 2 == 0) for i in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for flow in self.flows:
            x, log_det = flow(x, log_det)
        return x, log_det


def negative_log_likelihood(model: nn.Module, outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    del model
    z, log_det = outputs
    return (targets * (0.5 * z.square().sum(1) - log_det)).sum()


def weights(num_samples: int) -> Tensor:
    return torch.rand(num_samples) + 0.5


@dataclass
class VaeOutput:
    """What the forward pass returns, as an object of its own class."""

    reconstruction: Tensor
    mean: Tensor
    log_var: Tensor


class Vae(nn.Module):
    """Draws what it decodes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.to_moments, self.decoder = nn.Linear(6, 4), nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 6))

    def forward(self, x: Tensor) -> VaeOutput:
        h = x
        for layer in self.encoder:
            h = layer(h)
        mean, log_var = self.to_moments(h).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        return VaeOutput(self.decoder(z), mean, log_var)


def evidence(model: nn.Module, outputs: VaeOutput, targets: Tensor) -> Tensor:
    divergence = 0.5 * (outputs.mean.square() + outputs.log_var.exp() - 1 - outputs.log_var).sum()
    return sum_of_squares(model, outputs.reconstruction, targets) + divergence


class Denoiser(nn.Module):
    """Adds noise to its inputs, and to what each layer makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.RReLU(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.3 * torch.randn_like(x)
        for layer in self.layers:
            x = x + layer(F.dropout(x, 0.3, self.training))
        return x


IMAGES = floats(3, SIZE, SIZE)
MODELS = {
    "unet": Foreign(
        make=UNet,
        inputs=named(sample=IMAGES, timestep=timesteps),
        targets=IMAGES,
        criterion=sum_of_squares,
        lacks="MLPS NORMS",
    ),
    "vqvae": Foreign(
        make=VqVae,
        inputs=floats(4, 6),
        targets=floats(4, 6),
        criterion=with_commitment,
        lacks="BRANCHES MLPS NORMS SKIPPABLE",
        has_causal_blocks=True,  # in which tokens don't meet at all
        refuses="precision=bf16_pure precision=bf16_split",
    ),
    "discriminator": Foreign(
        make=Discriminator,
        inputs=IMAGES,
        targets=real_or_not,
        criterion=hinge,
        lacks="BRANCHES INNER_LINEARS INNER_PRODUCTS MLPS NORMS SEPARATE_SAMPLES SKIPPABLE",
        refuses="adapter=lora adapter=qlora sparsity compile=torchscript",
    ),
    "old_discriminator": Foreign(
        make=OldDiscriminator,
        inputs=floats(6),
        targets=real_or_not,
        criterion=hinge,
        lacks="INNER_LINEARS INNER_PRODUCTS MLPS NORMS SEPARATE_SAMPLES",
        refuses="adapter=lora adapter=qlora sparsity compile=torchscript",
    ),
    "energy": Foreign(
        make=Energy,
        inputs=floats(4, 3),
        targets=named(energy=floats(), forces=floats(4, 3)),
        criterion=energy_and_forces,
        lacks="MLPS NORMS",
        refuses="tile=blocks adapter=qlora offload=parameters compile=model",
    ),
    "flow": Foreign(
        make=Flow,
        inputs=floats(6),
        targets=weights,
        criterion=negative_log_likelihood,
        lacks="BRANCHES MLPS NORMS PLAIN_BLOCKS SEPARATE_SAMPLES SKIPPABLE",
    ),
    "vae": Foreign(
        make=Vae,
        inputs=floats(6),
        targets=floats(6),
        criterion=evidence,
        draws=True,
        lacks="MLPS NORMS NO_RANDOMNESS",
        refuses="sparsity=two_of_four",
    ),
    "denoiser": Foreign(
        make=Denoiser,
        inputs=floats(6),
        targets=floats(6),
        criterion=sum_of_squares,
        draws=True,
        lacks="MLPS NORMS NO_RANDOMNESS",
        refuses="sparsity=two_of_four",
    ),
}
