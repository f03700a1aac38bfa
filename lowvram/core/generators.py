"""Random generators: their states, which of them a piece of code has moved, and setting them back.

Looked at are the generators from which code draws unless it is given another: torch's, those of the cards, numpy's,
Python's; and the generators that a model holds in an attribute, or that its Python files hold as a global name.
"""

from __future__ import annotations

import json
import pickle
import random
import sys
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn

from lowvram.compat.random_states import numpy_bytes, python_bytes
from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.core.changes import contents_of
from lowvram.core.places import FIXED, Places, containers_in

STATE = ("random", "getrandbits", "getstate", "setstate")  # the methods of random.Random that its state is behind
NUM_FULL_LOOKS = 64  # at numpy's generator, before only its words are looked at


class Source(ABC):
    """A generator."""

    name: str

    @abstractmethod
    def state(self) -> Any:
        """Its state: equal to another one if nothing was drawn in between."""

    @abstractmethod
    def restore(self, state: Any) -> None:
        """The inverse of `state`."""

    def text(self) -> str:
        """The state as a text, for files: nothing in it is run when it is read."""
        raise NotImplementedError

    def set_text(self, text: str) -> None:
        """The inverse of `text`."""
        raise NotImplementedError


@final
class OfTorch(Source):
    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.name = generator, f"torch's generator ({generator.device})"

    def state(self) -> bytes:
        with without_dispatch_modes():  # a plan's tensors have no bytes
            return self.generator.get_state().numpy().tobytes()

    def restore(self, state: bytes) -> None:
        with without_dispatch_modes():
            self.generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    def text(self) -> str:
        return self.state().hex()

    def set_text(self, text: str) -> None:
        self.restore(bytes.fromhex(text))


@final
class OfPython(Source):
    def __init__(self, generator: random.Random) -> None:
        self.generator, self.name = generator, "Python's generator"

    def state(self) -> tuple[bytes, float | None]:
        return python_bytes(self.generator), self.generator.gauss_next  # pyright: ignore[reportAttributeAccessIssue]

    def restore(self, state: tuple[bytes, float | None]) -> None:
        position, *words = array("I", state[0])
        self.generator.setstate((self.generator.VERSION, (*words, position), state[1]))

    def text(self) -> str:
        words, normal = self.state()
        return json.dumps([words.hex(), normal])

    def set_text(self, text: str) -> None:
        words, normal = json.loads(text)
        self.restore((bytes.fromhex(words), normal))


@final
class OfNumpy(Source):
    """An np.random.Generator or, as numpy's generators were before, an np.random.RandomState.

    Args:
        read: its state as plain values and arrays.
        write: the inverse.
    """

    name = "numpy's generator"

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
        self.read, self.write = read, write

    def state(self) -> bytes:
        return pickle.dumps(self.read())

    def restore(self, state: bytes) -> None:
        self.write(pickle.loads(state))

    def text(self) -> str:
        return json.dumps(self.read(), default=as_list)

    def set_text(self, text: str) -> None:
        self.write(json.loads(text))


@final
class NumpyState:
    """What was read of numpy's global generator: its words, and the whole state or None. Two states are equal if all is
    that was read of both."""

    def __init__(self, words: bytes, whole: bytes | None) -> None:
        self.words, self.whole = words, whole

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyState):
            return NotImplemented
        both = self.whole is not None and other.whole is not None
        return self.whole == other.whole if both else self.words == other.words

    __hash__ = None  # pyright: ignore[reportAssignmentType]


@final
class OfNumpyGlobally(Source):
    """The one behind np.random.rand and its like. Its whole state takes 60 us to read. So after the first looks, and
    until something has been drawn, its words stand for it. (Beside the words it has at most one number in reserve,
    drawn together with the one before.)"""

    name = "numpy's generator"

    def __init__(self) -> None:
        self.num_looks, self.is_used = 0, False
        self.words: bytes | None = None

    def state(self) -> NumpyState:
        self.num_looks += 1
        numpy = numpy_random()
        bit_generator = numpy.get_bit_generator()
        if not isinstance(bit_generator, numpy.MT19937):
            return NumpyState(b"", pickle.dumps(numpy.get_state(legacy=False)))
        words = numpy_bytes(bit_generator)
        self.is_used |= self.words is not None and words != self.words
        self.words = words
        if self.is_used or self.num_looks <= NUM_FULL_LOOKS:
            return NumpyState(words, pickle.dumps(numpy.get_state(legacy=False)))
        return NumpyState(words, None)

    def restore(self, state: NumpyState) -> None:
        if state.whole is not None:
            numpy_random().set_state(pickle.loads(state.whole))
        else:
            now = numpy_random().get_state(legacy=True)
            *words, position = array("I", state.words)
            numpy_random().set_state(("MT19937", words, position, *now[3:]))


