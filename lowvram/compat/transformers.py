"""Private names of Hugging Face's transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

IMPORTS = "transformers.utils.import_utils"


def class_of(auto_class: Any, config: Any) -> Any:
    """The class of models that an auto class, such as AutoModelForCausalLM, has for a configuration; of several, as of
    a DeiT with and without its teacher, the first that the configuration names, else the first.

    _model_mapping of auto classes, since 4.5: their public from_config makes a model at once, and looks for code that a
    configuration brings along. Replaced by a public look-up, if transformers makes one.

    Raises:
        KeyError: there is none.
    """
    found = auto_class._model_mapping[type(config)]
    if not isinstance(found, tuple | list):
        return found
    named = config.architectures or ()
    return next((each for each in found if each.__name__ in named), found[0])


@contextmanager
def values_read(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside it models read the values of those fake tensors for which `is_known`, as they read real ones. Of fake
    tensors they otherwise read none and go the way of compiled graphs, which keep masks that mask nothing.

    transformers.utils.import_utils.is_fake_tensor, since 5: models ask `is_tracing`, which asks it. Replaced by a
    public setting, if transformers makes one.
    """
    imports = sys.modules.get(IMPORTS)
    is_fake = getattr(imports, "is_fake_tensor", None)
    if is_fake is None:
        yield
        return
    with patch.object(imports, "is_fake_tensor", lambda value: is_fake(value) and not is_known(value)):
        yield
