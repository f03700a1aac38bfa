"""Facts: what a knob can rely on, and what the machine, the model or another knob can take away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, final


class Fact(Enum):
    """Something that a knob can rely on, and that the machine or another knob can take away. What is true of some
    models, and not of others, is a `ModelFact`."""

    CUDA = "the device is an NVIDIA GPU"
    CPU = "the device is the CPU"
    TF32 = "the device multiplies in TF32"
    BF16 = "the device computes in bf16"
    FP8 = "the device multiplies in fp8"
    C_COMPILER = "a C++ compiler (for a CUDA device: a C compiler) is installed"
    KERNEL_COMPILER = "a C compiler is installed, where a CUDA device needs one for kernels of lowvram's own"
    ONE_RANK = "the point has one rank"
    MANY_RANKS = "the point has several ranks"
    FIXED_BLOCKS = "a block computes the same in every step"
    EVERY_BLOCK = "every block computes in every step"
    CHAINED_BLOCKS = "only the next block reads what a block has made"
    GRADS_AT_UPDATE = "every gradient is alive when the update runs"
    UNDOABLE_STEPS = "a step whose update is left out leaves nothing behind"
    PLAIN_BACKWARD = "the backward pass of a part is one call of autograd"
    RETAINABLE_GRAPH = "a graph can be walked backwards twice"
    EAGER_AUTOGRAD = "autograd's hooks inside a block take effect"
    EVERY_OPERATOR = "autograd sees every operator of the model"
    COMPILED = "the model is compiled"
    EAGER = "the model runs eagerly"
    EXACT_ACTIVATIONS = "the backward pass reads what the forward pass has saved, to the last bit"
    PLAIN_PRODUCTS = "layers multiply by their weights as they are"
    OWN_LINEARS = "linear layers are those that the model has made"
    OWN_FORMAT = "layers compute in the number format of their weights"
    FP32_WEIGHTS = "weights that train are kept in fp32"
    UNSPLIT_WEIGHTS = "a weight that trains is one number, without a correction beside it"
    OWN_SHARE = "each rank keeps only its own share of the weights"
    DEVICE_WEIGHTS = "no other option moves weights to the host"
    WHOLE_PARAMS = "every parameter is whole on its rank"
    EVERY_PARAMETER = "each rank updates every parameter that trains, or its share of it"
    WHOLE_UPDATES = "the optimizer updates whole parameters"
    TRAINED_BLOCKS = "the weights of the model's blocks train"
    SAME_PARAMS = "the same parameters train in every step"
    SEPARATE_UPDATES = "the update of a parameter depends on no other parameter"
    WHOLE_SAMPLES = "a rank computes whole samples"
    WHOLE_CALLS = "a layer computes all tokens of a part in one call"
    FULL_LOGITS = "the logits of a part exist whole"


@final
@dataclass(frozen=True)
class ModelFact:
    """Something that a knob can rely on if it is true of the model. It stands in the file of the probe that finds out
    (core/structure.py) or, if a single knob needs it, beside that knob.

    Args:
        value: the fact, as a sentence.
        lack: given the model's `Structure`: why it lacks the fact, and what the user can do; None if it has the fact.
    """

    value: str
    lack: Callable[[Any], str | None]
