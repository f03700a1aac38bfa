"""Mistakes on the command line: each is one sentence that names the key and what is allowed, and leaves no folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.calls import TINY, TINY_RESNET, Outcome
from tests.refusals import refusal
from tests.tiers import first_of

Call = Callable[..., Outcome]
# Words -> what the sentence says, in this order.
MISTAKES = {
    # options
    "precision=bf61": [
        "precision=bf61: must be one of bf16, bf16_pure, bf16_split, fp16, fp32, fp8, tf32",
        "did you mean bf16",
    ],
    "experiment=nope": ["experiment=nope: must be one of", "transformer_bytes"],
    "precision=": ["precision=: must be one of"],
    "precision=null": ["precision=null: must be an option of the group precision"],
    "debug=null": ["debug=null: must be an option of the group debug; without the word it keeps its default"],
    "+precision=bf16": ["precision: the group has one option", "without +"],
    "ckpt=[every1,every2]": ["ckpt", "one option of the group ckpt, not a list"],
    "precision=bf16,fp16": ["precision=bf16,fp16: has several values; add -m"],
    # keys and groups
    "model.dropot=0.1": ["model.dropot: model has no such key", "--cfg job"],
    "+model.dropot=0.1": ["model.dropot=0.1", "model knows init, num_layers", "dropout"],
    "train.stepss=1": ["train.stepss: train has no such key, it knows batch_size, steps"],
    "ckpt.every=2": ["ckpt.every: ckpt has no such key"],
    "modle=resnet": ["modle: no such key or group", "did you mean", "model"],
    "+modle=resnet": ["modle='resnet'", "the root knows seed"],
    "~precision": ["precision='~'", "can't be removed; leave it at its default"],
    "~seed": ["seed='~'", "can't be removed; leave it at its default"],
    "~paths": ["paths"],
    "+logger.foo=1": ["logger.foo=1", "logger knows wandb, tensorboard, entity, project, group, tags, notes, artifact"],
    # types
    "train.steps=abc": ["train.steps='abc': must be a whole number"],
    "model.num_layers=true": ["model.num_layers=true: must be a whole number"],
    "train=5": ["train=5: must be"],
    "paths.outputs=null": ["paths.outputs=null: must be text"],
    "logger.tags=thesis": ["logger.tags='thesis': must be a list of texts"],
    "logger.tags=['']": ["logger.tags='': must be a list of texts of 1 to 64 characters, such as [thesis,first]"],
    "logger.artifact=weights": ["logger.artifact='weights': must be null or model, which uploads the run's model/"],
    # the string None, what is missing, what is no number
    "model.dropout=None": ["model.dropout='None': must be null"],
    "~train.steps": ["train.steps", "must be given a value"],
    "data=text": ["data.path='???': must be given a value: text"],
    "seed=???": ["seed='???': must be given a value: a whole number"],
    "timeout_s=???": ["timeout_s='???': must be given a value: a number or null"],
    "train=???": ["train='???': must be one option"],
    "optimizer.lr=nan": ["optimizer.lr=nan: must be"],
    "timeout_s=nan": ["timeout_s=nan: must be"],
    "timeout_s=inf": ["timeout_s=inf: must be a number or null, not infinity"],
    # ranges
    "ckpt=every1 ckpt.every=0": ["ckpt.every=0: must be at least 1"],
    "model.num_heads=5": ["model.num_heads=5: must be", "model.width=32"],
    "train.batch_size=3 accum=x4": ["train.batch_size=3: must be at least accum.parts=4, a sample for each part"],
    "vram=8": ["vram='8': must be", "8GiB"],
    # the device
    "device=tpu": ["device='tpu': must be auto, cpu, cuda or cuda:N"],
    # code
    "precision._target_=os.system": ["precision._target_='os.system': must be a class inside lowvram"],
    "mode._target_=lowvram.config.schema.build": ["mode._target_='lowvram.config.schema.build': must be"],
    # names and paths
    "name=../../x": ["name='../../x': must be", "it names a folder"],
    f"name={'x' * 300}": ["name='xxx", "1 to 100 letters"],
    "data=text data.path=~/texts": [
        "data.path=~/texts: Hydra can't read this value; quote it: 'data.path=\"~/texts\"'"
    ],
    'optimizer.groups={"*.bias":{lr:1}}': [
        'optimizer.groups={"*.bias":{lr:1}}: Hydra reads keys of a dictionary without quotes:'
        " 'optimizer.groups={*.bias:{lr:1}}'"
    ],
    "optimizer.groups=abc": ["optimizer.groups='abc': must be a dictionary, written as {key: value} or null"],
    "data=text data.path=/a=b": ["data.path=/a=b: Hydra can't read this value; quote it: 'data.path=\"/a=b\"'"],
    "data=text data.path=/a,b": ["data.path=/a,b: has several values", "quote it for Hydra: 'data.path=\"/a,b\"'"],
    "data=text data.path=": ["data.path='': must be a file or folder"],
    "data=text data.path=/nope": ["data.path='/nope': must be an existing file or folder"],
    # words that are no overrides
    "bf16": ["bf16: must be key=value"],
    "=5": ["=5: must be key=value"],
    "--precision=bf16": ["--precision=bf16: no such flag; type precision=bf16, without dashes"],
    "--lr 0.1": ["--lr: no such flag; the learning rate is optimizer.lr"],
    "--cfg=nope": ["--cfg", "nope"],
    "-m seed=1,2 --cfg job": ["--multirun --cfg: must be typed one without the other", "one value for each key"],
    "--run --info all": ["--run --info: must be typed one without the other"],
    "--resolve": ["--resolve: must be typed with --cfg"],
    # interpolations
    "seed=${nope}": ["nope", "not found"],
    "seed=${oc.env:LOWVRAM_NOPE}": ["seed", "LOWVRAM_NOPE", "not found"],
    # Hydra's own settings
    "hydra/launcher=nope": ["hydra/launcher=nope: must be one of basic"],
    "hydra.callbacks=null": ["hydra.callbacks=null: Hydra has no such value for it"],
    # words of other tools (test_mistakes.py has them all)
    "lr=0.1": ["lr: no such key; the learning rate is optimizer.lr"],
    "+lr=0.1": ["lr: no such key; the learning rate is optimizer.lr"],
    "bf16=true": ["bf16: no such key; choose precision=bf16"],
    "gradient_checkpointing=true": ["gradient_checkpointing: no such key; choose ckpt=every1"],
    "ckpt=outputs/run": ["ckpt=outputs/run", "resume=last or resume=FOLDER"],
}
# Mistakes of which a part of the program tells that no function here stands for, and one of each other kind.
TYPED = {
    "precision=bf61": MISTAKES["precision=bf61"],
    "model.dropot=0.1": MISTAKES["model.dropot=0.1"],
    "train.steps=abc": MISTAKES["train.steps=abc"],
    "ckpt=every1 ckpt.every=0": MISTAKES["ckpt=every1 ckpt.every=0"],
    "seed=${nope}": MISTAKES["seed=${nope}"],
    "--lr 0.1": MISTAKES["--lr 0.1"],
    "-m seed=1,2 --cfg job": MISTAKES["-m seed=1,2 --cfg job"],
    "data=imagefolder": ["data.sequence_length: data has no such key; `", "train.py --cfg job` shows them all"],
    "precision=tf32 device=cpu": ["precision=tf32 needs", "it is the CPU here", "precision=fp32"],
    "paths.outputs=/dev/null/x": ["/dev/null/x", "can't be written (Not a directory)"],
    f"paths.outputs={'x' * 300}": ["xxx", "can't be written (File name too long)"],
    "-m seed=0,1 hydra.launcher._target_=x": ["hydra.launcher._target_='x': must be one of hydra._internal.core_pl"],
    "-m seed=0,1 hydra.launcher._target_=os.getcwd": ["hydra.launcher._target_='os.getcwd': must be one of hydra"],
    "-m seed=0,1 hydra.sweeper._target_=x": ["hydra.sweeper._target_='x': must be one of", "PointSweeper"],
    "-m seed=0,1 hydra.sweeper.max_batch_size=x": ["hydra.sweeper.max_batch_size='x': must be null or a whole number"],
    "hydra.job.chdir=true": ["hydra.job.chdir=true: must be false: your modules, data and models are looked for where"],
    "-m seed=0,1 hydra.sweeper.max_batch_size=0": ["hydra.sweeper.max_batch_size=0: must be null or a whole number"],
    "-m seed=0,1 hydra.sweeper.params=5": ["hydra.sweeper.params=5: must be null or keys with their values"],
    "-m seed=0,1 hydra.sweeper.points=5": ["hydra.sweeper.points=5: must be names, each with the words"],
    "-m seed=0,1 hydra.sweep.dir=null": ["hydra.sweep.dir=null: Hydra has no such value for it", "--cfg hydra"],
    "-m seed=0,1 hydra.sweep.subdir=one": ["hydra.sweep.subdir='one': must be a folder for each point"],
    "resume=last": ["resume='last': must be", "no unfinished run below outputs has a snapshot"],
}


def assert_says(sentence: str, *parts: str) -> None:
    """The parts come in this order."""
    rest = sentence
    for part in parts:
        assert part in rest, sentence
        rest = rest.partition(part)[2]


def assert_refused(outcome: Outcome, *parts: str) -> None:
    """One sentence, exit code 3, no folder."""
    assert_says(outcome.sentence, *parts)
    assert list(outcome.cwd.iterdir()) == [], outcome.said()


@pytest.mark.medium
@pytest.mark.parametrize("half", [0, 1])
def test_a_mistake_is_one_sentence(half: int, subtests: pytest.Subtests) -> None:
    for words, parts in [*MISTAKES.items()][half::2]:
        with subtests.test(words[:60]):
            said = refusal(*TINY, *words.split(" "))
            assert "\n" not in said
            assert_says(said, *parts)


def test_a_mistake_is_told_and_leaves_nothing(call: Call, subtests: pytest.Subtests) -> None:
    for words, parts in TYPED.items():
        with subtests.test(words[:60]):
            assert_refused(call(*TINY, *words.split(" ")), *parts)


# The same in sweeps, where one wrong point stops all, before the first.
SWEPT_MISTAKES = {
    "ckpt=every1 ckpt.every=1,0": ["ckpt.every=0: must be at least 1"],
    "train.steps=1,abc": ["train.steps='abc': must be a whole number"],
    "seed=1,${nope}": ["nope", "not found"],
    "seed=range(": ["seed=range(: Hydra can't read this value"],
    "seed=1,2 eval.metrics=[tests.yours.nowhere]": ["eval.metrics='tests.yours.nowhere': must be the dotted name"],
    "precision=fp32,nope": ["precision=nope: must be one of"],
    "seed=1,2 ~precision": ["precision='~'", "can't be removed; leave it at its default"],
    "seed=1,2 name=../../x": ["name='../../x': must be"],
    "seed=1,???": ["seed='???': must be given a value"],
    "seed=1,2 resume=last": ["resume='last': must be typed without -m"],
    "seed=1,2 callbacks=[tests.yours.Nobody]": ["callbacks='tests.yours.Nobody': must be the dotted name"],
}


@pytest.mark.parametrize(("words", "parts"), first_of(list(SWEPT_MISTAKES.items()), 5))
def test_a_mistake_in_one_point_stops_a_sweep_before_the_first(call: Call, words: str, parts: list[str]) -> None:
    assert_refused(call("-m", *TINY, *words.split(" ")), *parts)


def test_a_refused_sweep_leaves_what_was_there(call: Call, tmp_path: Path) -> None:
    """An earlier sweep in the same folder stays whole."""
    words = ("-m", *TINY, f"hydra.sweep.dir={tmp_path}/sweep")
    assert call(*words, "seed=1").code == 0
    before = {file: file.read_bytes() for file in tmp_path.glob("sweep/*/result.json")}
    assert "bf61" in call(*words, "precision=bf61").sentence
    assert {file: file.read_bytes() for file in tmp_path.glob("sweep/*/result.json")} == before != {}


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="has a CUDA device")
def test_cuda_where_there_is_none(call: Call) -> None:
    assert_refused(call(*TINY, "device=cuda"), "device='cuda': must be usable", "device=cpu")


def test_a_model_of_images_on_text(call: Call, tmp_path: Path) -> None:
    words = [word for word in TINY_RESNET if not word.startswith("data")]
    outcome = call(*words, "data=text", "data.path=/etc/hostname")
    assert_refused(outcome, "data='text': must be a source of images", "imagefolder")


# What is wrong with the data -> what makes it so, the sentence.
BROKEN_TEXTS = {
    "empty": (lambda path: path.write_text(""), ["must be longer", "0 bytes in all"]),
    "undecodable": (lambda path: path.write_bytes(b"caf\xe9 " * 100), ["must be text in UTF-8", "a.txt is not"]),
    "unreadable": (lambda path: path.symlink_to(path), ["must be readable", "a.txt can't be read"]),
}


@pytest.mark.parametrize("fault", first_of(list(BROKEN_TEXTS)))
@pytest.mark.slow
def test_text_that_cannot_be_used(call: Call, tmp_path_factory: pytest.TempPathFactory, fault: str) -> None:
    path = tmp_path_factory.mktemp("data") / "a.txt"
    break_it, parts = BROKEN_TEXTS[fault]
    break_it(path)
    words = [word for word in TINY if not word.startswith("data")]
    assert_refused(call(*words, "data=text", f"data.path={path.parent}"), f"data.path='{path.parent}'", *parts)


@pytest.fixture
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of four images each."""
    folder = tmp_path_factory.mktemp("images")
    for label in ("red", "blue"):
        (folder / label).mkdir()
        for index in range(4):
            Image.new("RGB", (32, 32), label).save(folder / label / f"{index}.png")
    return folder


