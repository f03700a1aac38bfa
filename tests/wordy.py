"""Tiny tokenizers of transformers, trained on three sentences and saved with the library's own functions."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

SENTENCES = ["the quick brown fox jumps over the lazy dog", "a lazy dog sleeps", "the fox is quick"]
MARKS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def save_tokenizer(folder: Path, *, end: str | None = None) -> Path:
    """Each word is a token, those that it doesn't know are [UNK]; alone, a text has marks at its ends, as BERT wants
    it. `end` is a token that ends texts in a stream. Returns the folder."""
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    inner.train_from_iterator(SENTENCES, trainers.WordLevelTrainer(special_tokens=MARKS + ([end] if end else [])))
    marks = [("[CLS]", 2), ("[SEP]", 3)]
    template = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=marks)
    inner.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token=end,
    ).save_pretrained(str(folder))
    return folder


CHAT_MARKS = ["[PAD]", "[UNK]", "<end>", "<assistant>", "<user>", "<system>"]


def save_chat_tokenizer(folder: Path, template: str | None) -> Path:
    """Each word is a token, and so are the marks of a chat; `template` is the chat template. Returns the folder."""
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel(unk_token="[UNK]"))  # pyright: ignore[reportCallIssue]
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    inner.train_from_iterator([*SENTENCES, "thinking"], trainers.WordLevelTrainer(special_tokens=CHAT_MARKS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", eos_token="<end>", chat_template=template
    )
    tokenizer.save_pretrained(str(folder))
    return folder
