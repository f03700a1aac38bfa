"""Surveys: repeated blocks and the head of a model that nobody has described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lowvram.core.probes.blocks import FoundBlocks, find_blocks, repeated_classes


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class OtherLayer(Layer):
    pass


class Stage(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Encoder(Stage):
    pass


class Decoder(Stage):
    pass


class Stages(nn.Module):
    """Two stages of layers, and a head."""

    def __init__(self, first: list[nn.Module], second: list[nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage(first), Stage(second)])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Keywords(nn.Module):
    """Calls its blocks by keywords, and changes what the head says."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Layer(8) for _ in range(2)), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x=x)
        return self.head(x) * 2


class Asking(Keywords):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum().item() > 0 else x


class Choosing(Keywords):
    """Its shapes depend on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[x.sum(1).nonzero()[:, 0]])


class Cumulative(Layer):
    """Its norm counts batches by a number that it reads."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class Again(nn.Module):
    """One block four times, as in ALBERT."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Layer(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.block(x)
        return self.head(x)


def surveyed(model: nn.Module, named: str | None = None) -> FoundBlocks:
    return find_blocks(model, lambda model, inputs: model(inputs), torch.zeros(2, 8), named)


def layers(count: int, kind: type[Layer] = Layer) -> list[nn.Module]:
    return [kind(8) for _ in range(count)]


def test_blocks_are_found_over_all_parents_and_in_order() -> None:
    """Not the stages, which keep as much, and not the longest row of one stage."""
    found = surveyed(Stages(layers(2), layers(3)))
    names = [f"stages.{stage}.layers.{place}" for stage, count in ((0, 2), (1, 3)) for place in range(count)]
    assert list(found.blocks) == names
    assert found.head == "head"
    assert found.has_plain_blocks


def test_encoder_and_decoder_have_blocks_of_their_own() -> None:
    found = surveyed(nn.Sequential(Encoder(layers(2)), Decoder(layers(3, OtherLayer))))
    assert found.blocks == tuple(f"{half}.layers.{place}" for half, count in ((0, 2), (1, 3)) for place in range(count))


def test_a_model_on_the_meta_device_stays_there() -> None:
    with torch.device("meta"):
        model = Stages(layers(2), layers(2))
    assert len(surveyed(model).blocks) == 4
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.stages[0]._forward_hooks


def test_what_changes_its_outputs_has_no_head_and_keywords_are_noticed() -> None:
    found = surveyed(Keywords())
    assert found.blocks == ("blocks.0", "blocks.1")
    assert found.head is None
    assert not found.has_plain_blocks


def test_a_class_that_the_user_names_is_taken() -> None:
    assert surveyed(Stages(layers(2), layers(2)), named="Stage").blocks == ("stages.0", "stages.1")


def test_a_model_may_look_at_its_numbers() -> None:
    assert surveyed(Asking()).blocks == ("blocks.0", "blocks.1")
    assert surveyed(Stages(layers(2, Cumulative), layers(1, Cumulative))).blocks == tuple(
        f"stages.{place}" for place in ("0.layers.0", "0.layers.1", "1.layers.0")
    )


def test_a_model_whose_shapes_follow_its_numbers_has_the_blocks_that_are_named() -> None:
    found = surveyed(Choosing())
    assert found.blocks == ()
    assert str(found.trouble).startswith("DynamicOutputShapeException: ")
    assert surveyed(Choosing(), named="Layer").blocks == ("blocks.0", "blocks.1")


def test_one_block_may_be_called_several_times() -> None:
    assert surveyed(Again()).blocks == ("block",)


@pytest.mark.parametrize("model", [nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))])
def test_a_model_without_repetition_has_no_blocks(model: Any) -> None:
    assert surveyed(model).blocks == ()


def test_repeated_classes() -> None:
    assert repeated_classes(Stages(layers(2), layers(3))) == {"Layer": 5, "Sequential": 2, "Stage": 2}


class Cosine(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        normalise = torch.nn.functional.normalize
        return 10 * torch.nn.functional.linear(normalise(input, dim=-1), normalise(self.weight, dim=-1))


class Ends(nn.Module):
    """A head, and what a user may do with it."""

    def __init__(self, end: str = "") -> None:
        super().__init__()
        self.end, self.seen = end, torch.zeros(3)
        self.blocks, self.head = nn.Sequential(*layers(2)), (Cosine if end == "class" else nn.Linear)(8, 3)
        hooks: dict[str, Callable[[], Any]] = {
            "pre": lambda: self.head.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
            "hook": lambda: self.head.register_forward_hook(lambda _, given, output: output.tanh()),
            "quiet hook": lambda: self.head.register_forward_hook(lambda _, given, output: None),
            "backward": lambda: self.head.register_full_backward_hook(lambda _, given, gradients: None),
            "patch": lambda: setattr(self.head, "forward", lambda x: nn.Linear.forward(self.head, x) * 2),
            "outside": lambda: self.register_forward_hook(lambda _, given, output: output.mul_(2)),
        }
        hooks.get(end, lambda: None)()

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(x)
        if self.end == "twice":
            h = h + self.head(h).mean()
        logits = self.head(h)
        match self.end:
            case "item":
                logits[..., 0] = -1e4
            case "in place":
                logits /= 0.5
            case "data":
                logits.data.mul_(2)
            case "view":
                logits.flatten()[0] = 0.0
            case "kept":
                self.seen = logits.detach().mean(0)
            case "evaluated":
                logits = logits if self.training else logits.softmax(-1)
            case _:
                pass
        return logits


def test_a_head_does_its_product_and_nothing_else_and_nobody_touches_what_it_returns() -> None:
    """Options that leave the product out would leave all else to act on hidden states."""
    assert {end: surveyed(Ends(end)).head for end in ("", "pre")} == {"": "head", "pre": "head"}
    more = ("class", "hook", "quiet hook", "backward", "patch", "outside", "twice", "item", "in place", "data", "view")
    for end in (*more, "kept", "evaluated"):
        assert surveyed(Ends(end)).head is None, end
        assert surveyed(Ends(end)).blocks == ("blocks.0", "blocks.1"), end
