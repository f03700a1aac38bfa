"""Decides which values are secret, and removes them from all that is written or shown. Imports no torch.

A value is secret because of its key (`api_key`, `password`) or its form (`https://user:password@host`, `Bearer …`,
tokens of known services). A process also remembers the values that it finds under such keys in configurations and in
its environment, and removes them from all later texts. In files and printed lines `<refused>` replaces them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any
from urllib.parse import quote

REFUSED = "<refused>"
LEAST_LENGTH = 6  # of a remembered value; shorter ones would match in ordinary text
LEAST_LENGTH_OF_LINES = 16  # of a line of a remembered value of several lines
LONGEST_KEPT = 2048  # characters of the texts whose results are cached

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+")
_ALWAYS = frozenset(("password", "passwords", "passwd", "passphrase", "passcode", "secret", "secrets"))
_ALWAYS |= {"credential", "credentials", "creds", "authorization", "jwt", "cookie", "cookies"}
_LAST = frozenset(("key", "token"))
_LAST_ALONE = frozenset(("auth", "pass", "pw"))
# Words before "key" or "token" that make it a secret for certain, and words that make it an ordinary key.
_OF_SECRETS = "api access secret private auth refresh bearer session hf hub github gitlab wandb aws openai ssh signing "
_OF_SECRETS += "encryption encrypt client login license personal bot"
_EVERYDAY = "pad eos bos cls sep unk mask eot eod start end stop special image text label class sort primary public "
_EVERYDAY += "foreign state input output target column field dict cache index query sample feature next last first "
_EVERYDAY += "prompt decoder extra additional num per max min group order item id hash metric"
_BEFORE = {**dict.fromkeys(_OF_SECRETS.split(), True), **dict.fromkeys(_EVERYDAY.split(), False)}
# Words that are written as one: apikey, PGPASSWORD, dbpass.
_OWNERS = "my user db pg mysql redis root admin sudo ssh ftp smtp mail account storage master service proxy wifi"
_AS_ONE = re.compile(
    rf"({'|'.join(_OF_SECRETS.split())})(key|token)|({'|'.join(_OWNERS.split())})(key|token|pass|pwd|pw)"
    r"|\w+(password|passwd|passphrase|secret)s?"
)

# Forms of secrets; the group "secret" is the secret itself. Each pattern begins at a boundary, so that searching a long
# text takes linear time.
_SHAPES = tuple(
    re.compile(pattern)
    for pattern in (
        r"(?<=://)[^/\s:@'\"]*:(?P<secret>[^/\s'\"]+)@",  # https://user:password@host
        r"(?i:(?<=http://)|(?<=https://))(?P<secret>[^/\s:@'\"]+)@",
        r"(?i:[?&](?:sig|signature|x-amz-\w+)=)(?P<secret>[^&\s'\"]+)",
        r"(?<!\w)(?i:bearer)\s+(?!(?i:token|auth)\w*)(?P<secret>[\w.~+/=-]{6,})",
        r"(?<!\w)Basic\s+(?=[A-Za-z]*[0-9+/=])(?P<secret>[A-Za-z0-9+/]{8,}={0,2})",
        r"(?<![A-Za-z0-9])(?P<secret>"
        r"hf_[A-Za-z0-9]{16,}|api_org_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}"
        r"|glpat-[\w-]{16,}|A[KS]IA[0-9A-Z]{16}|xox[a-z]-[\w-]{10,}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|pypi-[\w-]{30,}"
        r"|npm_[A-Za-z0-9]{30,}|[rs]k_(?:live|test)_\w{10,}|wandb_v\d_\w{16,}|local-[0-9a-f]{40})",
        r"(?<![\w-])(?P<secret>eyJ[\w-]{5,}\.eyJ[\w-]{5,}\.[\w-]*)",  # a JSON web token
        r"(?s)(?P<secret>-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
    )
)
_REFERENCE = re.compile(r"\$\{(?:oc\.env:)?[\w.]+\}")  # an interpolation, which doesn't contain the value
_SOLVED = re.compile(r"(?:train|data|model|loader|accum|adapter|depth|optimizer|weights|tile|ckpt)(?:\.[A-Za-z_]\w*)+")
_NOTHING = frozenset(("", "null", "none", "true", "false", "???", "…", REFUSED.lower()))
_NUMBER = re.compile(r"[-+]?[\d.]+(?:e[-+]?\d+)?", re.IGNORECASE)
_PART_OF_KEYS = re.compile(r"key|token|pass|pw|secret|cred|auth|jwt|cookie", re.IGNORECASE)
_KEY = re.compile(r"(?<![\w./-])(?P<key>[\w.-]*\w)(?P<quote>[\"']?)[ \t]*(?P<sign>[=:])[ \t]*")
_BEGINS_LINE = re.compile(r"[ \t]*(?:- )*[\w.-]+[\"']?[ \t]*[=:][ \t]*")  # a key, up to its value
_PIECE = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|.", re.DOTALL)
_OPEN, _CLOSED = "([{", ")]}"

_known: set[str] = set()  # remembered secrets, in each form in which a text may contain them
_pattern: list[re.Pattern[str]] = []  # matches the remembered secrets; empty until it is needed


class Sure(IntEnum):
    """Whether a key is that of a secret."""

    NO = 0
    MAYBE = 1  # if the value is text, but not if it is a number, as in `key: 64`
    YES = 2


@lru_cache(maxsize=4096)
def sure(key: str) -> Sure:
    """Whether the value of a dotted key is a secret."""
    words = [word.lower() for word in _WORD.findall(key.rpartition(".")[2])]
    if any(word in _ALWAYS or _AS_ONE.fullmatch(word) for word in words):
        return Sure.YES
    if words[-1:] == ["file"]:
        words.pop()
    *before, last = words or [""]
    if last in _LAST:
        known = _BEFORE.get(before[-1]) if before else None
        return Sure.MAYBE if known is None else Sure.YES if known else Sure.NO
    if last == "pwd":
        return Sure.YES if before else Sure.NO  # alone it is the working directory
    return Sure.MAYBE if last in _LAST_ALONE else Sure.NO


def is_secret(key: str, value: Any) -> bool:
    """Whether a value is secret because of its key. Null, true, false and references such as `${oc.env:KEY}` never
    are."""
    how_sure = sure(key)
    if not how_sure or value is None or isinstance(value, bool):
        return False
    if isinstance(value, str):
        return not says_nothing(value)
    return how_sure is Sure.YES or not isinstance(value, int | float)


def says_nothing(text: str) -> bool:
    """Whether a value can't be a secret: nothing, an interpolation, or a dotted key as that of `solve.key`."""
    bare = text.strip("'\" ")
    return bare.lower() in _NOTHING or any(pattern.fullmatch(bare) for pattern in (_REFERENCE, _SOLVED))


