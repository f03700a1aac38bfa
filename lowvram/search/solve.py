"""mode=solve, in the parent: one child plans values of a key until the largest with which the point fits is known, and
that one is measured. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from hydra import compose
from omegaconf import MISSING, DictConfig, OmegaConf

from lowvram.config.compose import plain
from lowvram.config.errors import BadInput, Refused
from lowvram.config.settings import CHILDS_OWN
from lowvram.config.words import key
from lowvram.launch.client import Event, Server
from lowvram.launch.spec import Point
from lowvram.launch.stop import StopConditions
from lowvram.planning.client import Planned, request_of
from lowvram.results import row as rows
from lowvram.results.planned import ms_text
from lowvram.results.row import Row, Status, size_text
from lowvram.results.terminal import Progress, command_line
from lowvram.runs.run import run_point
from lowvram.search.client import probe_of, runs_here
from lowvram.search.largest import Bracket, tried
from lowvram.search.result import with_changes

MODE, KEY = "solve", "solve.key"
START = 64  # as good as any: of tokens, pixels or samples
OF_THE_PLAN = ("advice", "plan")  # what the child says of a plan besides the fields of a row
ALLOWED = (
    "the dotted key of a whole number that takes more memory the larger it is, such as train.batch_size,"
    " data.sequence_length, data.image_size or model.num_layers"
)


@final
@dataclass
class Solves:
    """The answers of one call of the command line."""

    server: Server
    progress: Progress
    stop_signals: Callable[[], int]
    plan_again: Callable[[Point], Point]

    def row(self, point: Point, words: Sequence[str]) -> Row | None:
        """Find the largest value, measure it if it runs here, and write its row.

        Args:
            words: the overrides typed for this point.

        Returns:
            The row of the answer, or one that says why there is none; None: a stop was requested before that was known.
        """
        found = Found(point, words)
        ending = self.find(found)
        if self.stop_signals():
            return None
        if ending["status"] != Status.OK or found.bracket.falling or not found.bracket.fitting:
            row = rows.merge(point.first_row(), found.why_none(ending))
        else:
            for line in found.report():
                self.progress.say(line)
            row = self.answer(found)
        rows.write(point.folder, row)
        return row

    def find(self, found: Found) -> dict[str, Any]:
        """Have values planned; returns how that has ended."""

        def on_event(event: Event) -> None:
            if event["event"] == "planned":
                found.add(event["index"], event["fields"])
                if len(found.planned) == 1:
                    self.progress.start(MODE, None, "plan")
                self.progress.update(len(found.planned), {})
            elif event["event"] == "say":
                self.progress.say(event["text"])

        stops = StopConditions(None, self.stop_signals)
        ending = self.server.ask("solve", found.request(), stops, on_event)
        self.progress.stop()
        return ending or {"status": Status.KILLED.value, "reason": "the process that plans was ended from outside"}

    def answer(self, found: Found) -> Row:
        """The row of the answer, which is measured if it runs here."""
        point, probe = found.point, found.probe()
        if runs_here(point):
            probe.folder.mkdir(parents=True, exist_ok=True)
            row = run_point(probe, self.server, self.progress, self.stop_signals, self.plan_again)
        else:
            planned = found.planned[found.value]
            row = rows.merge(probe.first_row(), {name: planned[name] for name in planned if name not in OF_THE_PLAN})
        return {**row, "id": point.id, "name": point.name, "index": point.index}


@final
@dataclass
class Found:
    """What is known of one point's values.

    Attributes:
        planned: what the child has planned, by value.
    """

    point: Point
    words: Sequence[str]
    planned: dict[int, Planned] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.bracket = Bracket(self.point.config["solve"]["multiple_of"])

    @property
    def key(self) -> str:
        return self.point.config["solve"]["key"]

    @property
    def value(self) -> int:
        """The largest that fits."""
        return self.bracket.fitting[-1].value

    def add(self, value: int, planned: Planned) -> None:
        self.planned[value] = planned
        self.bracket.add(tried(value, planned))

    def request(self) -> dict[str, Any]:
        """What the child is asked.

        Raises:
            BadInput: another value is computed from that of the key.
        """
        unit = self.bracket.unit
        start = max(unit, start_of(self.point.config) // unit * unit)
        config, other = (self.composed(value) for value in (start, start + unit))
        one, two = ({name: plain(each)[name] for name in CHILDS_OWN} for each in (config, other))
        paths = [path for path, *values in differing(one, two) if values == [start, start + unit]]
        for path, *values in differing(one, two):
            if path not in paths and all(isinstance(value, int | float) for value in values):
                raise BadInput(KEY, self.key, f"a key from which no other is computed: {path} follows it")
        return {"point": request_of(config), "paths": paths, "start": start, "unit": unit}

    def composed(self, value: int) -> DictConfig:
        """What was typed, with a value, as a point that is planned."""
        mode = "measure" if runs_here(self.point) else "plan"
        of_plan = [word for word in self.words if key(word).startswith("plan.")]
        words = [*with_changes(self.words, self.changes(value)), *of_plan, f"mode={mode}"]
        return compose("config", words, return_hydra_config=True)

    def probe(self) -> Point:
        """The answer as a point."""
        word = self.word(self.value)
        candidate = {"changes": self.changes(self.value), **self.planned[self.value]["plan"], "solved": word}
        probe = probe_of(self.point, self.words, 0, candidate, runs_here(self.point))
        return replace(probe, name=word, logged={**probe.logged, "name": word})

    def word(self, value: int) -> str:
        return f"{self.key}={value}"

    def changes(self, value: int) -> dict[str, str]:
        return {self.key: str(value)}

    def why_none(self, ending: Mapping[str, Any]) -> dict[str, Any]:
        """The end of a point without an answer."""
        if ending["status"] != Status.OK:
            return {"status": ending["status"], "reason": ending["reason"]}
        if self.bracket.falling is not None:
            one, two = map(self.word, self.bracket.falling)
            reason = str(BadInput(KEY, self.key, f"{ALLOWED}: {one} needs more than {two}"))
            return {"status": Status.INCOMPATIBLE.value, "reason": reason}
        least = self.bracket.above
        assert least is not None
        what = f"it is refused: {least.refusal}" if least.load is None else self.needs(least.value)
        reason = f"{self.key}: nothing fits: of {self.word(least.value)}, the smallest that was tried, {what}"
        return {"status": Status.INCOMPATIBLE.value, "reason": reason}

    def needs(self, value: int) -> str:
        """What a value needs, in half a sentence."""
        plan = self.planned[value]["plan"]
        share = 1 + plan["margin"]
        least, budget = size_text(plan["least_vram_bytes"] * share), size_text(plan["budget_bytes"])
        text = f"the plan needs {least} of {budget}, a margin of {plan['margin']:.0%} included"
        host, room = plan.get("host_bytes"), plan.get("host_budget_bytes")
        is_short = host and room and host * share > room
        return f"{text}, and {size_text(host * share)} of the host's {size_text(room)}" if is_short else text

    def report(self) -> Iterator[str]:
        """The answer, what bounds it, and the command that trains with it."""
        plan, above = self.planned[self.value]["plan"], self.bracket.above
        about = f"{self.point.name}: " if self.point.sweep else ""
        time = "" if plan["step_ms"] is None else f", about {ms_text(plan['step_ms'])} ms a step"
        yield f"{about}the largest that fits {plan['device']}: {self.word(self.value)}: {self.needs(self.value)}{time}"
        if above is None:
            yield f"{about}no larger value was tried: {self.key} takes next to no memory"
        elif above.load is not None:
            yield f"{about}of {self.word(above.value)} {self.needs(above.value)}"
        else:
            word, reason = self.word(above.value), above.refusal or ""
            yield f"{about}{reason if reason.startswith(word) else f'{word} is refused: {reason}'}"
        yield f"  {command_line(*with_changes(self.words, self.changes(self.value)))}"


def start_of(config: Mapping[str, Any]) -> int:
    """The value from which on others are tried: that of the key as it is; if it is null, `START`.

    Raises:
        Refused: no key is given.
        BadInput: there is no such key, or its value is no whole number.
    """
    name = config["solve"]["key"]
    if name is None:
        raise Refused(f"mode=solve needs {KEY}: {ALLOWED}")
    value = OmegaConf.select(OmegaConf.create(dict(config)), name, default=MISSING)
    if type(value) is not int and value is not None:
        raise BadInput(KEY, name, ALLOWED if value is MISSING else f"{ALLOWED}; this one is {value!r}")
    return START if value is None else max(1, value)


def differing(one: Mapping[str, Any], other: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The dotted keys whose values differ in two configurations, with both values."""
    for name, value in one.items():
        if isinstance(value, Mapping) and isinstance(other.get(name), Mapping):
            yield from differing(value, other[name], f"{before}{name}.")
        elif value != other.get(name):
            yield f"{before}{name}", value, other.get(name)
