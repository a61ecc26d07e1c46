"""What an unknown key may have meant: a key of another group, another tool's name, or a slip."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

_BATCH = "the samples of one optimizer step over all ranks; Twofold cuts it into micro-batches by itself"

# Names of other tools (Lightning, Trainer and TRL, Axolotl, LLaMA-Factory, torchtune): our key, a remark.
ELSEWHERE: dict[str, tuple[str, str]] = {
    "learning_rate": ("train.lr", ""),
    "num_train_epochs": ("train.max_epochs", ""),
    "num_epochs": ("train.max_epochs", ""),
    "epochs": ("train.max_epochs", ""),
    "num_steps": ("train.max_steps", ""),
    "steps": ("train.max_steps", ""),
    "per_device_train_batch_size": ("train.global_batch_size", _BATCH),
    "train_batch_size": ("train.global_batch_size", _BATCH),
    "gradient_accumulation_steps": ("train.global_batch_size", _BATCH),
    "accumulate_grad_batches": ("train.global_batch_size", _BATCH),
    "batch_size": ("train.global_batch_size", _BATCH),
    "micro_batch": ("train.micro_batch_size", ""),
    "max_tokens": ("train.micro_batch_tokens", "the tokens of a micro-batch"),
    "optim": ("train.optimizer", ""),
    "lr_scheduler_type": ("train.schedule", ""),
    "lr_scheduler": ("train.schedule", ""),
    "scheduler": ("train.schedule", ""),
    "warmup": ("train.warmup_steps", ""),
    "num_warmup_steps": ("train.warmup_steps", ""),
    "adam_beta1": ("train.betas", "a list of both"),
    "adam_beta2": ("train.betas", "a list of both"),
    "adam_epsilon": ("train.eps", ""),
    "gradient_clip_val": ("train.max_grad_norm", ""),
    "gradient_clipping": ("train.max_grad_norm", ""),
    "clip_grad_norm": ("train.max_grad_norm", ""),
    "eval_strategy": ("train.eval_steps", "a number of steps"),
    "evaluation_strategy": ("train.eval_steps", "a number of steps"),
    "val_check_interval": ("train.eval_steps", "a number of steps"),
    "save_strategy": ("train.save_steps", "a number of steps"),
    "every_n_train_steps": ("train.save_steps", ""),
    "save_top_k": ("train.save_total_limit", "the best checkpoint is always kept"),
    "log_every_n_steps": ("train.logging_steps", ""),
    "data_seed": ("train.seed", ""),
    "output_dir": ("run.folder", "the run leaves everything in run.folder/run.name"),
    "default_root_dir": ("run.folder", "the run leaves everything in run.folder/run.name"),
    "run_name": ("run.name", ""),
    "experiment_name": ("run.name", ""),
    "resume_from_checkpoint": ("run.resume", ""),
    "ckpt_path": ("run.resume", ""),
    "gpus": ("run.devices", ""),
    "nproc_per_node": ("run.devices", ""),
    "num_processes": ("run.devices", ""),
    "nnodes": ("run.num_nodes", ""),
    "num_machines": ("run.num_nodes", ""),
    "bf16": ("run.precision", "for example bf16"),
    "fp16": ("run.precision", "for example 16"),
    "mixed_precision": ("run.precision", ""),
    "deepspeed": ("run.strategy", ""),
    "fsdp": ("run.strategy", ""),
    "disable_tqdm": ("run.progress", ""),
    "enable_progress_bar": ("run.progress", ""),
    "model_name_or_path": ("model.path", ""),
    "model_name": ("model.path", ""),
    "base_model": ("model.path", ""),
    "torch_dtype": ("model.dtype", ""),
    "attn_implementation": ("model.attention", ""),
    "peft_config": ("model.adapter", ""),
    "peft": ("model.adapter", ""),
    "lora": ("model.adapter", "for example {kind: lora, r: 16}"),
    "use_peft": ("model.adapter", "for example {kind: lora, r: 16}"),
    "finetuning_type": ("model.adapter", "null trains all parameters"),
    "lora_r": ("model.adapter.r", ""),
    "lora_rank": ("model.adapter.r", ""),
    "rank": ("model.adapter.r", ""),
    "lora_alpha": ("model.adapter.alpha", ""),
    "lora_dropout": ("model.adapter.dropout", ""),
    "lora_target": ("model.adapter.target", ""),
    "lora_target_modules": ("model.adapter.target", ""),
    "target_modules": ("model.adapter.target", ""),
    "dataset": ("data.train", ""),
    "datasets": ("data.train", ""),
    "dataset_name": ("data.train", ""),
    "train_dataset": ("data.train", ""),
    "train_file": ("data.train", ""),
    "eval_dataset": ("data.eval", ""),
    "val_dataset": ("data.eval", ""),
    "validation": ("data.eval", ""),
    "dataset_format": ("data.format", ""),
    "max_seq_length": ("data.max_length", ""),
    "max_seq_len": ("data.max_length", ""),
    "seq_length": ("data.max_length", ""),
    "sequence_len": ("data.max_length", ""),
    "cutoff_len": ("data.max_length", ""),
    "assistant_only_loss": ("data.train_on", "for example assistant"),
    "completion_only_loss": ("data.train_on", ""),
    "train_on_inputs": ("data.train_on", "all trains the prompts too"),
    "dataloader_num_workers": ("data.num_workers", ""),
    "stage": ("method", "for example sft"),
    "task": ("method", "for example sft"),
}

NOT_NEEDED = {
    "packing": "Samples are never padded where the model allows it; remove the line.",
    "padding_free": "Samples are never padded where the model allows it; remove the line.",
    "per_device_eval_batch_size": "Evaluation cuts its own micro-batches; remove the line.",
    "pad_token": "Padding is masked by position, not by a token; remove the line.",
}


def hint_for_key(name: str, value: Any, here: Sequence[str], everywhere: Sequence[str]) -> str:
    """What the unknown key `name` may have meant, as a sentence and a space; "" if nothing comes near.

    here: the keys of its group. everywhere: all keys of the configuration as dotted paths.
    """
    last = {path: path.rpartition(".")[2] for path in everywhere}
    same = [path for path in everywhere if last[path] == name != "kind" and "." in path]
    if same:
        return f"It exists as {' and '.join(map(repr, same))}. "
    if name.lower() in NOT_NEEDED:
        return f"{NOT_NEEDED[name.lower()]} "
    if name.lower() in ELSEWHERE:
        path, remark = ELSEWHERE[name.lower()]
        return f"Here it is '{path}'{f' ({remark})' if remark else ''}. "
    if close := get_close_matches(name, here, n=1, cutoff=0.6):
        return f"Did you mean '{close[0]}'? "
    if isinstance(value, dict):  # what is in a group says more than another key that sounds like it
        inner = ((key, hint_for_key(key, one, (), everywhere)) for key, one in value.items())
        return next((f"'{key}' in it: {hint[0].lower()}{hint[1:]}" for key, hint in inner if hint), "")
    if close := get_close_matches(name, last.values(), n=1, cutoff=0.75):
        return f"Did you mean '{next(path for path in everywhere if last[path] == close[0])}'? "
    return ""


def hint_for_argument(name: str, known: Iterable[str]) -> str:
    """The same for a Python keyword argument, where groups do not matter."""
    known = list(known)
    path, remark = ELSEWHERE.get(name.lower(), ("", ""))
    if (argument := path.rpartition(".")[2]) in known:
        return f"Here it is '{argument}'{f' ({remark})' if remark else ''}. "
    if name.lower() in NOT_NEEDED:
        return NOT_NEEDED[name.lower()].replace("the line", "it") + " "
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean '{close[0]}'? " if close else ""
