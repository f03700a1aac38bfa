"""What to type in place of words that other tools use, and of options that aren't there. Imports no torch."""

from __future__ import annotations

import re

SNAPSHOT = "ckpt is activation checkpointing; saved training state is a snapshot: resume=last or resume=FOLDER"

# Keys that other tools use -> what to type here. Of a key with dots the whole, its last and its first part count.
ELSEWHERE = {
    "lr": "the learning rate is optimizer.lr",
    "learning_rate": "the learning rate is optimizer.lr",
    "momentum": "it is optimizer.momentum with optimizer=sgd",
    "weight_decay": "it is optimizer.weight_decay",
    "epochs": "it is train.epochs (or train.steps, in updates)",
    "num_train_epochs": "it is train.epochs (or train.steps, in updates)",
    "max_steps": "it is train.steps",
    "steps": "it is train.steps",
    "batch_size": "the logical batch is train.batch_size; accum=x4 runs it in 4 parts",
    "per_device_train_batch_size": "the logical batch is train.batch_size; accum=x4 runs it in 4 parts",
    "gradient_accumulation_steps": "choose accum=x2 (… x32): the logical batch stays train.batch_size",
    "accumulate_grad_batches": "choose accum=x2 (… x32): the logical batch stays train.batch_size",
    "auto_find_batch_size": "choose accum=auto: the logical batch stays, its parts shrink until they fit",
    "auto_scale_batch_size": "choose accum=auto: the logical batch stays, its parts shrink until they fit",
    "gradient_checkpointing": "choose ckpt=every1 (or every2 … every4)",
    "activation_checkpointing": "choose ckpt=every1 (or every2 … every4)",
    "bf16": "choose precision=bf16",
    "fp16": "choose precision=fp16",
    "tf32": "choose precision=tf32",
    "amp": "choose precision=bf16 or precision=fp16",
    "mixed_precision": "choose precision=bf16 or precision=fp16",
    "optim": "choose optimizer=adamw or optimizer=sgd; another is optimizer=external optimizer.target=package.Class",
    "max_grad_norm": "it is stepping.clip",
    "gradient_clip_val": "it is stepping.clip",
    "clip": "it is stepping.clip",
    "lr_scheduler_type": "choose schedule=linear (or cosine, constant, warmup_cosine)",
    "num_workers": "choose loader=workers; their number is loader.num_workers",
    "dataloader_num_workers": "choose loader=workers; their number is loader.num_workers",
    "group_by_length": "choose loader=bucketed",
    "packing": "choose loader=packed",
    "max_length": "it is data.sequence_length",
    "sequence_length": "it is data.sequence_length",
    "image_size": "it is data.image_size",
    "dropout": "it is model.dropout",
    "dataset": "choose data=text data.path=… (or imagefolder, synthetic, …)",
    "gpu": "choose device=cuda",
    "gpus": "choose device=cuda",
    "num_gpus": "choose sharding=ddp or sharding=fsdp; their number is devices",
    "ranks": "choose sharding=ddp or sharding=fsdp; their number is devices",
    "world_size": "choose sharding=ddp or sharding=fsdp; their number is devices",
    "nproc_per_node": "choose sharding=ddp or sharding=fsdp; their number is devices",
    "num_processes": "choose sharding=ddp or sharding=fsdp; their number is devices",
    "accelerator": "choose device=cuda or device=cpu",
    "memory": "the memory that a point may use is vram=8GiB",
    "output_dir": "it is paths.outputs",
    "resume_from_checkpoint": "it is resume=last or resume=FOLDER",
    "max_epochs": "it is train.epochs (or train.steps, in updates)",
    "val_check_interval": "it is train.eval_every, in updates",
    "eval_steps": "it is train.eval_every",
    "logging_steps": "it is train.log_every",
    "log_every_n_steps": "it is train.log_every",
    "save_steps": "it is snapshot.every_steps",
    "snapshot_every": "it is snapshot.every_steps",
    "snapshot.every": "it is snapshot.every_steps",
    "save_total_limit": "it is snapshot.keep",
    "load_best_model_at_end": "it is export.of=best with snapshot.best=loss/eval",
    "metric_for_best_model": "it is snapshot.best=loss/eval (or eval/accuracy, or your own eval/f1:max)",
    "early_stopping_patience": "it is train.patience with snapshot.best=loss/eval",
    "patience": "it is train.patience with snapshot.best=loss/eval",
    "max_time": "it is train.max_hours",
    "run_name": "it is name",
    "init_from": "it is model.init=FOLDER, the folder of a finished run (or of its model/)",
    "pruning_ratio": "it is prune.ratio with mode=prune prune.run=FOLDER",
    "stacking": "it is mode=grow grow.run=FOLDER grow.how=stack",
    "drop_path_rate": "it is depth=stochastic depth.rate",
    "drop_path": "it is depth=stochastic depth.rate",
    "layerdrop": "it is depth=layer_drop depth.count, a number of blocks",
    "report_to": "choose logger=wandb, tensorboard, both or none",
    "strategy": "choose sharding=ddp or sharding=fsdp",
    "fsdp": "choose sharding=fsdp",
    "metrics": "your own are named as eval.metrics=[package.function]",
    "trainer.callbacks": "it is callbacks=[package.Class]",
    "model.name": "choose model=hf model.name=FOLDER (or a name on the hub)",
    "data.name": "choose data=hub data.name=FILE (or a folder, or a name on the hub)",
    "data.path": "choose data=text data.path=FILE_OR_FOLDER (or data=imagefolder)",
    "wandb.project": "it is logger.project",
    "wandb.entity": "it is logger.entity",
    "wandb.group": "it is logger.group",
    "wandb.name": "it is name",
    "wandb.mode": "set the environment variable WANDB_MODE=offline (or disabled)",
    "wandb": "choose logger=wandb; its keys are logger.project and logger.entity",
    "partition": "it is launcher.partition with launcher=slurm",
    "gres": "it is launcher.gres with launcher=slurm",
    "trainer": "there is no trainer: its values are in train.* and in the groups (docs/coming_from.md)",
}