def learn(values: Any) -> None:
    """Remember the secrets of a configuration and of the environment, to remove them from all later texts."""
    before = len(_known)
    _known.update(form for each in (values, dict(os.environ)) for form in _secrets_in(each))
    if len(_known) > before:
        _forget_cached()


def forget() -> None:
    """Forget all that `learn` has remembered."""
    _known.clear()
    _forget_cached()


def _forget_cached() -> None:
    _pattern.clear()
    _short_text.cache_clear()


def _secrets_in(value: Any, key: str = "") -> Iterator[str]:
    """The secrets in plain values, in each form in which a text may contain them."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secrets_in(item, key if sure(key) > sure(str(name)) else str(name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets_in(item, key)
    elif isinstance(value, str):
        yield from _secrets_in_text(value, key)


@lru_cache(maxsize=4096)
def _secrets_in_text(value: str, key: str) -> frozenset[str]:
    is_one = is_secret(key, value) and not key.lower().endswith("file")
    rare = {value} if is_one and _is_rare(value, sure(key)) else set[str]()
    shaped = {match["secret"] for shape in _SHAPES for match in shape.finditer(value)}
    rare |= {each for each in shaped if _is_rare(each, Sure.YES)}
    return frozenset(form for each in rare for form in _forms(each))


def _is_rare(value: str, how_sure: Sure) -> bool:
    """Whether a value is unusual enough to be removed from any text that contains it: the value of `token: text` isn't,
    as it is an ordinary word."""
    is_word = value.isascii() and value.replace("_", "").isalpha() and value.islower()
    return len(value) >= LEAST_LENGTH and (how_sure is Sure.YES or not is_word) and not says_nothing(value)


def _forms(value: str) -> set[str]:
    """The value as it is, as Python, JSON and URLs write it, and each of its longer lines."""
    lines = [line for line in value.splitlines() if len(line) >= LEAST_LENGTH_OF_LINES]
    return {value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""), *lines}


def without_secrets(values: Any, key: str = "") -> Any:
    """A copy of plain values in which secrets are replaced."""
    if is_secret(key, values):
        return REFUSED
    if isinstance(values, Mapping):
        return {name: without_secrets(item, str(name)) for name, item in values.items()}
    if isinstance(values, list | tuple):
        return [without_secrets(item) for item in values]
    return text_without_secrets(values) if isinstance(values, str) else values


def words_without_secrets(words: Sequence[str]) -> list[str]:
    """The same for a command line, whose words are `dotted.key=value`."""
    return [_word_without_secrets(word) for word in words]


def _word_without_secrets(word: str) -> str:
    key, equals, value = word.partition("=")
    if equals and is_secret(key, value):
        return f"{key}={REFUSED}"
    return text_without_secrets(word, is_config=True)


def text_without_secrets(text: str, is_config: bool = False) -> str:
    """The text, with secrets replaced.

    Args:
        is_config: the text is a configuration, in which what follows `key: ` is always a value.
    """
    return _short_text(text, is_config) if len(text) < LONGEST_KEPT else _text(text, is_config)


def _text(text: str, is_config: bool) -> str:
    if _known:
        text = _known_pattern().sub(REFUSED, text)
    for shape in _SHAPES:
        text = shape.sub(_with_secret_refused, text)
    return _with_values_refused(text, is_config)


_short_text = lru_cache(maxsize=4096)(_text)  # the points of a sweep have most texts in common


def _known_pattern() -> re.Pattern[str]:
    if not _pattern:
        _pattern.append(re.compile("|".join(map(re.escape, sorted(_known, key=len, reverse=True)))))
    return _pattern[0]


def _with_secret_refused(match: re.Match[str]) -> str:
    whole, start = match[0], match.start()
    if match["secret"] == REFUSED or _REFERENCE.fullmatch(match["secret"]):
        return whole
    return whole[: match.start("secret") - start] + REFUSED + whole[match.end("secret") - start :]


def _with_values_refused(text: str, is_config: bool) -> str:
    """The text with the values of `api_key=…`, `'api_key': …` and the like replaced."""
    if not _PART_OF_KEYS.search(text):
        return text
    pieces, done, at = list[str](), 0, 0
    while match := _KEY.search(text, at):
        at = match.end()
        if sure(match["key"]) is Sure.NO:
            continue
        end = _end_of_value(text, at, is_config)
        if _is_value(text[at:end], match, is_config):
            pieces += [text[done:at], REFUSED]
            done = end
        at = max(at, end)
    return "".join([*pieces, text[done:]])


def _is_value(text: str, key: re.Match[str], is_config: bool) -> bool:
    """Whether what follows a key is a secret, and not a word of a sentence such as "must be key=value" or "wrong
    password: try it again"."""
    how_sure = sure(key["key"])
    if text.startswith(("=", REFUSED)) or says_nothing(text) or (how_sure is Sure.MAYBE and _NUMBER.fullmatch(text)):
        return False
    if is_config or key["quote"]:
        return True
    is_word = key["key"].isalpha() and text.isalpha() and text.islower()
    if key["sign"] == ":":
        return how_sure is Sure.YES and not is_word
    return how_sure is Sure.YES or not is_word