def numpy_random() -> Any:
    """The module numpy.random; None if nobody has imported it, so that nobody can draw from it."""
    return sys.modules.get("numpy.random")


PYTHONS = OfPython(random.random.__self__)  # pyright: ignore[reportFunctionMemberAccess]
NUMPYS = OfNumpyGlobally()
TORCHS = OfTorch(torch.default_generator)


def global_sources() -> list[Source]:
    """The generators from which code draws unless it is given another."""
    cards = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    numpys = [NUMPYS] if numpy_random() else []
    return [TORCHS, PYTHONS, *numpys, *map(OfTorch, cards)]


def sources_of(module: nn.Module) -> list[Source]:
    """The generators that a module and those in it hold, also in lists, dictionaries and plain objects, and those that
    their classes hold, and the Python files of these."""
    modules = list(module.modules())
    contents = [contents_of(container) for _, container in containers_in(Places(module))]
    inner = (value for each in contents for value in (each.values() if isinstance(each, dict) else each))
    files = (sys.modules.get(type(each).__module__) for each in modules)
    own_files = dict.fromkeys(file for file in files if file is not None and not file.__name__.startswith("torch."))
    kinds = {type(each) for each in modules}
    classes = dict.fromkeys(cls for kind in kinds for cls in kind.__mro__ if cls.__module__.split(".")[0] not in FIXED)
    held = (value for owner in (*modules, *classes, *own_files) for value in list(vars(owner).values()))
    return list({id(value): source for value in (*held, *inner) if (source := source_of(value)) is not None}.values())


def source_of(value: Any) -> Source | None:
    """A generator's source; None if the value is no generator."""
    if isinstance(value, torch.Generator):
        return OfTorch(value)
    numpy = numpy_random()
    if numpy is not None and isinstance(value, numpy.Generator):
        bits = value.bit_generator
        return OfNumpy(lambda: bits.state, partial(setattr, bits, "state"))
    if numpy is not None and isinstance(value, numpy.RandomState):
        return OfNumpy(partial(value.get_state, legacy=False), value.set_state)
    return OfPython(value) if is_pythons(value) else None


def is_pythons(value: Any) -> bool:
    """Whether it is a random.Random whose state is that of its class."""
    kind = type(value)
    if kind is random.Random:  # all that torch.compile can follow
        return True
    return random.Random in kind.__mro__ and all(getattr(kind, name) is getattr(random.Random, name) for name in STATE)


States = list[tuple[Source, Any]]


def states_of(sources: Iterable[Source]) -> States:
    return [(source, source.state()) for source in sources]


def moved(before: States) -> States:
    """Those of the states that aren't any more what they were."""
    return [(source, state) for source, state in before if source.state() != state]


def restore(states: States) -> None:
    for source, state in states:
        source.restore(state)


@contextmanager
def same_draws_afterwards(module: nn.Module | None = None) -> Iterator[None]:
    """What is drawn inside changes nothing that is drawn afterwards, by a module's own generators either."""
    before = states_of([*global_sources(), *([] if module is None else sources_of(module))])
    try:
        yield
    finally:
        restore(moved(before))


def saved() -> dict[str, Any]:
    """The states of torch's generators, numpy's and Python's, as tensors and plain values: no pickle, as it is read
    from files."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if (numpy := numpy_random()) is not None:
        state["numpy"] = json.dumps(numpy.get_state(legacy=False), default=as_list)
    return state


def as_list(words: Any) -> Any:
    """numpy's array as a list, its number as one of Python's."""
    return words.tolist()


def load(state: Mapping[str, Any]) -> None:
    """The inverse of `saved`. What an early version of lowvram hasn't saved stays as it is."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "python" in state:
        random.setstate(state["python"])
    if "numpy" in state:
        numpy_random().set_state(json.loads(state["numpy"]))


def seed_all(seed: int) -> None:
    """Seed torch's generators, numpy's and Python's."""
    torch.manual_seed(seed)
    random.seed(seed)
    if (numpy := numpy_random()) is not None:
        numpy.seed(seed % 2**32)
