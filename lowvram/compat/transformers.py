"""Private names of Hugging Face's transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lowvram.compat.replaced import replaced

IMPORTS = "transformers.utils.import_utils"


def class_of(auto_class: Any, config: Any) -> Any:
    """The model class that an auto class, such as AutoModelForCausalLM, has for a configuration. If it has several, as
    for a DeiT with and without a teacher: the first one that the configuration names, else the first.

    _model_mapping of auto classes, since 4.5: their public from_config makes a model at once, and also looks for code
    that comes with a configuration. Replaced by a public look-up, if transformers makes one.

    Raises:
        KeyError: there is none.
    """
    classes = auto_class._model_mapping[type(config)]
    if not isinstance(classes, tuple | list):
        return classes
    named = config.architectures or ()
    return next((each for each in classes if each.__name__ in named), classes[0])


def start_anew(model: Any, part: Any) -> None:
    """Give all weights of a part of a model of the library, in place, first values as its class chooses them.

    PreTrainedModel._init_weights, since 2: derived classes override it, so its name is part of the interface; and
    _is_hf_initialized, since 4.31: by it the library marks what it has loaded, and leaves that alone. Replaced by a
    public function that resets a module, if transformers makes one.
    """
    for module in part.modules():
        for marked in (module, *module.parameters(recurse=False), *module.buffers(recurse=False)):
            vars(marked).pop("_is_hf_initialized", None)
        model._init_weights(module)


@contextmanager
def known_values_readable(is_known: Callable[[Any], bool]) -> Iterator[None]:
    """Inside it models of the library treat fake tensors for which `is_known` is true like real ones, and read their
    values. With other fake tensors they behave as under torch.compile: they read nothing, and keep masks that mask
    nothing.

    transformers.utils.import_utils.is_fake_tensor, since 5, is patched: models call `is_tracing`, which calls it.
    Replaced by a public setting, if transformers makes one.
    """
    imports = sys.modules.get(IMPORTS)
    is_fake = getattr(imports, "is_fake_tensor", None)
    if is_fake is None:
        yield
        return
    with replaced(imports, "is_fake_tensor", lambda value: is_fake(value) and not is_known(value)):
        yield
