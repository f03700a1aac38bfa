"""Errors in what was typed, each as one sentence. Imports no torch."""

from __future__ import annotations

import argparse
import difflib
import re
import shlex
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

import hydra
from hydra.errors import OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from lowvram.cli.hints import hint_for_key, hint_for_option
from lowvram.cli.program import program
from lowvram.compat.hydra import args_parser
from lowvram.config.code_names import PRESETS
from lowvram.config.errors import BadInput, Refused
from lowvram.config.registry import options_of
from lowvram.config.secret import text_without_secrets
from lowvram.config.settings import GROUPS, PARENT_ONLY, ROOT_KEYS, SECTIONS
from lowvram.config.texts import LONGEST_REASON, shortened
from lowvram.config.words import key as key_of
from lowvram.results.terminal import hydra_quoted

QUOTED_KEY, UNQUOTED = re.compile(r"""(["'])([^"']+)\1\s*:"""), r"\2:"
ONE_OF = ("--run", "--multirun", "--cfg", "--info", "--shell-completion")  # flags that exclude each other


def sentence(error: Exception) -> str:
    """What is wrong and how to mend it, in one sentence."""
    cause = cause_of_ours(error)
    if isinstance(cause, BadInput):
        hint = hint_for_key(cause.key) if "." not in cause.key else None  # a root key that is forced in with +
        return f"{cause.key}: no such key; {hint}" if hint else str(cause)
    if isinstance(error, OverrideParseException):
        return unreadable(error.override)
    for pattern, translate in PATTERNS.items():
        if match := re.search(pattern, str(error), re.DOTALL):
            return translate(match)
    text = " ".join(str(error).split("\n    ")[0].split())
    return f"{error.full_key}: {text}" if isinstance(error, OmegaConfBaseException) and error.full_key else text


def unforeseen(error: Exception) -> str:
    """The first line of an error that isn't a mistake in what was typed."""
    text = "".join(traceback.format_exception_only(error)).splitlines()[0]
    return shortened(text_without_secrets(text), LONGEST_REASON)


def sorted_words(words: list[str]) -> list[str]:
    """Hydra's own flags before the overrides: argparse can't read `a=1 -m b=1,2`.

    Raises:
        Refused: an unknown flag, flags that exclude each other, or a group without an option.
    """
    parser = args_parser()
    parser.exit_on_error = False
    try:
        known, unknown = parser.parse_known_intermixed_args(words)
    except argparse.ArgumentError as error:
        raise Refused(str(error)) from None
    if unknown:
        raise Refused(unknown_flag(unknown[0]))
    check_flags(known)
    for override in known.overrides:
        check_override(override)
    return [*(word for word in words if word not in known.overrides), *known.overrides]


def with_presets(words: Sequence[str]) -> list[str]:
    """`+experiment=…`, as Hydra's pages type it, as `experiment=…`: the defaults list has these groups."""
    return [word.lstrip("+") if word.startswith("+") and key_of(word) in PRESETS else word for word in words]


def check_flags(known: argparse.Namespace) -> None:
    """Raises Refused for flags that Hydra can't combine."""
    typed = [flag for flag in ONE_OF if getattr(known, flag[2:].replace("-", "_"))]
    if len(typed) > 1:
        hint = "; --cfg shows one configuration: type one value for each key" if known.multirun and known.cfg else ""
        raise Refused(f"{' '.join(typed)}: must be typed one without the other{hint}")
    if known.resolve and not known.cfg:
        raise Refused("--resolve: must be typed with --cfg job")


def unknown_flag(word: str) -> str:
    """The sentence for a flag that Hydra doesn't have."""
    key, equals, _ = word.lstrip("-").partition("=")
    hint = hint_for_key(key.replace("-", "_"))
    if hint is None:
        hint = f"type {word.lstrip('-')}, without dashes" if equals else "--help shows them all"
    return f"{word}: no such flag; {hint}"


def check_override(word: str) -> None:
    """Raises Refused for words where Hydra's own message doesn't name the word."""
    key, _, value = word.partition("=")
    if not key:
        raise Refused(unreadable(word))
    if key in (*GROUPS, *PARENT_ONLY, *PRESETS) and re.fullmatch(r"(null|true|false|[\d.]+)", value, re.IGNORECASE):
        raise Refused(f"{word}: must be an option of the group {key}; without the word it keeps its default")


