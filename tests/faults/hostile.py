"""Folders of a stranger's: forged models, runs and sweeps, whose checksums are right. Whoever reads them ends in time,
in a sentence or with a result, runs no code of theirs, prints no escapes, and touches nothing that they link to.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

from lowvram.results.files.sealed import opened, sealed
from tests.faults.lab import Lab, Trial
from tests.faults.scenarios import BY_NAME, RUN, SWEEP, TAUGHT
from tests.faults.telling import Draw, Told

MODEL = f"{RUN}/(model/|result.json)"
A_RUN = f"{RUN}/(snapshots/|.hydra/overrides|metrics|result|model/|.lowvram)"
POINTS = f"{SWEEP}/(.*/(result.json|metrics|memory_over|.lowvram|.hydra/overrides)|rows.jsonl)"
MAKING = ("data=synthetic", "logger=none", "train.steps=1", "hydra.run.dir=outputs/new")
READERS = {  # by name: the words, the scenario that makes what they read, and which files those are
    "load": (("@load", f"{RUN}/model"), "load", f"{RUN}/model/"),
    "resume": ((f"resume={RUN}", "train.steps=5"), "resume", A_RUN),
    "resume last": (("resume=last", "train.steps=5"), "resume", A_RUN),
    "init": ((*MAKING, f"model.init={RUN}"), "load", MODEL),
    "prune": ((*MAKING, "mode=prune", f"prune.run={RUN}"), "load", MODEL),
    "grow": ((*MAKING, "mode=grow", f"grow.run={RUN}"), "load", MODEL),
    "teacher": ((*MAKING, "task=distill", f"task.teacher={RUN}"), "load", MODEL),
    "cache": (BY_NAME["learn"].words, "learn", f"{TAUGHT}/(cache/|result|.lowvram)"),
    "table": (("@table", SWEEP), "table", POINTS),
    "report": (("@report", SWEEP), "table", POINTS),
    "sweep again": (BY_NAME["sweep again"].words, "sweep again", POINTS),
}
ELSEWHERE = 0.15  # of the forgeries are of files that the reader should have no use for
LONGEST_S = 45.0  # a forged folder may make nobody wait
# Of a terminal, and marks that turn the order of letters around. Newlines, tabs and carriage returns are ours.
RAW = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
OURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and the cursor, which lowvram itself writes
PROOF = "PWNED"
ESCAPES = (
    "\x1b]0;owned\x07",
    "\x9b31m",
    "\u202egnp.exe",
    "a\nb",
    "<img src=x onerror=alert(1)>",
    "{0}{x}",
    "=1+1",
    "%s%n",
)
DEEP = 100_000
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(['*' + before] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def trial(lab: Lab, draw: Draw) -> Told:
    random = draw.random
    name = random.choice([name for name in READERS if not draw.only or name in draw.only])
    words, made_by, reads = READERS[name]
    trial = lab.trial(BY_NAME[made_by], is_planted=random.random() < 0.3)
    if name == "resume last":  # only what isn't finished counts
        (trial.work / RUN / "result.json").unlink()
    trial.reads = re.compile(reads if random.random() > ELSEWHERE else "")
    about = None
    while about is None:  # a forgery of a file that isn't there
        about = random.choice(FORGERIES)(trial, random)
    told = Told(f"{name}: {about}")
    ended = lab.run(words, trial.work, acts=[(LONGEST_S, lambda programs: [each.kill() for each in programs])])
    told.about += f" -> {ended.code}: {ended.said.strip()[-200:]!r}"
    told.problems += ended.problems
    if ended.code is not None and ended.code < 0:
        told.problems.append(f"it ended by signal {-ended.code}, or still ran after {LONGEST_S} s: {ended.said[-500:]}")
    if ended.code and not ended.said.strip():
        told.problems.append(f"exit code {ended.code} without a word")
    if raw := RAW.search(OURS.sub("", ended.said).replace("\r", "")):
        around = ended.said[max(0, raw.start() - 80) : raw.start() + 80]
        told.problems.append(f"raw {raw[0]!r} is printed: {around!r}")
    told.problems += [f"code of the folder ran: {path}" for path in trial.folder.rglob(PROOF)]
    told.problems += trial.foreign.changed()
    return told


# A file of any kind


def files(trial: Trial) -> list[Path]:
    """Those that an earlier program has left, and a reader reads."""
    found = (path for path in sorted(trial.work.rglob("*")) if path.is_file() and not path.is_symlink())
    found = (path for path in found if path not in trial.foreign.paths)
    return [path for path in found if trial.reads.match(str(path.relative_to(trial.work)))]


def pick(trial: Trial, random: Random, pattern: str) -> Path | None:
    fitting = [path for path in files(trial) if re.search(pattern, str(path.relative_to(trial.work)))]
    return random.choice(fitting) if fitting else None


def link(trial: Trial, random: Random) -> str:
    """To a file of the user's, to nothing, to a device without end."""
    path = random.choice(files(trial))
    target = random.choice(
        (str(trial.folder / "elsewhere" / "precious.bin"), "nowhere", "/dev/zero", path.name, "/proc/self/mem")
    )
    path.unlink()
    path.symlink_to(target)
    return f"{path.relative_to(trial.work)} is a link to {target}"


