"""optimizer: how a gradient becomes an update."""

from lowvram.knobs.optimizer.adafactor import Adafactor
from lowvram.knobs.optimizer.adam_mini import AdamMini
from lowvram.knobs.optimizer.apollo import Apollo, ApolloMini
from lowvram.knobs.optimizer.companded import AdamWCompanded, MuonCompanded, SGDCompanded
from lowvram.knobs.optimizer.external import External
from lowvram.knobs.optimizer.galore import GaLore
from lowvram.knobs.optimizer.groups import decayed
from lowvram.knobs.optimizer.low_bit import AdamW4bit, AdamW8bit
from lowvram.knobs.optimizer.muon import Muon
from lowvram.knobs.optimizer.plain import SGD, AdamW, Moments
from lowvram.knobs.optimizer.sinkgd import SinkGD
from lowvram.knobs.optimizer.trust import LAMB, LARS

__all__ = [
    "LAMB",
    "LARS",
    "SGD",
    "Adafactor",
    "AdamMini",
    "AdamW",
    "AdamW4bit",
    "AdamW8bit",
    "AdamWCompanded",
    "Apollo",
    "ApolloMini",
    "External",
    "GaLore",
    "Moments",
    "Muon",
    "MuonCompanded",
    "SGDCompanded",
    "SinkGD",
    "decayed",
]
