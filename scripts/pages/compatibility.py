"""Every pair of options over all knob groups: does it train, within its tolerance, or is it refused in one sentence?

    scripts/python scripts/pages/compatibility.py [FOLDER] [only=new]

A few whole configurations that together hold every pair that no fact refuses are run on both models, as points of the
command line (mode=measure, tiny models, two ranks where an option needs several; compiled graphs run operator by
operator, as code for each would take hours). Losses and gradient norms of five steps and the evaluation must lie within
the sum of the options' bands of a run that learns the same, with all else neutral. Prints a line a point, writes
docs/compatibility.md and exits with 1 if any pair failed. FOLDER keeps what was tried (default: a new one in
outputs/compatibility): a command that was interrupted goes on there. On 2 cores about an hour. `only=new` runs only the
pairs of options that the page doesn't tell of yet, or calls refused though no fact refuses them any more, and adds
them to it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Self

import torch

from lowvram.compress.qat import INNER_LINEARS
from lowvram.config.identity import ROOT
from lowvram.config.registry import Option, all_options, knob_of, neutral_options
from lowvram.core.device import absent_facts
from lowvram.core.fact import Fact, ModelFact
from lowvram.core.knob import Exactness
from lowvram.knobs.depth.early_exit import EXITS
from lowvram.knobs.depth.layer_drop import SKIPPABLE
from lowvram.knobs.norms.keep_output import NORMS
from lowvram.knobs.tile.causal import CAUSAL_BLOCKS
from lowvram.knobs.tile.mlps import MLPS
from lowvram.results.metric_lines import FILE_NAME, read_lines
from scripts.benchmarks.runs import Runs
from scripts.pages.pairs import Row, all_pairs, covering_rows, label, why_not

PAGE = ROOT / "docs" / "compatibility.md"
ONLY_NEW = "only=new"
FLOOR = 1e-4  # relative: what rounding in another order may do to five steps of AdamW
FLOOR_OF_CODES = 1e-3  # the same where the optimizer keeps its state in codes of few bits, which may become others
FLOOR_OF_BF16 = 5e-4  # the same where an optimizer computes in bf16 with matrices of which each rank has a part
COMMON = [
    "mode=measure",
    "measure.reruns=0",
    "data=synthetic",
    "data.eval_samples=32",
    "train.batch_size=64",
    "timeout_s=600",
]
COMMON += ["measure.warmup_steps=1", "measure.steps=4", "measure.max_seconds=600"]
TRANSFORMER = ["model.num_layers=2", "model.width=32", "model.num_heads=2", "data.sequence_length=16"]
RESNET = ["model.layers=[1,1]", "model.width=16", "model.norm=group", "data.image_size=16", "data.num_classes=16"]
MODELS = {"transformer": TRANSFORMER, "resnet": RESNET}
ITS_OWN = ("optimizer", "adapter")  # groups that are compared with themselves: states and adapters round otherwise
IN_BF16 = frozenset({("optimizer", "muon")})  # whose updates are products in bf16: sums in another order differ there
EXTRA = {
    ("adapter", "freeze"): ["adapter.train=[blocks,head]"],  # some in each stage of a pipeline
    ("compile", "blocks"): ["compile.backend=aot_eager"],
    ("compile", "model"): ["compile.backend=aot_eager"],
    ("optimizer", "lars"): ["optimizer.lr=0.1"],  # by the default one a random direction (zeroth_order) diverges
    ("precision", "fp16"): ["precision.init_scale=1024"],  # a scale that no first step overflows
    ("tile", "mlp"): ["tile.tokens=100"],  # of the 1,024 tokens of a batch
    ("tile", "tokens"): ["tile.tokens=5"],  # of the 16 of a sample
    ("ckpt", "auto"): ["vram=4GiB"],  # on a CPU it needs a budget
    ("weights", "auto"): ["weights.resident=1"],  # as a plan may choose
    ("sharding", "pipeline"): ["sharding.schedule=gpipe"],  # of a batch in one part, too
}
LACKS = {
    "transformer": frozenset[ModelFact](),
    "resnet": frozenset({MLPS, CAUSAL_BLOCKS, INNER_LINEARS, NORMS, SKIPPABLE, EXITS}),
}  # options that need these are left out
REFUSED = {  # and these, whose trial of the model refuses it
    "transformer": frozenset[Option](),
    "resnet": frozenset({("sharding", "tensor"), ("sharding", "context")}),
}
INTRODUCTION = """# Compatibility

