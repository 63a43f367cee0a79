"""Settings of transformers.Trainer."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from headprune import devices, processes


def resumable_arguments(
    folder: Path, steps: int, batch_size: int, seed: int, save_every: int | None, **others: Any
) -> TrainingArguments:
    """Trainer's settings: checkpoints in ``folder``, nothing printed, one device a process.

    Raises:
        HeadpruneError: If the batch cannot be shared by the processes that were started.
    """
    device, alone = devices.chosen(), processes.count() == 1
    settings = dict[str, Any](
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=processes.share_of(batch_size),
        seed=seed,
        save_strategy="steps",
        save_only_model=True,  # asked for of shards; what is saved is ours to say
        save_steps=save_every or max(1, steps // 10),
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=device.type == "cuda",
        ddp_timeout=processes.PATIENCE_S,
        use_cpu=device.type == "cpu",
        **others,
    )
    with _told_accelerate(device) if alone else nullcontext():  # of several each has its own
        arguments = TrainingArguments(**settings)
    if alone:  # Trainer would take the first GPU
        arguments.__dict__["_setup_devices"] = device
    # several GPUs are for accelerate launch; DataParallel would copy the model away from its hooks
    arguments._n_gpu = min(1, arguments.n_gpu)
    return arguments


@contextmanager
def _told_accelerate(device: torch.device) -> Iterator[None]:
    """Has accelerate take a device, which it reads from the environment."""
    name = "ACCELERATE_TORCH_DEVICE"
    before = os.environ.get(name)
    os.environ[name] = str(device)
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
