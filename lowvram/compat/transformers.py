"""Private names of Hugging Face's transformers."""

from __future__ import annotations

from typing import Any


def class_of(auto_class: Any, config: Any) -> Any:
    """The class of models that an auto class, such as AutoModelForCausalLM, has for a configuration.

    _model_mapping of auto classes, since 4.5: their public from_config makes a model at once, and looks for code that a
    configuration brings along. Replaced by a public look-up, if transformers makes one.

    Raises:
        KeyError: there is none.
    """
    return auto_class._model_mapping[type(config)]
