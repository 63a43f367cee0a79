"""A model split over processes by FSDP2, as transformers loads it.

Every process reads and keeps its shard of every weight; a layer is whole while it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from headprune import devices, processes
from headprune.errors import HeadpruneError
from headprune.model.loading import from_pretrained

# loading in shards, and a Trainer that averages the gradients of what is beside them
SINCE = {"transformers": "5.19", "torch": "2.8"}


def refuse_to_shard() -> None:
    """Refuse to split models where that cannot work, before anything is loaded.

    Raises:
        HeadpruneError: Naming what is missing.
    """
    if processes.count() == 1:
        raise HeadpruneError(
            "--shard splits a model over processes, and one was started. Use 'torchrun "
            "--nproc-per-node N -m headprune ...', or leave out --shard."
        )
    installed = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name, since in SINCE.items():
        if Version(Version(installed[name]).base_version) < Version(since):
            raise HeadpruneError(
                f"--shard needs {name} {since}, and {installed[name]} is installed. Update it, or "
                "leave out --shard, if every GPU holds the whole model."
            )
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and devices.chosen().type != accelerator.type:
        raise HeadpruneError(
            f"--shard splits a model over accelerators where there are some, and --device is "
            f"{devices.chosen()}. Give --device {accelerator.type}, or leave out --shard."
        )


def load_sharded(model: str | Path, **options: Any) -> PreTrainedModel:
    """Load the shards of this process.

    Args:
        model: Folder or hub id.
        **options: Other arguments of ``headprune.from_pretrained``.
    """
    from transformers.distributed import DistributedConfig

    processes.join()
    config = DistributedConfig(fsdp_size=processes.count())
    net: PreTrainedModel = from_pretrained(model, distributed_config=config, **options)
    return net
