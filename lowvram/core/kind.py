"""The kinds of memory that ledgers, plans and rows tell apart."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """What a piece of memory holds."""

    PARAMETERS = "parameters"  # with the model's buffers
    GRADIENTS = "gradients"  # of parameters
    OPTIMIZER = "optimizer"  # its state
    ACTIVATIONS = "activations"  # made by a forward or a backward pass: kept for the backward pass, or temporary
    INPUTS = "inputs"  # the part of the logical batch that is computed; on a CPU the whole batch
    HOST = "host"  # in host memory: where knobs have moved it and, with a card, the logical batch
    OTHER = "other"  # temporaries of the update, and in a plan those inside kernels
