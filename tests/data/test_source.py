from __future__ import annotations

import pytest

from lowvram.config.errors import BadInput
from lowvram.config.registry import node_of, options_of
from lowvram.config.schema import find_target
from lowvram.data.auto import Auto
from lowvram.data.glyphs import Glyphs
from lowvram.data.imagefolder import ImageFolder
from lowvram.data.python_source import PythonSource
from lowvram.data.source import (
    ResolvedTextSource,
    Source,
    fitting_options,
    require_count,
    resolve_source,
    resolved_size,
)
from lowvram.data.spec import Modality, TextRules
from lowvram.data.synthetic import ResolvedSynthetic, Synthetic
from lowvram.data.text import Text


def held_by(source: Source) -> tuple[Modality, ...]:
    return (source.spec.modality,) if isinstance(source, ResolvedSynthetic) else source.modalities


@pytest.mark.parametrize("source", [Auto(), Synthetic(), PythonSource()])
def test_sources_of_tokens_fit_a_model_of_tokens(source: Source, token_model) -> None:
    assert held_by(resolve_source(source, token_model())) == (Modality.TOKENS,)


@pytest.mark.parametrize("source", [Auto(), Synthetic(), ImageFolder("nowhere"), Glyphs()])
def test_sources_of_images_fit_a_model_of_images(source: Source, image_model) -> None:
    assert held_by(resolve_source(source, image_model())) == (Modality.IMAGES,)


def test_a_mismatch_names_the_options_that_fit_and_opens_nothing(token_model, image_model) -> None:
    with pytest.raises(BadInput, match=r"^data='text': must be a source of images, .*auto, glyphs, imagefolder"):
        resolve_source(Text("nowhere"), image_model())
    with pytest.raises(BadInput, match=r"^data='imagefolder': must be a source of tokens, .*python_source, .* or text"):
        resolve_source(ImageFolder("nowhere"), token_model())


@pytest.mark.parametrize("kind", Modality)
def test_every_option_that_fits_is_named_and_no_other(kind: Modality) -> None:
    named = [option.partition(" ")[0] for option in fitting_options(kind).replace(" or ", ", ").split(", ")]
    held = {option: find_target("data", node_of("data", option)["_target_"]) for option in options_of("data")}
    assert sorted(named) == [option for option, source in held.items() if kind in vars(source)["modalities"]]


def test_a_chosen_length_is_kept_and_another_is_the_models(token_model) -> None:
    model, rules = token_model(), TextRules()
    assert resolve_source(PythonSource(sequence_length=7), model) == PythonSource(sequence_length=7)
    assert resolve_source(Text("x", sequence_length=7), model) == ResolvedTextSource(
        Text("x", sequence_length=7), rules
    )
    assert resolve_source(Text("x"), model) == ResolvedTextSource(Text("x", sequence_length=32), rules)


def test_opened_without_a_model_a_source_says_what_it_lacks() -> None:
    with pytest.raises(BadInput, match=r"data\.sequence_length=null"):
        PythonSource().open(seed=0)
    with pytest.raises(BadInput, match=r"data\.image_size=null"):
        Glyphs().open(seed=0)


def test_counts() -> None:
    require_count("data.x", None)
    require_count("data.x", 1)
    assert resolved_size("data.x", 3) == 3
    with pytest.raises(BadInput, match=r"data\.x=0: must be null or at least 1"):
        require_count("data.x", 0)