def cause_of_ours(error: BaseException | None) -> BaseException | None:
    """The BadInput that Hydra or OmegaConf has wrapped, if there is one."""
    while error is not None and not isinstance(error, BadInput):
        error = error.__cause__ or error.__context__
    return error


def unknown_option(match: re.Match[str]) -> str:
    """Hydra could not find a file of a group."""
    path, listed = (
        match[1].removeprefix("hydra/"),
        re.search(r"Available options in '[^']*':(.*?)Config search path", match.string, re.DOTALL),
    )
    group, _, option = path.partition("/")
    options = listed[1].split() if listed else []
    group = f"hydra/{group}" if path != match[1] else group
    if hint := hint_for_option(group, option):
        return f"{group}={option}: {hint}"
    if group.startswith("hydra/") and option in ("default", "basic"):  # which Hydra's own files choose
        where = Path(hydra.__file__).parent
        return f"{group}={option}: Hydra can't find it: are all files below {where} there, and readable to this user?"
    known = f"must be one of {', '.join(options)}" if options else f"the group {group} has no such option"
    return f"{group}={option}: {known}{closest(option, options)}"


def unknown_key(match: re.Match[str]) -> str:
    """Hydra could not override a key that isn't there."""
    key = match[1].lstrip("+~")
    if hint := hint_for_key(key):
        return f"{key}: no such key; {hint}"
    section, _, last = key.rpartition(".")
    if section and last in GROUPS and section not in GROUPS:
        return f"{key}: no such key; choose {last}=OPTION, one of {', '.join(options_of(last))}"
    if section in SECTIONS:
        return f"{key}: {section} has no such key, it knows {', '.join(SECTIONS[section].__dataclass_fields__)}"
    known = f"{section} has no such key" if section else f"no such key or group{closest(key, [*GROUPS, *ROOT_KEYS])}"
    return f"{key}: {known}; `{program()} --cfg job` shows them all"


def ambiguous(match: re.Match[str]) -> str:
    """A list of values without -m."""
    key, _, value = match[1].partition("=")
    return f"{key}={value}: has several values; add -m to sweep over them, or quote it for Hydra: {quoted(key, value)}"


def unreadable(override: str | None) -> str:
    """A word that Hydra's grammar doesn't know."""
    key, equals, value = (override or "").partition("=")
    if not (key and equals):
        return f"{override}: must be key=value, such as precision=bf16"
    if QUOTED_KEY.search(value):
        bare = shlex.quote(f"{key}={QUOTED_KEY.sub(UNQUOTED, value)}")
        return f"{override}: Hydra reads keys of a dictionary without quotes: {bare}"
    return f"{override}: Hydra can't read this value; quote it: {quoted(key, value)}"


def quoted(key: str, value: str) -> str:
    """An override as it must be typed in a shell, its value quoted for Hydra too."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return shlex.quote(f"{key}={hydra_quoted(value[1:-1] if is_quoted else value)}")


def closest(word: str, choices: Iterable[str]) -> str:
    """A guess at what was meant."""
    matches = difflib.get_close_matches(word, list(choices), n=2)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def unfit(match: re.Match[str]) -> str:
    """A key of Hydra's own that can't have the value."""
    return f"{match[1]}: Hydra has no such value for it; `{program()} --cfg hydra` shows what it has"


def chosen_twice(match: re.Match[str]) -> str:
    """A group of which two options were typed."""
    return f"{match[1]}: the group has one option; type {match[1]}=… once, without +"


def unknown_in_list(match: re.Match[str]) -> str:
    """A list of options of a group, one of which isn't there."""
    group, _, option = match[1].partition("/")
    options = options_of(group)
    return f"{group}=[{option}]: must be a list of some of {', '.join(options)}{closest(option, options)}"


PATTERNS = {
    r"Could not load '([^']+)'": unknown_in_list,
    r"Could not find '([^']+)'": unknown_option,
    r"Could not override '([^']+)'": unknown_key,
    r"Could not delete from config\. '([^']+)'": unknown_key,
    r"Multiple values for (\w+)\.": chosen_twice,
    r"Error merging override ([^\n]+)": unfit,
    r"force-add of config groups is not supported: '\+\+(\w+)": chosen_twice,
    r"Ambiguous value for argument '([^\n]+)'\n": ambiguous,
}