Which options train together. Made by `scripts/python scripts/pages/compatibility.py`; a test compares the page with
what the knobs declare that they need and rule out (their *facts*: [adding_a_knob.md](adding_a_knob.md)).

torch {torch}, Python {python}, CPU. {rows} configurations contain every pair that no fact refuses. Each
ran five steps and an evaluation on a tiny Transformer and a tiny ResNet (group norm), with two ranks where an option
needs several. A pair trains if losses, gradient norms and the evaluation differ from those of
a run that learns the same (optimizer, adapter, sparsity, zeroth_order), and all other options neutral, by no more than
the sum of the errors that the options allow ([knobs.md](knobs.md)), once more in each step, + {floor:g}; or
{of_codes:g} where the optimizer keeps its state in few bits, and {of_bf16:g} where it computes updates in bf16 (Muon)
of matrices of which each rank has a part. With `stepping=zeroth_order` losses alone are compared:
its gradient is the difference of two that are nearly equal, and any rounding changes it. Compiled models ran with
`compile.backend=aot_eager`; the code that inductor writes is left to the test suite.
"""
ABSENT = absent_facts(torch.device("cpu"))


def conflicts_here(options: Iterable[tuple[str, str]]) -> list[str]:
    """Why options can't be had together on a CPU."""
    return why_not(options, ABSENT)


@dataclass(frozen=True)
class Tried:
    """What became of one configuration on one model."""

    row: Row
    model: str
    status: str
    reason: str | None
    history: list[float]  # losses, gradient norms, evaluation
    seconds: float

    def as_line(self) -> str:
        return json.dumps({**asdict(self), "row": sorted(self.row)}) + "\n"

    @classmethod
    def from_line(cls, line: str) -> Self:
        fields = json.loads(line)
        return cls(**{**fields, "row": frozenset((group, option) for group, option in fields["row"])})


def try_out(runs: Runs, row: Row, model: str) -> Tried:
    """Run one configuration."""
    began, words = time.monotonic(), [*COMMON, f"model={model}", *MODELS[model]]
    words += [f"{group}={option}" for group, option in sorted(row)]
    words += [word for option in row for word in EXTRA.get(option, [])]
    if any(Fact.MANY_RANKS in knob_of(option).needs() for option in row):
        words += ["sharding.ranks=2", "sharding.timeout_s=600"]  # a rank may compile for longer than another one
    found = runs.run(label(row - set(neutral_options().items())) or "baseline", words)
    return Tried(row, model, found["status"], found["reason"], history(runs.folder / found["id"], found), since(began))


def history(folder: Path, found: dict) -> list[float]:
    """Losses and gradient norms of all steps, then the loss of the evaluation."""
    if found["status"] != "ok":
        return []
    lines = read_lines(folder / FILE_NAME).rows
    return [*(line[name] for line in lines for name in ("loss/train", "grad_norm")), found["loss"]["eval"]]


def since(began: float) -> float:
    return time.monotonic() - began


def without_lacked(row: Row, model: str) -> Row:
    """The row with neutral options in place of those that the model can't have."""
    lacked = {option[0] for option in row if knob_of(option).needs() & LACKS[model] or option in REFUSED[model]}
    return frozenset((group, neutral_options()[group] if group in lacked else name) for group, name in row)


def is_its_own(option: Option) -> bool:
    """Whether a run with it is compared with one that has it, too: it decides what is learnt, or is of ITS_OWN."""
    knob = knob_of(option)
    return option[0] in ITS_OWN or (knob.exactness is Exactness.LOSSY and knob.reference() == knob)


def tolerance(row: Row, step: int = 1) -> float:
    """Relative: what its options say of themselves, added up; in each step as much is added to what was before."""
    return floor(row) + step * sum(knob_of(option).band for option in row if not is_its_own(option))


def floor(row: Row) -> float:
    """Relative: what is allowed whatever the options say."""
    if any(group == "optimizer" and knob_of((group, name)).exactness is Exactness.LOSSY for group, name in row):
        return FLOOR_OF_CODES
    knobs = [knob_of(option) for option in row]
    has_parts = any(Fact.MANY_RANKS in knob.needs() and Fact.WHOLE_UPDATES in knob.breaks() for knob in knobs)
    return FLOOR_OF_BF16 if has_parts and row & IN_BF16 else FLOOR


