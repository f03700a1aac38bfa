"""How a model's layers are split over ranks, if its author doesn't say it: as its user does, as transformers' classes
say, or as the names of its layers suggest. What isn't certain is tried."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from typing import Any, final

from torch import nn

from lowvram.config.errors import Incompatible, require
from lowvram.core.layers import is_transposed
from lowvram.core.probes.splits import SPLITS, How, Split, Splits
from lowvram.core.structure import Probe, Structure
from lowvram.knobs.sharding.split_trial import trouble_with

OF_TRANSFORMERS = {  # the words of `base_model_tp_plan`
    "colwise": How.columns,
    "rowwise": How.rows,
    "replicated_with_grad_allreduce": How.summed,
}
QKV = r"qkv|wqkv|qkv_proj|c_attn|query_key_value|in_proj"
NAMES = {
    How.columns: rf"(q|k|v|query|key|value|to_[qkv]|[qkv]_(proj|lin|proj_dropout)|w[qkv]|up|gate|(up|gate)_proj|w1|w3"
    rf"|fc1|fc_in|c_fc|lin1|linear1|dense_h_to_4h|intermediate\.dense|{QKV})",
    How.rows: r"(o|wo|proj|o_proj|out_proj|out_lin|c_proj|down|down_proj|w2|fc2|fc_out|lin2|linear2|dense_4h_to_h"
    r"|output\.dense|attention\.dense|merge)",
}
# Attributes that count heads or features, where a forward pass doesn't find these in the shapes of what it is given.
COUNTS = (
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "num_key_value_heads", "n_kv_heads", "num_kv_heads"),
    *("split_size", "all_head_size", "inner_dim", "embed_dim"),
)
MEND = "name them, such as sharding.splits={*.q_proj:columns,*.o_proj:rows}, or choose sharding=fsdp"


@final
@dataclass(frozen=True)
class FindSplits(Probe[Splits]):
    """How the layers of a model's blocks are split over a row of ranks.

    Args:
        num_ranks: of the row.
        named: how the user has them split, by patterns of their dotted names; empty: as is found.
    """

    num_ranks: int
    named: tuple[tuple[str, How], ...] = ()

    def find(self, known: Structure) -> Splits:
        """Raises Incompatible where none is found that computes the same; BadInput where the ranks don't divide the
        heads, or for a pattern that names no layer."""
        if (stated := known.get(SPLITS)) is not None and not self.named:
            return stated
        trouble = None
        for splits in self.candidates(known):
            trouble = trouble_with(known, splits, self.num_ranks)
            if trouble is None:
                return splits
        for what, number in heads_of(known).items():
            check_divides(what, number, self.num_ranks)
        what = (
            "it isn't known how this model's layers are split"
            if trouble is None
            else (f"{trouble} doesn't compute the same where its layers are split over {self.num_ranks} ranks")
        )
        raise Incompatible(f"sharding=tensor: {what}: {MEND}")

    def candidates(self, known: Structure) -> Iterator[Splits]:
        layers = named_layers(known.model, dict(self.named)) if self.named else None
        layers = layers or of_transformers(known) or by_names(known)
        if not layers:
            return
        packed = [name for name, how in layers.items() if how is How.columns and is_packed(name)]
        for with_counts, is_packed_here in product((False, True), (True, False) if packed else (False,)):
            yield Splits(
                {
                    name: Split(
                        how, thirds(known.model.get_submodule(name)) if is_packed_here and name in packed else ()
                    )
                    for name, how in layers.items()
                },
                counts=tuple(counts_beside(known.model, layers)) if with_counts else (),
            )


def check_divides(what: str, number: int, num_ranks: int) -> None:
    """Raises BadInput where a number isn't a multiple of the number of ranks."""
    fitting = ", ".join(str(each) for each in range(1, number + 1) if number % each == 0)
    allowed = f"a number that divides the model's {number} {what}: one of {fitting}"
    require(number % num_ranks == 0, "sharding.tensor", num_ranks, allowed)


def heads_of(known: Structure) -> dict[str, int]:
    """How many heads the configuration of one of transformers' models counts, by what they are."""
    config = getattr(known.model, "config", None)
    names = {"heads of keys and values": "num_key_value_heads", "heads": "num_attention_heads"}
    counts = {what: getattr(config, name, None) for what, name in names.items()}
    return {what: number for what, number in counts.items() if isinstance(number, int)}


def named_layers(model: nn.Module, patterns: Mapping[str, How]) -> dict[str, How]:
    """The layers that a user names. Raises BadInput for a pattern that names none."""
    names = [name for name, module in model.named_modules() if [*module.parameters(recurse=False)]]
    found = dict[str, How]()
    for pattern, how in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        allowed = f"patterns of names of the model's layers, such as {names[-1]}: {pattern} is none's"
        require(bool(matching), "sharding.splits", {each: way.name for each, way in patterns.items()}, allowed)
        found |= dict.fromkeys(matching, how)
    return found


def of_transformers(known: Structure) -> dict[str, How]:
    """The layers of blocks that a class of transformers names; empty if it names none, or says of one what isn't
    known here."""
    config, prefix = getattr(known.model, "config", None), f"{getattr(known.model, 'base_model_prefix', '')}."
    plan: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    found = dict[str, How]()
    for name in names_in_blocks(known):
        pattern = re.sub(r"\.\d+(?=\.)", ".*", name.removeprefix(prefix))
        if (word := plan.get(pattern)) is not None:
            if word not in OF_TRANSFORMERS:
                return {}
            found[name] = OF_TRANSFORMERS[word]
    return found


def by_names(known: Structure) -> dict[str, How]:
    """The linear layers of blocks whose names are usual ones."""
    found = dict[str, How]()
    for name in names_in_blocks(known):
        if is_linear(known.model.get_submodule(name)):
            how = next((how for how, names in NAMES.items() if re.search(rf"(^|\.){names}$", name)), None)
            found |= {} if how is None else {name: how}
    return found if {How.columns, How.rows} <= set(found.values()) else {}


def names_in_blocks(known: Structure) -> list[str]:
    inside = {module for block in known.blocks for module in block.modules()}
    return [name for name, module in known.model.named_modules() if module in inside]


def is_linear(layer: nn.Module) -> bool:
    return type(layer) is nn.Linear or is_transposed(layer)


def is_packed(name: str) -> bool:
    return re.search(rf"(^|\.)({QKV})$", name) is not None


def thirds(layer: Any) -> tuple[int, ...]:
    """Queries, keys and values, as many of each."""
    num_made = layer.weight.shape[1 if is_transposed(layer) else 0]
    return () if num_made % 3 else (num_made // 3,) * 3


def counts_beside(model: nn.Module, layers: Mapping[str, How]) -> Iterator[tuple[str, str]]:
    """Attributes of the modules that hold the layers, or hold these modules, that may count what is split."""
    holders = dict.fromkeys(name.rpartition(".")[0] for name in layers)
    for holder in holders:
        for attribute in COUNTS:
            if type(getattr(model.get_submodule(holder), attribute, None)) is int:
                yield holder, attribute
