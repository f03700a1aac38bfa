"""torchvision's families, small, where it is installed and imports: beside a CPU build of torch its wheel doesn't."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

from torch import nn

from tests.zoo.foreign import CLASSES, Foreign, floats

try:
    models: Any = import_module("torchvision.models")
except (ImportError, RuntimeError):  # operators that its binary part would define don't exist
    models = None

images = partial(Foreign, inputs=floats(3, 16, 16))


def made_by(family: str, **arguments: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(models, family)(**arguments, num_classes=CLASSES)


def resnet() -> nn.Module:
    return made_by("ResNet", block=models.resnet.BasicBlock, layers=[1, 1, 1, 1])()


def convnext() -> nn.Module:
    stage = models.convnext.CNBlockConfig
    stages = [stage(8, 16, 1), stage(16, None, 2)]
    return made_by("ConvNeXt", block_setting=stages, stochastic_depth_prob=0.2)()


def regnet() -> nn.Module:
    sizes = {"depth": 3, "w_0": 8, "w_a": 8.0, "w_m": 2.0, "group_width": 4}
    return made_by("RegNet", block_params=models.regnet.BlockParams.from_init_params(**sizes))()


VIT = {"image_size": 16, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 8, "mlp_dim": 16}
SWIN = {"patch_size": [2, 2], "embed_dim": 8, "depths": [1, 2], "num_heads": [1, 2], "window_size": [2, 2]}
SHUFFLE = {"stages_repeats": [1, 1, 1], "stages_out_channels": [8, 8, 16, 16, 16]}
DENSE = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8, "bn_size": 2}
FAMILIES: dict[str, Foreign] = {
    "torchvision_resnet": images(make=resnet),
    "torchvision_convnext": images(make=convnext, draws=True),
    "torchvision_regnet": images(make=regnet),
    "torchvision_vit": images(make=made_by("VisionTransformer", **VIT)),
    "torchvision_swin": images(make=made_by("SwinTransformer", **SWIN), draws=True),
    "torchvision_shufflenet": images(make=made_by("ShuffleNetV2", **SHUFFLE)),
    "torchvision_densenet": images(make=made_by("DenseNet", **DENSE)),
    "torchvision_mobilenet": images(make=made_by("MobileNetV2", width_mult=0.1, dropout=0.2), draws=True),
    "torchvision_squeezenet": images(
        make=made_by("SqueezeNet", version="1_1", dropout=0.2), inputs=floats(3, 32, 32), draws=True
    ),
}
MODELS = FAMILIES if models is not None else {}
