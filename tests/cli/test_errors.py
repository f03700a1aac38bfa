"""Sentences about mistakes, without a process."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from lowvram.cli.errors import quoted, sentence, sorted_words, unknown_flag
from lowvram.cli.hints import ELSEWHERE, OPTIONS
from lowvram.cli.resume import with_resumed
from lowvram.config.compose import chosen
from lowvram.config.errors import BadInput, Refused
from lowvram.config.registry import options_of
from lowvram.config.settings import GROUPS, PARENT_ONLY, ROOT_KEYS, SECTIONS, check_root
from lowvram.config.words import typed_value
from tests.calls import Outcome


@pytest.mark.parametrize("word", ELSEWHERE)
def test_words_of_other_tools_are_reported_where_to_look(word: str) -> None:
    """Typed as a key, forced in with +, in a section, as a flag."""
    unknown = f"Could not override '{word}'.\nTo append to your config use +{word}=1"
    assert sentence(HydraException(unknown)) == f"{word}: no such key; {ELSEWHERE[word]}"
    if "." in word:
        return
    assert (
        sentence(HydraException(unknown.replace("'", "'trainer.", 1)))
        == f"trainer.{word}: no such key; {ELSEWHERE[word]}"
    )
    assert sentence(BadInput(word, 1, "removed")) == f"{word}: no such key; {ELSEWHERE[word]}"
    assert unknown_flag(f"--{word.replace('_', '-')}=1").endswith(f"no such flag; {ELSEWHERE[word]}")


# An option that isn't there -> what to type.
TYPED = {
    "ckpt=every5": "type ckpt=every1 ckpt.every=5",
    "ckpt=runs/best": "saved training state is a snapshot",
    "accum=x3": "type accum=x2 accum.parts=3",
    "data=csv": "type data=hub data.name=FILE.csv",
    "data=my/texts": "data=text data.path=my/texts",
    "model=openai/gpt": "type model=hf model.name=openai/gpt",
    "hydra/sweeper=ax": "type hydra/sweeper=optuna",
    "hydra/launcher=ray": "type launcher=ray, which is lowvram's, or pip install hydra-ray-launcher",
    "hydra/launcher=joblib": "it isn't installed here: pip install 'lowvram[launchers]'",
    "hydra/launcher=nope": "must be one of basic",
    "precision=bf61": "did you mean bf16?",
}


@pytest.mark.parametrize("word", TYPED)
def test_an_option_that_is_not_there_is_reported_with_what_to_type(word: str) -> None:
    group, _, option = word.partition("=")
    missing = f"In 'config': Could not find '{group}/{option}'\n\nAvailable options in '{group}':\n\tbasic\n\tbf16\n"
    said = sentence(HydraException(f"{missing}Config search path:\n\tx"))
    assert said.startswith(f"{word}: ")
    assert TYPED[word] in said


def test_what_is_typed_instead_of_an_option_exists() -> None:
    for hint in OPTIONS.values():
        for group, option in re.findall(r"\b(\w+)=(\w+)", hint):
            assert group not in GROUPS or option in options_of(group)


def test_a_group_below_another_word_is_named() -> None:
    unknown = "Could not override 'trainer_args.precision'.\nTo append"
    assert sentence(HydraException(unknown)).startswith(
        "trainer_args.precision: no such key; choose precision=OPTION, "
    )


def test_the_hints_name_keys_that_exist() -> None:
    known = {
        *GROUPS,
        *ROOT_KEYS,
        *PARENT_ONLY,
        *(f"{key}.{name}" for key in SECTIONS for name in SECTIONS[key].__annotations__),
    }
    named = re.findall(r"\b([a-z_]+(?:\.[a-z_]+)?)(?==| |$|;|:)", " ".join(ELSEWHERE.values()))
    assert {name for name in named if "." in name and name.partition(".")[0] in SECTIONS} <= known
    assert {
        word.partition("=")[0] for hint in ELSEWHERE.values() for word in re.findall(r"(?<![.\w])[a-z]\w*=\w+", hint)
    } <= known
    assert not set(ELSEWHERE) & {*GROUPS, *ROOT_KEYS}


@pytest.mark.parametrize("words", ["a=1 -m b=1,2", "-m a=1 b=1,2", "a=1 b=1,2 --multirun", "a=1 --cfg job b=2"])
def test_flags_may_stand_anywhere(words: str) -> None:
    flags = [word for word in words.split() if "=" not in word]
    assert sorted_words(words.split()) == [*flags, *(word for word in words.split() if "=" in word)]


@pytest.mark.parametrize("word", ["=5", "precision=null", "mode=TRUE", "accum=4", "logger=0.5"])
def test_words_that_hydra_could_not_name(word: str) -> None:
    with pytest.raises(Refused, match=re.escape(word)):
        sorted_words(["seed=1", word])


@pytest.mark.parametrize("value", ["~/x", "/a=b", "/a,b", "it's", 'say "x"', "a\\", "{x}", " x ", "", "null", "5"])
def test_a_quoted_value_is_read_back_as_it_was(value: str) -> None:
    import shlex

    (word,) = shlex.split(quoted("data.path", value))
    assert OverridesParser.create().parse_overrides([word])[0].value() == value


def test_a_value_that_has_its_quotes_already_gets_no_second_ones() -> None:
    assert quoted("data.path", "'~/x'") == quoted("data.path", "~/x")


def test_a_run_is_resumed_without_m() -> None:
    with pytest.raises(BadInput, match="typed without -m"):
        with_resumed(["-m", "resume=last", "seed=1,2"], "last")


def test_nothing_typed_is_nothing_resumed() -> None:
    assert typed_value(["seed=1"], "resume") is None
    assert typed_value(["resume=null"], "resume") is None


def test_several_options_of_a_group() -> None:
    with pytest.raises(BadInput, match="one option of the group"):
        chosen(DictConfig(dict.fromkeys(GROUPS)))


def test_a_root_without_a_group_names_it() -> None:
    with pytest.raises(BadInput, match="can't be removed; leave it at its default"):
        check_root(DictConfig({}))


def test_an_unknown_option_in_a_list_is_named(call: Callable[..., Outcome]) -> None:
    said = call("logger=[wandb,tensorbord]").err
    options = ", ".join(options_of("logger"))
    assert said == f"logger=[tensorbord]: must be a list of some of {options}; did you mean tensorboard?\n"