def image_words(folder: Path) -> list[str]:
    words = [word for word in TINY_RESNET if not word.startswith("data") or "eval_samples" in word]
    return [*words, "data=imagefolder", "data.image_size=16", f"data.path={folder}"]


@pytest.mark.slow  # tests/data/test_imagefolder.py asks without processes
def test_an_image_that_is_none_is_found_before_the_first_tensor(call: Call, images: Path) -> None:
    (images / "red" / "broken.png").write_text("I am not an image")
    assert_refused(call(*image_words(images)), "data.path", "broken.png", "can't be read")


@pytest.mark.slow
def test_an_image_that_fails_when_it_is_decoded_ends_the_point_by_its_name(call: Call, images: Path) -> None:
    bent = bytearray((images / "red" / "0.png").read_bytes())
    bent[len(bent) // 2] ^= 255
    for index in range(4):  # so that one of them is met
        (images / "red" / f"{index}.png").write_bytes(bent)
    outcome = call(*image_words(images))
    assert outcome.code == 1, outcome.said()
    assert outcome.row["status"] == "error"
    assert f"{images}/red/" in outcome.row["reason"]
    assert "can't be decoded" in outcome.row["reason"]


@pytest.mark.parametrize("name", first_of(["a=b,~", "it's (a)", 'say "x"']))
@pytest.mark.slow
def test_any_path_works_when_it_is_quoted(call: Call, tmp_path: Path, name: str) -> None:
    """As the sentence about it says."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "text.txt").write_text("to be or not to be " * 100)
    words = [word for word in TINY if not word.startswith("data")] + ["data=text", "data.sequence_length=16"]
    outcome = call(*words, f"data.path={folder}")
    if outcome.code:
        (advised,) = shlex.split(outcome.sentence.partition(": ")[2].partition(": ")[2])
        outcome = call(*words, advised)
    assert outcome.code == 0, outcome.said()
    assert outcome.row["config"]["data"]["path"] == str(folder)


@pytest.mark.slow
def test_a_refused_run_of_a_user(train: Call) -> None:
    """Through the real program: one that Hydra refuses, one that the process of the points refuses."""
    assert_refused(train(*TINY, "precision=bf61"), "precision=bf61: must be one of")
    assert_refused(train(*TINY, "-m", "seed=1,2", "ckpt=every1", "ckpt.every=1,0"), "ckpt.every=0")


def test_whoever_asks_for_it_gets_the_traceback(train: Call) -> None:
    outcome = train("precision=bf61", env={"HYDRA_FULL_ERROR": "1"})
    assert outcome.code == 1
    assert "Traceback" in outcome.err
