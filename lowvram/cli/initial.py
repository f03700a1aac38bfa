"""model.init=FOLDER, prune.run=FOLDER, grow.run=FOLDER: adds the folder's settings as overrides; typed overrides win.
Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from lowvram.config.code_names import code_in
from lowvram.config.errors import BadInput, require
from lowvram.config.registry import node_of, options_of
from lowvram.config.secret import REFUSED
from lowvram.config.transforms import TRANSFORMS
from lowvram.config.words import key
from lowvram.results import row as rows
from lowvram.results.files import manifest
from lowvram.results.files.other_format import check_safetensors
from lowvram.results.files.plausible import check_counts, check_files
from lowvram.results.files.regular import LONG_BYTES, read_regular
from lowvram.results.row import Row
from lowvram.results.terminal import hydra_quoted, shown_path
from lowvram.runs.hydra_notes import own_notes_in
from lowvram.runs.own_runs import check_code, is_trusted

EXPORTED, CONFIG, APART = "model", "config.json", "lowvram.json"  # in a run's folder, and files in it
OF_THE_DATA = ("task", "data", "loader", "accum")  # groups of a run's configuration that its next model needs, too
OF_ONE_CALL = (
    "mode",
    "resume",
    "name",
    "sweep",
    "debug",
    "optimized_metric",
    "jobs",
    "launcher",
    "callbacks",
    "trust",
)  # what isn't passed on
SECTIONS_OF_ONE_CALL = (*TRANSFORMS, "model", "launcher", "hydra")
# With other values of these the same tensors would be another model, or some of them would be left out.
FIXED = ("num_layers", "num_distinct_layers", "num_heads", "num_kv_heads", "head_width", "layers", "block")

OF_USE = ("head", "dropout", "blocks")  # of a model of transformers: what its own configuration doesn't say


def with_initial(words: list[str]) -> list[str]:
    """The words; before them those for the sizes of the model in the folder `model.init`, so that it is this model that
    trains on. The folder becomes an absolute path: a run may be resumed from elsewhere.

    Raises:
        BadInput: the folder holds no model that lowvram could start from.
        HydraException: a word that can't be read.
    """
    folder = typed_folder(words, "model.init")
    if folder is None:
        return words
    exported = checked(exported_in(folder, "model.init"), "model.init")
    others = [word for word in words if key(word) != "model.init"]
    if is_of_transformers(described_in(exported)):
        return [*words_of_transformers(exported, "model.init", words), *others]
    return [*sizes_in(exported, "model.init", words), *others, word_for("model.init", str(folder.absolute()))]


def with_transformed(words: list[str]) -> list[str]:
    """With mode=prune the words; before them those for the model of the folder `prune.run`, and for the data on which
    it was trained. With mode=grow the same, of `grow.run`.

    Raises:
        BadInput, HydraException: as `with_initial`.
    """
    name, folder = transformed_in(words)
    if folder is None:
        return words
    model = checked(exported_in(folder, name), name)
    of_model = words_of_transformers if is_of_transformers(described_in(model)) else sizes_in
    of_model(model, name, words)  # is checked before all else
    row = rows.read(model.parent)
    data = {} if row is None else data_of(row, words, f"{name}={folder}")
    values = untyped({"model.init": str(model), **data}, words)
    check_code(code_in(values), model.parent, name, own_notes_in(model.parent)[1], trusted_in(words))
    return [*values, *words]


def trusted_in(words: Sequence[str]) -> str | None:
    """The folder that was typed for `trust`."""
    folder = typed_folder(words, "trust")
    return None if folder is None else str(folder)


def transformed_in(words: Sequence[str]) -> tuple[str, Path | None]:
    """The folder from whose model another one is made, after the key under which it was typed; None: no such mode was
    typed, or no folder."""
    name = next((f"{mode}.run" for mode in TRANSFORMS if f"mode={mode}" in words), "")
    return name, typed_folder(words, name) if name else None


def words_to_train_on(folder: Path, words: Sequence[str]) -> list[str]:
    """The words with which the new model of a run's folder trains on, as the model did that it was made from.

    Args:
        words: what was typed to make it.
    """
    name, source = transformed_in(words)
    run = folder if source is None else exported_in(source, name).parent
    before, own = own_notes_in(run) if source is not None else ([], None)
    if own is None and code_in(before) and not is_trusted(run, trusted_in(words)):
        before = []  # nobody copies a command with code of others unawares
    typed = {key(word) for word in words}
    passed_on = [word for word in [*(word for word in before if key(word) not in typed), *words] if is_passed_on(word)]
    return [*passed_on, word_for("model.init", shown_path(folder / EXPORTED))]


def is_passed_on(word: str) -> bool:
    section, dot, _ = key(word).partition(".")
    is_of_one_call = section in SECTIONS_OF_ONE_CALL if dot else section in OF_ONE_CALL
    return not (is_of_one_call or word.startswith("-"))


def exported_in(folder: Path, name: str) -> Path:
    """The exported model in a run's folder, or the folder itself if it is one.

    Args:
        name: the key under which the folder was typed.

    Raises:
        BadInput: it is neither.
    """
    places = (folder / EXPORTED, folder)
    found = next((place for place in places if (place / CONFIG).is_file()), None)
    if found is None:
        is_apart = any((place / APART).is_file() for place in places)
        what = "it holds an adapter alone: train with export.merge=true" if is_apart else "it holds no trained model"
        raise BadInput(name, str(folder), f"the folder of a finished run, or of an exported model: {what}")
    return found


def checked(exported: Path, name: str) -> Path:
    """The same folder.

    Raises:
        BadInput: it holds pipes or the like, sizes that its weights can't have, or references, which could be to the
            environment.
    """
    check_files(exported, name)
    described = described_in(exported)
    check_counts(described if isinstance(described, dict) else {}, exported, name)
    is_plain = not is_export(described) or "${" not in json.dumps(described)
    require(is_plain, name, str(exported), f"an exported model: {CONFIG} there holds references, which no export has")
    return exported


def described_in(folder: Path) -> Any:
    """What an exported model's file says about it; None if it can't be read."""
    with suppress(OSError, ValueError, RecursionError):
        return json.loads(read_regular(folder / CONFIG, LONG_BYTES))
    return None


def is_of_transformers(described: Any) -> bool:
    """Whether it is the configuration of a model in the layout of Hugging Face's transformers."""
    return isinstance(described, dict) and "model_type" in described and "data" not in described


