"""The heads of transformers' models that lowvram trains, and what each of them reads."""

from __future__ import annotations

import math
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowvram.compat.torch_modes import without_dispatch_modes
from lowvram.compat.transformers import class_of
from lowvram.config.errors import BadInput, require
from lowvram.data.numbering import are_named
from lowvram.data.spec import DataSpec, Modality, TextRules
from lowvram.models.hf_source import transformers
from lowvram.models.wrappers import few


class Head(Enum):
    """What the model predicts. The names are what a user types."""

    auto = "what the folder's config.json says under architectures"
    causal_lm = "the next token"
    masked_lm = "masked tokens"
    seq2seq_lm = "a text from another"
    sequence_classification = "a class of a text"
    image_classification = "a class of an image"


READS = {
    Head.causal_lm: Modality.TOKENS,
    Head.masked_lm: Modality.MASKED_TOKENS,
    Head.seq2seq_lm: Modality.PAIRS,
    Head.sequence_classification: Modality.LABELLED_TOKENS,
    Head.image_classification: Modality.IMAGES,
}
CLASSES: dict[Head, Any] = {
    Head.causal_lm: transformers.AutoModelForCausalLM,
    Head.masked_lm: transformers.AutoModelForMaskedLM,
    Head.seq2seq_lm: transformers.AutoModelForSeq2SeqLM,
    Head.sequence_classification: transformers.AutoModelForSequenceClassification,
    Head.image_classification: transformers.AutoModelForImageClassification,
}
SUFFIXES = {  # of the names of classes
    "ForCausalLM": Head.causal_lm,
    "LMHeadModel": Head.causal_lm,
    "ForMaskedLM": Head.masked_lm,
    "ForConditionalGeneration": Head.seq2seq_lm,
    "MarianMTModel": Head.seq2seq_lm,
    "ForSequenceClassification": Head.sequence_classification,
    "ForImageClassification": Head.image_classification,
    "ForImageClassificationWithTeacher": Head.image_classification,
}
WRAPPING_KINDS = frozenset({"mbart", "plbart"})  # whose decoders begin with the last token of what they write


def head_named_by(config: Any) -> Head:
    """The head of the class that a configuration names first. Raises BadInput if it is none that lowvram trains."""
    names = config.architectures or ["nothing"]
    chosen = next((head for suffix, head in SUFFIXES.items() if names[0].endswith(suffix)), None)
    if chosen is None:
        options = ", ".join(head.name for head in CLASSES)
        raise BadInput("model.head", "auto", f"one of {options}: the model's configuration names {names[0]}")
    is_decoder_alone = chosen is Head.seq2seq_lm and not config.is_encoder_decoder  # as of models that also read images
    return Head.causal_lm if is_decoder_alone else chosen


def model_class(head: Head, config: Any) -> Any:
    """The class of a model with this head. Raises BadInput if transformers has none for this kind of model."""
    try:
        found = class_of(CLASSES[head], config)
    except KeyError:
        allowed = f"a head that transformers has for the kind {config.model_type}"
        raise BadInput("model.head", head.name, allowed) from None
    allowed = "masked_lm, or causal_lm with model.args={is_decoder: true}: without it each token sees those after it"
    require(head is not Head.causal_lm or not is_encoder(config), "model.head", head.name, allowed)
    return found


def is_encoder(config: Any) -> bool:
    """Whether it is a BERT or one of its relatives, which attend to all tokens unless they are told to be decoders."""
    is_bidirectional = not config.is_encoder_decoder and getattr(config, "is_decoder", None) is False
    return is_bidirectional and config.__class__ in transformers.MODEL_FOR_MASKED_LM_MAPPING


def check_shift(model: Any, rules: TextRules) -> None:
    """Raises BadInput if a model makes the inputs of its decoder from targets in another way than `rules`."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        return
    allowed = "the token that the decoder begins with: the model's configuration names none"
    first = model.config.decoder_start_token_id
    require(rules.start_id is None or first is not None, "model.args.decoder_start_token_id", first, allowed)
    tokens = np.array([5, 6, 7])
    with without_dispatch_modes(), torch.device("cpu"):
        theirs, ours = shift(torch.from_numpy(tokens)[None])[0], rules.decoded(tokens, len(tokens))[0]
    allowed = f"a kind whose decoder reads its targets one token late, and not as {model.config.model_type} does"
    require(torch.equal(theirs, ours), "model.head", Head.seq2seq_lm.name, allowed)


def class_names_of(config: Any) -> tuple[str, ...]:
    """The names of a classifier's classes, in the order of its logits."""
    names = {int(number): str(name) for number, name in config.id2label.items()}
    return tuple(names.get(number, f"LABEL_{number}") for number in range(config.num_labels))