def _is_of_next(text: str, start: int, at: int) -> bool:
    """Whether, in YAML, the line after the newline at `at` is another key's than that of the value at `start`."""
    line, following = text[text.rfind("\n", 0, start) + 1 : start], text[at + 1 : at + 1 + LONGEST_KEPT]
    if not _BEGINS_LINE.fullmatch(line):  # in brackets or after other words lines may end anywhere
        return False
    indents = [len(each) - len(each.lstrip(" ")) for each in (line, following)]
    return indents[1] <= indents[0] and not following.lstrip(" ").startswith("- ")


def _end_of_value(text: str, start: int, is_config: bool) -> int:
    """The index at which the value that begins at `start` ends: quoted text, text in brackets, or text up to the next
    separator."""
    ends, depth, at = ",)]}" if is_config else " \t\r\n,;&)]}\"'", 0, start
    while at < len(text):
        piece = _PIECE.match(text, at)
        assert piece is not None
        is_quoted = len(piece[0]) > 1 and (is_config or depth > 0 or at == start)
        mark = piece[0] if is_quoted else text[at]
        if depth == 0 and (mark in ends or (is_config and mark == "\n" and _is_of_next(text, start, at))):
            break
        depth += (mark in _OPEN) - (mark in _CLOSED)
        at += len(mark)
        if is_quoted and depth == 0 and not is_config:
            break
    return at
