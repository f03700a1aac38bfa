"""The charts of a sweep's report as a saved workspace of W&B: memory and speed, kinds, losses, the table, the figures.

    scripts/python scripts/wandb_workspace.py ENTITY [PROJECT] [--group GROUP]...   saves it, and prints its address
    scripts/python scripts/wandb_workspace.py ENTITY [PROJECT] --print              prints what would be saved

Runs are grouped by the choices named with `--group`, such as `--group precision`; without any they stand alone. Needs
wandb-workspaces (pip install 'lowvram[workspace]'), and to save it an account.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lowvram.compat.wandb import workspace_values
from lowvram.config.errors import Refused
from lowvram.config.registry import neutral_options
from lowvram.results.loggers.logger import STEP_MEMORY
from lowvram.results.loggers.wandb import AXIS, STEP
from lowvram.results.loggers.wandb_sweep import FIGURE, TABLE
from lowvram.results.metrics import METRICS
from lowvram.results.metrics import PEAK as PEAK_PATH
from lowvram.results.row import KINDS

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Section, Workspace

NAME = "lowvram: memory, speed, fidelity"
IN_WANDB = {metric.path: metric.logger_name or "" for metric in METRICS}
PEAK, SPEED, PLANNED = (IN_WANDB[path] for path in (PEAK_PATH, "throughput.samples_per_s", "plan.allocated_bytes"))
ERROR, GAP, LOSS, EVAL_LOSS = (
    IN_WANDB[path] for path in ("fidelity.gradient_error", "fidelity.loss_gap", "loss.last", "loss.eval")
)
FIGURES = ("memory_and_speed", "choices", "waterfall", "kinds", "loss_over_time", "loss_over_tokens")
PINNED = ("status", PEAK, SPEED, EVAL_LOSS, ERROR, GAP)
MOST_RUNS = 200  # in one panel


def workspace(entity: str, project: str, groups: Sequence[str] = ()) -> Workspace:
    """The whole of it; nothing is sent.

    Args:
        groups: knob groups by whose options runs are put together.

    Raises:
        Refused: wandb-workspaces isn't installed, or there is no such group.
    """
    for group in groups:
        if group not in neutral_options():
            raise Refused(f"--group {group}: no such group: use one of {', '.join(neutral_options())}")
    try:
        from wandb_workspaces import workspaces as ws
    except ImportError:
        why = "a workspace needs wandb-workspaces, which isn't installed: pip install 'lowvram[workspace]'"
        raise Refused(why) from None
    choices = [f"config:choice.{group}" for group in neutral_options()]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[_costs(), _choices(), _memory(), _over_time(), _losses(), _sweep()],
        settings=ws.WorkspaceSettings(max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config(f"choice.{group}") for group in groups],
            order=[ws.Ordering(ws.Summary(PEAK))],
            pinned_columns=[*(f"summary:{name}" for name in PINNED), *choices],
        ),
    )


def _costs() -> Section:
    """What is saved, and what it costs."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    return Section(
        name="Memory, speed, fidelity",
        is_open=True,
        panels=[
            wr.ScatterPlot(title="Memory and speed", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(SPEED)),
            wr.ScatterPlot(
                title="Memory and fidelity", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(ERROR), log_y=True
            ),
            wr.ScatterPlot(title="Memory and loss", x=wr.SummaryMetric(PEAK), y=wr.SummaryMetric(EVAL_LOSS)),
        ],
    )


def _choices() -> Section:
    """The peak of each option, over all runs that have it."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    bars = [
        wr.BarPlot(
            title=f"Peak by {group}, GiB",
            metrics=[PEAK],
            groupby=wr.Config(f"choice.{group}"),
            groupby_aggfunc="median",
        )
        for group in neutral_options()
    ]
    return Section(name="Choices", panels=[*bars])


def _memory() -> Section:
    """What the peak is made of."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    kinds = {kind: IN_WANDB[f"memory.by_kind_max.{kind}"] for kind in KINDS}
    names = {"Peak": PEAK, "Planned": PLANNED} | kinds
    bars = [wr.BarPlot(title=f"{title}, GiB", metrics=[name], max_runs_to_show=100) for title, name in names.items()]
    return Section(name="Memory by kind", is_open=True, panels=[*bars])


def _losses() -> Section:
    from wandb_workspaces.workspaces import Section

    names = {"Training loss": LOSS, "Evaluation loss": EVAL_LOSS, "Gradient norm": "grad_norm"}
    return Section(name="Losses", is_open=True, panels=[_over(STEP, title, [name]) for title, name in names.items()])


def _over_time() -> Section:
    """Memory over the steps, and over the moments of one step."""
    from wandb_workspaces.workspaces import Section

    held = [f"memory_now/{kind}_gib" for kind in ("parameters", "gradients", "optimizer", "host")]
    within = [(kind, f"{STEP_MEMORY}/{kind}_gib") for kind in KINDS]
    lines = [_over(STEP, "Held between steps, GiB", held)]
    lines += [_over(f"{STEP_MEMORY}/{AXIS}", f"{kind} within a step, GiB", [name]) for kind, name in within]
    return Section(name="Memory over time", panels=[*lines])


def _over(axis: str, title: str, names: list[str]) -> Any:
    from wandb_workspaces.reports import v2 as wr

    return wr.LinePlot(title=title, x=axis, y=[*names], max_runs_to_show=100)


def _sweep() -> Section:
    """What a sweep's own run holds."""
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.workspaces import Section

    images = wr.MediaBrowser(title="Figures", media_keys=[f"{FIGURE}/{name}" for name in FIGURES])
    return Section(name="Sweep", panels=[wr.WeavePanelSummaryTable(table_name=TABLE), images])


def main(arguments: Sequence[str] | None = None) -> int:
    """Saves the charts of lowvram's runs as a workspace of W&B."""
    parser = argparse.ArgumentParser("wandb_workspace.py", description=main.__doc__)
    parser.add_argument("entity", help="your user or team")
    parser.add_argument("project", nargs="?", default="lowvram", help="logger.project; lowvram if you have set none")
    parser.add_argument("--group", action="append", default=[], help="a knob group by which runs are put together")
    parser.add_argument("--print", action="store_true", dest="is_dry", help="print what would be saved, save nothing")
    typed = parser.parse_args(arguments)
    try:
        found = workspace(typed.entity, typed.project, typed.group)
    except Refused as error:
        print(error, file=sys.stderr)
        return 3
    if typed.is_dry:
        print(json.dumps(workspace_values(found), indent=1))
    else:
        print(found.save().url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