def linked_folder(trial: Trial, random: Random) -> str | None:
    """A folder's name leads to one of the user's."""
    folders = [path for path in sorted(trial.work.rglob("*")) if path.name in ("snapshots", "model", ".hydra", "cache")]
    if not folders:
        return None
    folder = random.choice(folders)
    if folder.is_symlink() or any(path.is_relative_to(folder) for path in trial.foreign.paths):
        return None
    aside = trial.folder / "elsewhere" / folder.name
    folder.rename(aside)
    folder.symlink_to(aside)
    for path in aside.iterdir():
        trial.foreign.keep(path)
    return f"{folder.relative_to(trial.work)} is a link to a folder of the user's"


def fifo(trial: Trial, random: Random) -> str:
    path = random.choice(files(trial))
    path.unlink()
    os.mkfifo(path)
    return f"{path.relative_to(trial.work)} is a fifo"


def folder(trial: Trial, random: Random) -> str:
    path = random.choice(files(trial))
    path.unlink()
    path.mkdir()
    return f"{path.relative_to(trial.work)} is a folder"


# JSON whose checksum is right


def value(random: Random) -> Any:
    """What nobody expects."""
    return random.choice(
        (
            *ESCAPES,
            None,
            [],
            {},
            True,
            -1,
            1e308,
            10**400,
            "x" * 10**6,
            {"a": {"b": []}},
            [[]],
            float("nan"),
            "../../x",
            "/etc/passwd",
        )
    )