# GROUP=OPTION, as a pattern of an option that isn't there -> what to type here.
OPTIONS = {
    r"ckpt=every(\d+)": r"type ckpt=every1 ckpt.every=\1",
    r"ckpt=.*/.*": SNAPSHOT,
    r"accum=x?(\d+)": r"type accum=x2 accum.parts=\1",
    r"data=(csv|jsonl?|parquet|arrow|txt)": r"type data=hub data.name=FILE.\1",
    r"data=(.*[./].*)": r"type data=text data.path=\1, data=imagefolder data.path=\1 or data=hub data.name=\1",
    r"model=(.*[./].*)": r"type model=hf model.name=\1",
    r"model=(bert|roberta|distilbert|opt|llama|qwen|mistral|gemma|t5|vit).*": "type model=hf model.name=FOLDER_OR_NAME",
    r"launcher=(joblib|submitit_\w+)": r"it is one of Hydra's: type hydra/launcher=\1, or launcher=slurm",
    r"hydra/launcher=slurm": "it is one of lowvram's: type launcher=slurm",
    r"hydra/launcher=ray": "type launcher=ray, which is lowvram's, or pip install hydra-ray-launcher",
    r"hydra/launcher=(joblib|submitit_\w+)": "it isn't installed here: pip install 'lowvram[launchers]'",
    r"hydra/launcher=(ray_aws|rq)": r"it isn't installed here: pip install hydra-\1-launcher",
    r"hydra/sweeper=(ax|nevergrad)": "it takes another job than lowvram's: type hydra/sweeper=optuna",
}


def hint_for_key(key: str) -> str | None:
    """What to type in place of an unknown key; None if nobody knows."""
    hint = ELSEWHERE.get(key) or ELSEWHERE.get(key.rpartition(".")[2]) or ELSEWHERE.get(key.partition(".")[0])
    is_in_hint = "." in key and key not in ELSEWHERE and hint is not None and key in hint
    return None if is_in_hint else hint  # a key that the hint names exists with another option


def hint_for_option(group: str, option: str) -> str | None:
    """What to type in place of an option that its group doesn't have."""
    for pattern, hint in OPTIONS.items():
        if match := re.fullmatch(pattern, f"{group}={option}"):
            return match.expand(hint)
    return None
