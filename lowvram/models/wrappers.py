"""What torch's wrappers around a model (compiled, data-parallel) add to the names of its tensors, and how to leave it
out."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from lowvram.compat.torch_modules import inside_compiled

# The attributes under which wrappers of torch hold what they wrap, as parts of dotted names.
ADDED = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
SHOWN = 4  # names in a message
PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


def plain_names(saved: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """The saved names that wrappers have changed, each with the name without that. A part such as `module` stays where
    the wanted names have such a part, too. Empty if there are none, or two would become the same."""
    own = {part for name in wanted for part in name.split(".")}
    added = ADDED - own
    plain = {name: ".".join(part for part in name.split(".") if part not in added) for name in saved}
    return {name: bare for name, bare in plain.items() if bare != name} if len({*plain.values()}) == len(plain) else {}


def taken_off(names: Collection[str]) -> str:
    """What is done with these names, for messages."""
    parts = {part for name in names for part in name.split(".")} & ADDED
    added = ", ".join(f"{part}." for part in sorted(parts))
    return f"names of {len(names)} weights have {added}, which a wrapper of torch has added: read without it"


def unwrapped(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """The model inside wrappers, and the classes of the wrappers that are left out. Inside the model, compiled modules
    are replaced by what was compiled; it is changed in place. Data-parallel modules inside it stay, as its own code may
    reach through them."""
    left = []
    while (inner := inside(model)) is not None:
        left.append(type(model).__name__)
        model = inner
    for parent in [*model.modules()]:
        for name, child in [*parent.named_children()]:
            bare = child
            while (inner := inside_compiled(bare)) is not None:
                left.append(type(bare).__name__)
                bare = inner
            if bare is not child:
                setattr(parent, name, bare)
    return model, left


def inside(model: nn.Module) -> nn.Module | None:
    """What a wrapper wraps; None for a model that is no wrapper."""
    return model.module if isinstance(model, PARALLEL) else inside_compiled(model)


def few(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    first, more = [*names][:SHOWN], len(names) - SHOWN
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")