def deviation(row: Row, found: Sequence[float], wanted: Sequence[float]) -> str | None:
    """Where a history leaves another one by more than the row's options allow; None if nowhere. Norms aren't compared
    where a gradient is the difference of two nearly equal losses.

    Args:
        found, wanted: loss and gradient norm of each step, then of the evaluation, which counts as a step, the loss.
    """
    assert len(found) == len(wanted)
    every = 2 if ("stepping", "zeroth_order") in row else 1
    for place in range(0, len(found), every):
        off, allowed = abs(found[place] - wanted[place]) / abs(wanted[place]), tolerance(row, place // 2 + 1)
        if not off <= allowed:
            return f"off by {off:.1e} in step {place // 2 + 1}, allowed {allowed:.1e}"
    return None


def fault(tried: Tried, reference: Tried) -> str | None:
    """Why a configuration does not train as it should; None if it does."""
    if tried.status != "ok":
        return f"{tried.status}: {tried.reason}"
    return deviation(tried.row, tried.history, reference.history)


class Grid:
    """Runs configurations and keeps what failed.

    Args:
        file: has a line for each configuration that was tried.
    """

    def __init__(self, runs: Runs, file: Path) -> None:
        self.runs, self.file = runs, file
        lines = map(Tried.from_line, file.read_text().splitlines()) if file.exists() else ()
        self.tried = {(one.row, one.model): one for one in lines}
        self.faults: dict[tuple[Row, str], str] = {}  # of pairs
        self.together: dict[tuple[Row, str], str] = {}  # of configurations whose pairs all train
        self.sound: set[tuple[Row, str]] = set()  # pairs that a configuration without a fault held

    def check(self, row: Row, model: str) -> str | None:
        """The fault of one configuration on one model, without the options that the model can't have."""
        row = without_lacked(row, model)
        tried, reference = self.try_once(row, model), self.reference(row, model)
        found = fault(tried, reference)
        print(f"{model:12} {tried.seconds:5.1f} s  {found or 'ok':4}  {varied(row)}", flush=True)
        if found is None:
            self.sound |= {(pair, model) for pair in all_pairs(row)}
        return found

    def try_once(self, row: Row, model: str) -> Tried:
        if (row, model) not in self.tried:
            self.tried[row, model] = one = try_out(self.runs, row, model)
            with self.file.open("a") as file:
                file.write(one.as_line())
        return self.tried[row, model]

    def reference(self, row: Row, model: str) -> Tried:
        """The options that decide what is learnt, all else neutral."""
        same = dict(option for option in row if is_its_own(option))
        return self.try_once(frozenset({**neutral_options(), **same}.items()), model)

    def search(self, row: Row, model: str, fault: str) -> None:
        """Find out which pairs of a configuration that failed are to blame: those that no other one held without a
        fault, each in a configuration of its own that is as neutral as can be."""
        for pair in sorted(all_pairs(row), key=label):
            if (pair, model) not in self.sound:
                (alone,) = covering_rows({pair}, conflicts_here)
                if found := self.check(alone, model):
                    self.faults[pair, model] = found
        if not any(pair <= row and model == its for pair, its in self.faults):
            self.together[row, model] = fault


def varied(row: Iterable[tuple[str, str]]) -> str:
    return label(set(row) - set(neutral_options().items())) or "all neutral"


def page(
    grid: Grid,
    num_rows: str,
    refused: dict[Row, list[str]],
    elsewhere: list[tuple[str, str]],
) -> str:
    """docs/compatibility.md"""
    pairs = all_pairs(all_options())
    not_here = {pair for pair in pairs if any(option in elsewhere for option in pair)}
    tried = pairs - refused.keys() - not_here
    trained = tried - {pair for pair, _ in grid.faults}
    why = {pair: "; ".join(found).replace("|", "/") for pair, found in refused.items()}
    sections = [
        INTRODUCTION.format(
            torch=torch.__version__,
            python=platform.python_version(),
            rows=num_rows,
            floor=FLOOR,
            of_codes=FLOOR_OF_CODES,
            of_bf16=FLOOR_OF_BF16,
        ),
        "| pairs of options | number |\n|---|---:|",
        f"| all | {len(pairs)} |",
        f"| need another device than a CPU | {len(not_here)} |",
        f"| refused by facts | {len(refused)} |",
        f"| tried | {len(tried)} |",
        f"| trained within their tolerance, on both models | {len(trained)} |",
        f"\nOf the pairs that a CPU can have and that were tried or refused,"
        f" {share(len(trained), len(tried) + len(refused))} train.",
        "\n## Options that existed then\n",
        *options_lines(all_options()),
        "\nAny other is not yet tried.",
        "\n## Refused\n\n| pair | why |\n|---|---|",
        *(f"| `{label(pair)}` | {why[pair]} |" for pair in sorted(refused, key=label)),
        "\n## Not tried: another device is needed\n",
        *(f"- {'; '.join(conflicts_here([option]))}" for option in elsewhere),
        "\n## Trained / pairs that a CPU can have, by groups\n",
        *matrix(trained, tried | refused.keys()),
    ]
    return "\n".join([*sections, *failures(grid)]) + "\n"


def failures(grid: Grid) -> Iterator[str]:
    for title, found in {"Failed": grid.faults, "Failed, although each pair trains": grid.together}.items():
        if found:
            yield f"\n## {title}\n"
            yield from (f"- {model}: `{varied(row)}`: {fault}" for (row, model), fault in found.items())


def options_lines(options: Sequence[Option]) -> Iterator[str]:
    """Of each group."""
    for group in dict.fromkeys(group for group, _ in options):
        yield f"- {group}: {', '.join(f'`{option}`' for its, option in options if its == group)}"


def options_on(page: str) -> list[Option]:
    """Those that a page tells of."""
    lines = re.findall(r"^- (\w+): (`.+`)$", page, re.MULTILINE)
    return [(group, option) for group, names in lines for option in re.findall(r"`(\w+)`", names)]


def share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({part / whole:.1%})"


def matrix(trained: set[Row], all_of_them: set[Row]) -> list[str]:
    """A table of groups against groups."""
    groups = [group for group in neutral_options() if any(group in dict(pair) for pair in all_of_them)]

    def count(pairs: set[Row], one: str, other: str) -> int:
        return sum({group for group, _ in pair} == {one, other} for pair in pairs)

    cells = {frozenset(two): f"{count(trained, *two)} / {count(all_of_them, *two)}" for two in combinations(groups, 2)}
    head = f"| | {' | '.join(groups)} |"
    body = (f"| {one} | {' | '.join(cells.get(frozenset((one, other)), '–') for other in groups)} |" for one in groups)
    return [head, f"|---|{'---:|' * len(groups)}", *body]


def folder_of(words: Sequence[str]) -> Path:
    """The folder that is named, or a new one."""
    return Path(next((word for word in words if word != ONLY_NEW), f"outputs/compatibility/{now()}"))


def now() -> str:
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def counted(num_rows: int, is_added: bool) -> str:
    """How many configurations the page speaks of."""
    if not is_added:
        return str(num_rows)
    (before,) = re.findall(r"CPU\. (.+) configurations contain", PAGE.read_text())
    return f"{before} and later {num_rows}"


def tried_on(page: str) -> set[Row]:
    """The pairs of options that a page says have been tried: all that it didn't call refused."""
    refused = set(re.findall(r"^\| `([^`]+)` \| .* needs ", page, re.MULTILINE))
    return {pair for pair in all_pairs(options_on(page)) if label(pair) not in refused}


def main() -> int:
    folder, is_added = folder_of(sys.argv[1:]), ONLY_NEW in sys.argv[1:]
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.absolute() / "inductor"))
    elsewhere = [option for option in all_options() if conflicts_here([option])]
    pairs = all_pairs([option for option in all_options() if option not in elsewhere])
    refused = {pair: found for pair in pairs if (found := conflicts_here(pair))}
    told_of = tried_on(PAGE.read_text()) if is_added else set()
    wanted = pairs - refused.keys() - told_of
    rows = covering_rows(wanted, conflicts_here)
    assert wanted <= set().union(*map(all_pairs, rows)), "the rows don't hold every pair"
    print(f"{len(pairs)} pairs, {len(refused)} refused, {len(rows)} configurations on {len(MODELS)} models", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    with Runs(folder / now()) as runs:
        grid = Grid(runs, folder / "tried.jsonl")
        checked = [(row, model, grid.check(row, model)) for model in MODELS for row in rows]
        failed = [(row, model, found) for row, model, found in checked if found]
        for row, model, found in failed:
            grid.search(row, model, found)
    PAGE.write_text(page(grid, counted(len(rows), is_added), refused, elsewhere))
    num_faults = len(grid.faults) + len(grid.together)
    print(f"{num_faults} faults; written: {PAGE.relative_to(ROOT)}")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())
