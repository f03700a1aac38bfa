"""Whom our command line is held against: a loop written by hand, Hugging Face's Trainer and Lightning's."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.benchmarks.contestants import (
    ADAFACTOR,
    BF16,
    BF16_WEIGHTS,
    CHECKPOINTING,
    EIGHT_BITS,
    FOUR_BITS,
    Case,
    Contestant,
    Told,
    memory_of,
    now_s,
    ours,
    resident_bytes,
    samples_of,
    settings_of,
)

PRECISIONS: dict[str, Any] = {BF16: "bf16-mixed", BF16_WEIGHTS: "bf16-true"}  # Lightning's
OPTIMIZERS = {EIGHT_BITS: "adamw_torch_8bit", FOUR_BITS: "adamw_torch_4bit", ADAFACTOR: "adafactor"}  # a Trainer's


def loaded(case: Case, folder: Path) -> Any:
    """The model as transformers loads it, in bf16 and with checkpointing if that is asked for."""
    import torch

    from lowvram.models.hf_heads import CLASSES as AUTO
    from lowvram.models.hf_heads import Head

    dtype = torch.bfloat16 if BF16_WEIGHTS in case.savings else torch.float32
    model = AUTO[Head[case.head]].from_pretrained(case.model_folder(folder), dtype=dtype, trust_remote_code=False)
    if CHECKPOINTING in case.savings:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.to(case.device).train()


def optimizer_of(case: Case, parameters: Any) -> Any:
    """AdamW: torch's fused one, or torchao's of few bits; or torch's Adafactor."""
    import torch
    from torchao.optim import AdamW4bit, AdamW8bit

    about: dict[str, Any] = {name: float(case.said[f"optimizer.{name}"]) for name in ("lr", "weight_decay")}
    if ADAFACTOR in case.savings:
        return torch.optim.Adafactor(parameters, foreach=False, **about)
    about["betas"] = (0.9, float(case.said["optimizer.beta2"]))
    for saving, kind in ((EIGHT_BITS, AdamW8bit), (FOUR_BITS, AdamW4bit)):
        if saving in case.savings:
            return kind(parameters, **about, bf16_stochastic_round=BF16_WEIGHTS in case.savings)
    return torch.optim.AdamW(parameters, fused=True, **about)


def trainer(case: Case, folder: Path, num_steps: int, log_every: int) -> Told:
    """The same of a Trainer."""
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step % log_every == 0 or state.global_step == 1:
                times_s.append(now_s(case))

    class Kept(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(super().training_step(*args, **kwargs))
            return losses[-1]

    times_s, losses = list[float](), list[torch.Tensor]()
    options, whole = settings_of_trainer(case, folder, num_steps), settings_of(case, folder)
    before = resident_bytes()
    data: Any = samples_of(case, whole, num_steps)
    Kept(loaded(case, folder), TrainingArguments(**options), train_dataset=data, callbacks=[Watch()]).train()
    told = {"times_s": times_s, **memory_of(case, before)}
    return {**told, "losses": [loss.item() for loss in losses]}


def settings_of_trainer(case: Case, folder: Path, num_steps: int) -> dict[str, Any]:
    """The words of train.py in the Trainer's, and all that makes it faster."""
    return {
        "output_dir": str(folder / "trainer"),
        "max_steps": num_steps,
        "per_device_train_batch_size": case.batch_size // case.num_parts,
        "gradient_accumulation_steps": case.num_parts,
        "gradient_checkpointing": CHECKPOINTING in case.savings,
        "learning_rate": float(case.said["optimizer.lr"]),
        "adam_beta1": 0.9,
        "adam_beta2": float(case.said["optimizer.beta2"]),
        "weight_decay": float(case.said["optimizer.weight_decay"]),
        "max_grad_norm": case.clip,
        "bf16": BF16 in case.savings or case.said.get("precision") == "bf16",
        "lr_scheduler_type": "constant",
        "optim": next((name for saving, name in OPTIMIZERS.items() if saving in case.savings), "adamw_torch_fused"),
        "optim_args": "bf16_stochastic_round=True" if {BF16_WEIGHTS, FOUR_BITS} <= case.savings else None,
        "train_sampling_strategy": "sequential",
        "remove_unused_columns": False,
        "logging_strategy": "no",
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": case.device == "cpu",
    }


def by_hand(case: Case, folder: Path, num_steps: int, log_every: int) -> Told:
    """The same of a loop that somebody writes for this one model."""
    import torch
    from torch.utils.data import DataLoader

    times_s, losses, whole = list[float](), list[torch.Tensor](), settings_of(case, folder)
    before, data = resident_bytes(), samples_of(case, whole, num_steps)
    model, kind = loaded(case, folder), torch.device(case.device).type
    optimizer = optimizer_of(case, model.parameters())
    parts: Any = iter(DataLoader(data, batch_size=case.batch_size // case.num_parts))  # pyright: ignore[reportArgumentType]
    for number in range(1, num_steps + 1):
        total = torch.zeros((), device=case.device)
        for part in islice(parts, case.num_parts):
            part = {name: value.to(case.device) for name, value in part.items()}
            with torch.autocast(kind, torch.bfloat16) if BF16 in case.savings else nullcontext():
                loss = model(**part, use_cache=False).loss / case.num_parts
            loss.backward()
            total += loss.detach()
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if number % log_every == 0 or number == 1:
            times_s.append(now_s(case))
    told = {"times_s": times_s, **memory_of(case, before)}
    return {**told, "losses": [loss.item() for loss in losses]}


def lightning(case: Case, folder: Path, num_steps: int, log_every: int) -> Told:
    """The same of Lightning's Trainer."""
    import lightning as lightning_  # pyright: ignore[reportMissingImports]
    from torch.utils.data import DataLoader

    class Module(lightning_.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded(case, folder)

        def training_step(self, part: Any, index: int) -> Any:
            losses.append(self.model(**part, use_cache=False).loss)
            return losses[-1]

        def configure_optimizers(self) -> Any:
            return optimizer_of(case, self.model.parameters())

        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            losses[-1] = losses[-1].detach()
            ended = (index + 1) // case.num_parts
            if (index + 1) % case.num_parts == 0 and (ended % log_every == 0 or ended == 1):
                times_s.append(now_s(case))

    times_s, losses, whole = list[float](), list[Any](), settings_of(case, folder)
    before, data = resident_bytes(), samples_of(case, whole, num_steps)
    host = lightning_.Trainer(
        accelerator="cpu" if case.device == "cpu" else "gpu",
        devices=1,
        barebones=True,
        max_steps=num_steps,
        accumulate_grad_batches=case.num_parts,
        gradient_clip_val=case.clip or None,
        precision=next((name for saving, name in PRECISIONS.items() if saving in case.savings), "32-true"),
    )
    size = case.batch_size // case.num_parts
    host.fit(Module(), DataLoader(data, batch_size=size))  # pyright: ignore[reportArgumentType]
    told = {"times_s": times_s, **memory_of(case, before)}
    return {**told, "losses": [loss.item() for loss in losses]}


CONTESTANTS: dict[str, Contestant] = {
    "ours": ours,
    "by_hand": by_hand,
    "trainer": trainer,
    "lightning": lightning,
}
