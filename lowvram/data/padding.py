"""Which token pads short texts: one that the tokenizer makes of no text."""

from __future__ import annotations

from dataclasses import replace

from lowvram.config.errors import BadInput
from lowvram.data.spec import TextRules
from lowvram.data.tokenizer import Bytes, Tokenizer, choose_tokenizer


def tokenizer_and_rules(choice: str, rules: TextRules) -> tuple[Tokenizer, TextRules]:
    """The tokenizer that `data.tokenizer` names, and the rules of the model with the token that pads.

    Raises:
        BadInput: the tokenizer can't be read, or no token can pad.
    """
    tokenizer = choose_tokenizer(choice, rules)
    return tokenizer, replace(rules, pad_id=padding_token(tokenizer, rules))


def padding_token(tokenizer: Tokenizer, rules: TextRules) -> int:
    """The model's own token of padding; where it has none, or where the tokenizer makes it of texts, the tokenizer's,
    an end token, or one that isn't used.

    Raises:
        BadInput: there is none, and the model takes padding for where a text ends.
    """
    num_tokens = rules.vocab_size or tokenizer.vocab_size
    if rules.pad_id is not None and (rules.is_pad_fixed or isinstance(tokenizer, Bytes)):
        return rules.pad_id
    no_texts = (rules.pad_id, *tokenizer.pad_ids, *rules.stop_ids, tokenizer.vocab_size)
    known = [token for token in no_texts if token is not None and 0 <= token < num_tokens]
    for token in (*(each for each in known if not tokenizer.is_text(each)), *rules.stop_ids, rules.pad_id):
        if token in known:
            return token
    if rules.finds_ends_by_padding and not isinstance(tokenizer, Bytes):
        allowed = "the number of a token that is in no text, to pad with: neither the tokenizer nor the model has one"
        raise BadInput("model.args.pad_token_id", rules.pad_id, allowed)
    return rules.pad_id or 0  # masks and targets tell such models where a text ends