def places(found: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Of all values in JSON."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(found, dict | list):
        inner = list(found.items() if isinstance(found, dict) else enumerate(found))
    return [at, *(place for key, one in inner for place in places(one, (*at, key)))]


def changed(found: Any, random: Random) -> tuple[Any, str]:
    """One value becomes another, or one more key is there."""
    new = value(random)
    place: tuple[Any, ...] = random.choice(places(found)[1:] or [()])
    if not place:
        return new, f"all={str(new)[:40]!r}"
    holder: Any = found
    for key in place[:-1]:
        holder = holder[key]
    key = random.choice(ESCAPES) if isinstance(holder, dict) and random.random() < 0.3 else place[-1]
    holder[key] = new
    return found, f"{'.'.join(map(str, [*place[:-1], key]))!r}={str(new)[:40]!r}"


def row(trial: Trial, random: Random) -> str | None:
    path = pick(trial, random, r"result\.json$")
    if path is None:
        return None
    found = json.loads(opened(path.read_text()))
    if random.random() < 0.3:
        found["eval"] = {**(found.get("eval") or {}), random.choice(ESCAPES): 0.5}
        about = "an escape in the name of a score"
    else:
        found, about = changed(found, random)
    path.write_text(sealed(dumped(found), "\n "), errors="surrogatepass")
    return f"{path.relative_to(trial.work)}: {about}"


def dumped(found: Any) -> str:
    return json.dumps(found, indent=1, ensure_ascii=bool(len(str(found)) % 2))


def lines(trial: Trial, random: Random) -> str | None:
    path = pick(trial, random, r"metrics\.jsonl$")
    if path is None or not path.stat().st_size:  # that of a point without a step has no line
        return None
    found = [json.loads(line) for line in path.read_text().splitlines()]
    number = random.randrange(len(found))
    found[number].pop("crc32", None)
    found[number], about = changed(found[number], random)
    text = "".join(line_of(each) for each in found)
    path.write_text(text)
    return f"{path.relative_to(trial.work)}: line {number + 1}: {about}"


def line_of(values: Any) -> str:
    if isinstance(values, dict):
        values.pop("crc32", None)
    front = json.dumps(values).removesuffix("}")
    return f'{front}, "crc32": "{zlib.crc32(front.encode()):08x}"}}\n'


def deep(trial: Trial, random: Random) -> str | None:
    """Brackets in brackets, past any recursion."""
    path = pick(trial, random, r"\.(json|jsonl|yaml)$|\.lowvram$")
    if path is None:
        return None
    text = random.choice(("[" * DEEP, '{"a":' * DEEP, "[" * DEEP + "]" * DEEP))
    path.write_text(text)
    list_anew(path.parent)
    return f"{path.relative_to(trial.work)}: brackets without end"


def model_file(trial: Trial, random: Random) -> str | None:
    """Of an exported model, whose list of hashes is made again."""
    path = pick(trial, random, r"model/(?!files).*\.json$")
    if path is None:
        return None
    found, about = changed(json.loads(path.read_text()), random)
    path.write_text(dumped(found), errors="surrogatepass")
    list_anew(path.parent)
    return f"{path.relative_to(trial.work)}: {about}"


def list_of_files(trial: Trial, random: Random) -> str | None:
    path = pick(trial, random, r"files\.json$")
    if path is None:
        return None
    found, about = changed(json.loads(path.read_text()), random)
    path.write_text(dumped(found), errors="surrogatepass")
    return f"{path.relative_to(trial.work)}: {about}"


def weights(trial: Trial, random: Random) -> str | None:
    """safetensors whose header lies."""
    path = pick(trial, random, r"\.safetensors$")
    if path is None:
        return None
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    if random.random() < 0.3:
        data = random.choice((2**63, 2**40, 0)).to_bytes(8, "little") + data[8:]
        about = "another size of its header"
    else:
        header, about = changed(json.loads(data[8 : 8 + size]), random)
        text = json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    path.write_bytes(data)
    list_anew(path.parent)
    return f"{path.relative_to(trial.work)}: {about}"


def list_anew(folder: Path) -> None:
    """Right hashes, if the folder has a list of them."""
    path = folder / "files.json"
    if not path.exists():
        return
    try:
        found = json.loads(path.read_text())
        for name in found["files"]:
            data = (folder / name).read_bytes()
            found["files"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    except (ValueError, OSError, KeyError, RecursionError):
        return
    path.write_text(json.dumps(found))


def indices(trial: Trial, random: Random) -> str | None:
    """An index that names pickles, beside the weights."""
    path = pick(trial, random, r"model/model\.safetensors$")
    if path is None:
        return None
    (path.parent / "pytorch_model.bin").write_bytes(pickled(trial))
    index = {
        "metadata": {},
        "weight_map": {
            "embedding.weight": random.choice(("pytorch_model.bin", "../model/pytorch_model.bin", "/dev/zero"))
        },
    }
    (path.parent / "model.safetensors.index.json").write_text(json.dumps(index))
    return "an index that names a pickle"


# What Python or YAML would run


class Running:
    """Unpickling it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self.command,)


def command(trial: Trial) -> str:
    return f"touch {trial.folder / PROOF}"


def pickled(trial: Trial) -> bytes:
    return pickle.dumps(Running(command(trial)))


def snapshot(trial: Trial, random: Random) -> str | None:
    """Its name has the hash of its bytes."""
    path = pick(trial, random, r"snapshots/step_\d+\.\w{16}\.pt$")
    if path is None:
        return None
    kind = random.choice(("code", "pickle", "list", "empty", "value", "type"))
    state = torch.load(path, weights_only=True)
    about = kind
    if kind == "code":
        state["more"] = Running(command(trial))
    elif kind in ("list", "empty"):
        state = [state] if kind == "list" else {}
    elif kind == "type":
        key = random.choice(sorted(state))
        state[key] = random.choice(("text", [], {}, None, -1, torch.zeros(2, 2)))
        about = f"{key} is {state[key]!r}"
    elif kind == "value":
        state["step"] = random.choice((-5, 10**12, 2.5, True, "4", None))
        about = f"step {state['step']!r}"
    buffer = io.BytesIO()
    torch.save(state, buffer)
    data = pickled(trial) if kind == "pickle" else buffer.getvalue()
    path.unlink()
    path.with_name(f"{path.name[:13]}.{hashlib.sha256(data).hexdigest()[:16]}.pt").write_bytes(data)
    return f"a forged snapshot: {about}"


def words(trial: Trial, random: Random) -> str | None:
    """More words of a run, that would run code or lead elsewhere."""
    path = pick(trial, random, r"\.hydra/overrides\.yaml$")
    if path is None:
        return None
    args = "{cmd: '" + command(trial) + "'}"
    forged = random.choice(
        (
            ("data=external", "data.target=subprocess.getoutput", f'"data.args={args}"'),
            ("model=external", "model.target=subprocess.getoutput", f'"model.args={args}"'),
            ("task=external", "task.target=subprocess.getoutput", f'"task.args={args}"'),
            ("optimizer=external", "optimizer.target=subprocess.getoutput", f'"optimizer.args={args}"'),
            ("callbacks=[antigravity.x]",),
            ("'eval.metrics=[os.system]'",),
            ("hydra.run.dir=/proc/nope",),
            ("hydra.job.chdir=true",),
            ("name='${oc.env:HOME}'",),
            ("hydra/launcher=joblib",),
            ("'hydra.searchpath=[file:///tmp]'",),
            ('"\\e]0;owned\\a=1"',),
            ("train.steps=1e9",),
            ("resume=/",),
        )
    )
    path.write_text(path.read_text() + "".join(f"- {word}\n" for word in forged))
    return f"{path.relative_to(trial.work)}: {forged[-1][:60]!r} is added"


def yaml(trial: Trial, random: Random) -> str | None:
    """Aliases that grow without end, tags of Python, and other values."""
    path = pick(trial, random, r"\.yaml$")
    if path is None:
        return None
    tag = f'- !!python/object/apply:os.system ["{command(trial)}"]\n'
    text = random.choice((BOMB, tag, f"x: {tag[2:]}", "- 1\n- [2]\n- {a: b}\n", "&a [*a]\n", "\x00", "- " * 5000))
    path.write_text(text)
    return f"{path.relative_to(trial.work)}: {text[:30]!r}"


def cache_index(trial: Trial, random: Random) -> str | None:
    """Of a teacher: numpy's header, and pickles in it."""
    path = pick(trial, random, r"cache/.*")
    if path is None:
        return None
    data = random.choice(
        (
            pickled(trial),
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
            + b"\n"
            + pickled(trial),
            b"\x93NUMPY\x01\x00\x76\x00"
            + b"{'descr': '<f4', 'fortran_order': False, 'shape': (9999999999999,), }".ljust(117)
            + b"\n",
            b"\x93NUMPY\x01\x00\x76\x00" + b"(" * 117 + b"\n",
        )
    )
    path.write_bytes(data)
    list_anew(path.parent)
    return f"{path.relative_to(trial.work)}: {data[:40]!r}"


def named(trial: Trial, random: Random) -> str | None:
    """A file or a folder more, whose name is hostile."""
    path = pick(trial, random, "")
    if path is None:
        return None
    name = random.choice([*(each for each in ESCAPES if "/" not in each), "-rf", "$(touch PWNED)", "..x", "x" * 250])
    place = path.with_name(name)
    if random.random() < 0.5:
        place.mkdir(exist_ok=True)
        for inner in ("result.json", "rows.jsonl"):
            (place / inner).write_text("{}")
    else:
        place.write_bytes(path.read_bytes())
    return f"{path.parent.relative_to(trial.work)} has a {name[:30]!r}"


def marker(trial: Trial, random: Random) -> str | None:
    path = pick(trial, random, r"\.lowvram$")
    if path is None:
        return None
    text = random.choice(('{"pid": 1, "host": "x"}', "[]", "\x1b]0;owned\x07", '{"run": "../../x"}', "9" * 5000, ""))
    path.write_text(text)
    return f"{path.relative_to(trial.work)}: {text[:30]!r}"


FORGERIES: tuple[Callable[[Trial, Random], str | None], ...] = (
    *(link, linked_folder, fifo, folder, row, row, lines, deep, model_file, list_of_files, weights, indices),
    *(snapshot, snapshot, words, words, yaml, cache_index, named, marker),
)