def check_classes(of_head: tuple[str, ...] | None, spec: DataSpec) -> None:
    """Raises BadInput if data have more classes than a trained head or, where its classes have names, others, or these
    in another order."""
    if of_head is None:
        return
    anew = "model.reset_head=true starts a new one"
    most = f"at most {len(of_head)}, which the trained head knows: {anew}"
    require(spec.num_classes <= len(of_head), "the data's classes", spec.num_classes, most)
    is_same = spec.class_names in (None, of_head) or not are_named(of_head)
    allowed = f"among those of the trained head, by name or by number: {few(of_head)}; {anew}"
    require(is_same, "the data's classes", few(spec.class_names or ()), allowed)


def own_pad_id(config: Any) -> int | None:
    """The token of padding that a configuration names and that the model knows; None: there is none."""
    pad_id, num_tokens = (getattr(config.get_text_config(), name, None) for name in ("pad_token_id", "vocab_size"))
    is_token = isinstance(pad_id, int) and 0 <= pad_id < (num_tokens or math.inf)
    return pad_id if is_token else None


def stop_ids(config: Any) -> tuple[int, ...]:
    """The tokens that end texts, of which a configuration may name none, one or several."""
    named = getattr(config.get_text_config(), "eos_token_id", None)
    several = named if isinstance(named, list | tuple) else [named]
    return tuple(token for token in several if isinstance(token, int))


def is_decoder_alone(config: Any) -> bool:
    """Whether no token sees those after it, and there is no encoder."""
    return not config.is_encoder_decoder and config.__class__ not in transformers.MODEL_FOR_MASKED_LM_MAPPING


def finish_classifier(model: Any, spec: DataSpec, rules: TextRules) -> None:
    """Have a classifier of texts read its logits at the end of each text.

    Most models of transformers know the end by the token of padding, of which configurations often name none.
    """
    text_config, last = model.config.get_text_config(), model.config.get_text_config().vocab_size - 1
    known = (spec.pad_id, rules.pad_id, *rules.stop_ids[:1])
    # Not in the configuration that the model is built from: its embedding of the token would never train.
    text_config.pad_token_id = model.config.pad_token_id = next((each for each in known if each is not None), last)
    if model.config.is_encoder_decoder:
        model.forward = partial(logits_at_end, model)
    elif getattr(model.config, "summary_type", None) == "last":
        model.forward = partial(logits_at_last_place, model)
    elif rules.finds_ends_by_padding:
        model.forward = partial(logits_before_padding, model)


def logits_before_padding(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
    """The forward pass of a model that takes its configuration's token of padding for padding: it stands wherever the
    mask is 0, with whatever token the data are padded."""
    ids = input_ids.masked_fill(attention_mask == 0, model.config.get_text_config().pad_token_id)
    return type(model).forward(model, input_ids=ids, attention_mask=attention_mask)


def logits_at_last_place(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Any:
    """The forward pass of a model that reads its logits at the last place, as XLNet does: padding of texts (b, t) goes
    to the left."""
    length, num_pads = input_ids.shape[1], (attention_mask == 0).sum(1, keepdim=True)
    places = (torch.arange(length, device=input_ids.device) - num_pads) % length
    ids, mask = input_ids.gather(1, places), attention_mask.gather(1, places)
    return type(model).forward(model, input_ids=ids, attention_mask=mask)


def logits_at_end(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The forward pass of an encoder-decoder classifier: texts (b, t) to logits (b, k), from the decoder's state at
    each text's last end-of-sequence token. The model's own forward pass selects that by a boolean mask, which waits for
    the device and can't run on fake tensors."""
    shifted = input_ids.roll(1, dims=1)
    shifted[:, 0] = model.config.decoder_start_token_id
    states = model.base_model(input_ids, attention_mask=attention_mask, decoder_input_ids=shifted, use_cache=False)[0]
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    end_id = stop_ids(model.config)[0]
    last = (input_ids.eq(end_id) * places).argmax(1)
    return model.classification_head(states[torch.arange(len(last), device=last.device), last])
