"""One point, inside its child: from the checked configuration to the fields of its row."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lowvram.config.errors import require
from lowvram.config.not_identity import NOT_IDENTITY, ORDERED
from lowvram.config.secret import without_secrets
from lowvram.config.settings import CHILDS_OWN, GROUPS, KNOB_GROUPS, Settings, check_batch_size, is_inline
from lowvram.config.settings import settings as settings_of
from lowvram.core.assemble import assemble
from lowvram.core.device import choose_device
from lowvram.core.generators import seed_all
from lowvram.core.knob import Knob
from lowvram.core.mesh import all_ranks, data_ranks, lay_out
from lowvram.core.quiet import quiet
from lowvram.data.batch_sizes import SameSize
from lowvram.fidelity.worker import Fidelity
from lowvram.launch.spec import PointSpec
from lowvram.loops import fields
from lowvram.loops.fields import status_bytes
from lowvram.loops.noise_scale import noise_of
from lowvram.loops.profiling.compile_time import compile_fields
from lowvram.loops.profiling.malloc import allocated_bytes
from lowvram.loops.rehearsal import is_rehearsed, rehearse
from lowvram.loops.session import Events, Session, StopRequest
from lowvram.loops.setup import (
    acting_allocator,
    check_batch_warmup,
    check_cards,
    check_decided,
    check_metrics,
    open_data,
    row_of,
    wanted_ranks,
    with_steps,
)
from lowvram.loops.skipping import skips_of
from lowvram.results.row import held_by_another_process
from lowvram.worker.limits import LARGEST_CONTEXT_BYTES, Cap
from lowvram.worker.mfu import mfu, whole_samples_per_s
from lowvram.worker.rendezvous import Rendezvous


def run_spec(spec: PointSpec, events: Events, stop: StopRequest, rendezvous: Rendezvous) -> dict[str, Any]:
    """Run a point; returns its part of the row."""
    whole, more = settings_of(spec.config), dict[str, Knob]()
    whole.check_paths()
    if spec.fidelity is not None:
        mode = Fidelity.asked(**spec.fidelity)
        whole, more = replace(whole, groups={**whole.groups, "mode": mode}), {"measure.fidelity": mode.watch}
    return {"status": "ok", **run(whole, spec, events, stop, rendezvous, more)}


def run(
    settings: Settings,
    spec: PointSpec,
    events: Events,
    stop: StopRequest,
    rendezvous: Rendezvous,
    more: Mapping[str, Knob],
) -> dict[str, Any]:
    """Meet the other ranks, assemble the point, run its mode, return the fields of its row. `more` are further knobs,
    by name, that belong to no group; each acts last in its stage."""
    started = time.monotonic()
    import_libraries(settings)
    resident_bytes = status_bytes("VmRSS")
    device, sharding = choose_device(settings.root.device), settings.groups["sharding"]
    names_card = settings.root.names_card
    wanted = wanted_ranks(sharding, device, names_card, settings.root.devices)
    allowed = f"child for {wanted} ranks: each is a process of its own"
    require(wanted == 1 or not is_inline(spec.config), "process", "inline", allowed)
    num_ranks, num_local = rendezvous.count(sharding.ranks, wanted, settings.root.devices)
    check_cards(num_local, device, names_card)
    row = row_of(settings, num_ranks)
    num_slices = row.num_rows(num_ranks)
    check_batch_size(settings.train.batch_size, settings.groups["accum"].parts, num_slices)
    check_batch_warmup(settings, num_slices)
    check_decided(settings, device)
    device, spec = rendezvous.join(spec, num_ranks, device, sharding.timeout_s)
    lay_out(device, row)
    noise, skips = noise_of(settings.train), skips_of(settings.train)
    choices, named = named_knobs(settings, spec.choices, device)
    if choices != spec.choices:
        events("ready", fields={"choices": choices})  # known also of a run that fails
    knobs = {**named, **more, **noise.knobs(), **skips.knobs()}
    seed_all(settings.root.seed)  # for what the model's constructor draws, but for weights
    data = open_data(settings)
    settings = with_steps(settings, data)
    data = settings.groups["task"].attached(data, settings)
    knobs = {name: knob.for_steps(settings.train.steps) for name, knob in knobs.items()}
    check_metrics(settings)
    malloc_bytes = allocated_bytes()  # after the data are open, as they don't count for the point's memory
    problem = settings.groups["task"].pose(settings.groups["model"], data.spec)
    make_rig = partial(assemble, problem, knobs, device, settings.root.seed)
    rig, rehearsed = (
        rehearse(make_rig, data, settings, spec.plan, events) if is_rehearsed(settings) else (make_rig(), {})
    )
    seed_all(settings.root.seed + data_ranks().rank)  # so that each rank draws other dropout masks
    events("ready", fields=ready_fields(device))
    about = (spec.is_resumed, started, resident_bytes, malloc_bytes, chosen(spec.config, choices), spec.run, noise)
    sizes = SameSize(settings.train.batch_size)
    session = Session(settings, knobs, problem, rig, data, sizes, events, stop, spec.folder, *about, skips)
    results = fields.merged(settings.groups["mode"].run(session), rehearsed)
    return row_fields(session, results, choices["allocator"])


def row_fields(session: Session, results: dict[str, Any], allocator: str) -> dict[str, Any]:
    """The fields of the point's row, given those that its mode returns, and the allocator that took effect."""
    samples_per_s = whole_samples_per_s(session, results.get("throughput", {}))
    return fields.merged(
        results,
        compile_fields(session),
        {"choices": {"allocator": allocator}, "time": {"total_s": session.age_s()}},
        {"throughput": {"mfu": mfu(session, samples_per_s)}},
        {"cost": {"total": session.settings.cost(session.age_s(), all_ranks().size)}},
    )