def words_of_transformers(folder: Path, name: str, words: Sequence[str]) -> list[str]:
    """The words for a model of transformers in a folder. If it is that of a run, they also say how the run has used it,
    but for what was typed.

    Raises:
        BadInput: another model was typed, the folder has no weights, is damaged, or in another format than safetensors.
    """
    typed = {key(word): word.partition("=")[2] for word in words}
    origin = f"left out with {name}={folder}"
    require(typed.get("model", "hf") == "hf", "model", typed.get("model"), f"hf, or {origin}")
    require("model.name" not in typed, "model.name", typed.get("model.name"), f"{origin}, which names the model")
    weights = typed.get("model.weights", "auto")
    require(weights != "random", "model.weights", weights, f"auto, or {origin}, which has the weights")
    if (folder / manifest.NAME).is_file():  # others' folders have none
        manifest.check(folder)
    check_safetensors(folder, name, str(folder))
    has_weights = any(folder.glob("*.safetensors"))
    require(has_weights, name, str(folder), "the folder of a trained model: it has no *.safetensors")
    row = rows.read(folder.parent)
    used = row["config"]["model"] if row is not None and row["choices"].get("model") == "hf" else {}
    of_run = {f"model.{field}": used[field] for field in OF_USE if field in used}
    return untyped({"model": "hf", "model.name": str(folder.absolute()), **of_run}, words)


def sizes_in(folder: Path, name: str, words: Sequence[str]) -> list[str]:
    """The words for the configuration of an exported model, but for those that were typed.

    Raises:
        BadInput: it holds no model of lowvram's, is damaged, or in a format other than safetensors.
    """
    described = described_in(folder)
    target = described["model"].get("_target_") if is_export(described) else None
    nodes = {option: node_of("model", option) for option in options_of("model")}
    options = [option for option, node in nodes.items() if node["_target_"] == target and "init" in node]
    allowed = "the folder of a trained model of lowvram's own (transformer, resnet) or of Hugging Face's transformers"
    require(bool(options), name, str(folder), f"{allowed}, such as a run's model: its {CONFIG} is neither's")
    manifest.check(folder)
    check_safetensors(folder, name, str(folder))
    row = rows.read(folder.parent)
    known = [str(target).split(".")[-2], row and row["choices"].get("model")]  # of equal ones the run's own
    option = max(options, key=lambda option: known.index(option) if option in known else -1)
    check_typed(described["model"], words, f"{name}={folder}")
    fields = {f"model.{field}": described["model"].get(field) for field in nodes[option]}
    return untyped({"model": option, **{field: value for field, value in fields.items() if is_size(field)}}, words)


def check_typed(sizes: Mapping[str, Any], words: Sequence[str], origin: str) -> None:
    """Raises BadInput if other sizes were typed than those of the model in the folder."""
    typed = [word for word in words if key(word).removeprefix("model.") in FIXED]
    for override in OverridesParser.create().parse_overrides(typed):
        field, value = override.key_or_group.removeprefix("model."), override.value()
        wanted = sizes.get(field)
        require(value == wanted, f"model.{field}", value, f"{as_hydra(wanted)}, or left out, with {origin}")


def is_export(described: Any) -> bool:
    return isinstance(described, dict) and isinstance(described.get("model"), dict) and "data" in described


def is_size(field: str) -> bool:
    return field not in ("model._target_", "model.init")


def data_of(row: Row, words: Sequence[str], origin: str) -> dict[str, Any]:
    """The values of a run that say which data it was trained on, by their keys; without groups whose option was typed.

    Raises:
        BadInput: one of them was a secret, which wasn't saved.
    """
    typed, config = {key(word) for word in words}, row["config"]
    values: dict[str, Any] = {"seed": config["seed"], "train.batch_size": config["train"]["batch_size"]}
    for group in (group for group in OF_THE_DATA if group not in typed):
        fields = {name: value for name, value in config[group].items() if name != "_target_"}
        values |= {group: row["choices"][group], **{f"{group}.{name}": value for name, value in fields.items()}}
    for name, value in values.items():
        allowed = f"typed again beside {origin}: it held a secret, which is kept nowhere"
        require(name in typed or REFUSED not in str(value), name, REFUSED, allowed)
    return values


def typed_folder(words: Sequence[str], name: str) -> Path | None:
    """What was typed for a key whose value is a folder; None for null, and if it was not.

    Raises:
        BadInput: several were typed, as in a sweep: the other words couldn't follow them.
    """
    typed = [word for word in words if word.partition("=")[0] == name]
    if not typed:
        return None
    (override,) = OverridesParser.create().parse_overrides(typed[-1:])
    require(not override.is_sweep_override(), name, typed[-1].partition("=")[2], "one folder: type a command for each")
    return None if override.value() is None else Path(str(override.value())).expanduser()


def untyped(values: Mapping[str, Any], words: Sequence[str]) -> list[str]:
    """Words for those of the values, by key, whose keys weren't typed."""
    typed = {key(word) for word in words}
    return [word_for(name, value) for name, value in values.items() if name not in typed]


def word_for(name: str, value: Any) -> str:
    return f"{name}={as_hydra(value)}"


def as_hydra(value: Any) -> str:
    """A plain value as Hydra's command line reads it."""
    match value:
        case str():
            return (
                value
                if value.isidentifier() and value not in ("null", "true", "false", "nan", "inf")
                else hydra_quoted(value)
            )
        case Mapping():
            return f"{{{','.join(f'{name}:{as_hydra(each)}' for name, each in value.items())}}}"
        case list():
            return f"[{','.join(map(as_hydra, value))}]"
    return json.dumps(value)  # null, true, numbers