def import_libraries(settings: Settings) -> None:
    """Import the libraries of the knobs, before memory is measured: it shouldn't include their code."""
    with quiet():
        for group in KNOB_GROUPS:
            for name in settings.groups[group].libraries:
                import_module(name)


def chosen(config: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The option of each group, and each value that can change a result, by dotted key."""
    ours = {key: value for key, value in without_secrets(config).items() if key in CHILDS_OWN}
    fields = {key: value for key, value in by_dotted_key(ours).items() if key not in NOT_IDENTITY}
    return {group: choices[group] for group in GROUPS} | fields


def by_dotted_key(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    values_by_key: dict[str, Any] = {}
    for name, value in values.items():
        inner = isinstance(value, Mapping) and f"{prefix}{name}" not in ORDERED
        values_by_key |= by_dotted_key(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return values_by_key


def named_knobs(
    settings: Settings, choices: Mapping[str, str], device: torch.device
) -> tuple[dict[str, str], dict[str, Knob]]:
    """The choices with the allocator that takes effect, which `vram` may change; and the knobs by their names in
    messages, in the order in which they act within a stage. With `vram`, the limit is one of them."""
    knobs = {f"{group}={choices[group]}": settings.groups[group] for group in KNOB_GROUPS}
    if settings.vram_bytes is None:
        return dict(choices), knobs
    knobs.pop(f"allocator={choices['allocator']}")
    name, allocator = acting_allocator(settings, choices, device)
    capped = {f"allocator={name}": allocator, **knobs, f"vram={settings.root.vram}": Cap(settings.vram_bytes)}
    return {**choices, "allocator": name}, capped


def host_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ready_fields(device: torch.device) -> dict[str, Any]:
    """The row's fields that the child sends when the point is assembled: about the environment and the device."""
    provenance = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    if device.type != "cuda":
        return {"provenance": {**provenance, "device_memory_bytes": host_bytes()}}
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device)  # the point's own weights are on the device already
    others = total - free
    disturbed = held_by_another_process(others) if others > LARGEST_CONTEXT_BYTES else None
    if not all_ranks().is_first:
        return {"disturbed": f"rank {all_ranks().rank}: {disturbed}"} if disturbed else {}
    return {
        "provenance": {**provenance, "device_name": torch.cuda.get_device_name(device), "device_memory_bytes": total},
        "memory": {"free_at_start_bytes": free},
        "disturbed": disturbed,
    }
