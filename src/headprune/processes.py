"""Several processes, one per device, as ``accelerate launch`` and ``torchrun`` start them.

Every process holds the whole model, or a shard of it (``model.sharding``), and takes its part of a
batch. ``Trainer`` averages their gradients. The main process alone writes and prints, and
broadcasts its results.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar, cast

from headprune import devices
from headprune.errors import HeadpruneError

if TYPE_CHECKING:
    from accelerate import PartialState

Result = TypeVar("Result")

_SPLITTING = {
    "FSDP": "FSDP",
    "DEEPSPEED": "DeepSpeed",
    "MEGATRON_LM": "Megatron-LM",
    "PARALLELISM_CONFIG": "a parallelism of accelerate, such as tensor parallelism",
}
PATIENCE_S = 6 * 3600  # others wait while the main process proves and writes a model


def count() -> int:
    """Return the number of processes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Return the number of this process; 0 is the main one."""
    return int(os.environ.get("RANK", "0"))


def is_main() -> bool:
    """Return whether this process writes and prints."""
    return rank() == 0


def refuse_without_launcher() -> None:
    """Refuse settings that a launcher left behind.

    Raises:
        HeadpruneError: Naming the variables of the environment.
    """
    if count() > 1 and "MASTER_ADDR" not in os.environ:
        raise HeadpruneError(
            f"WORLD_SIZE={count()} is set, as torchrun sets it, and MASTER_ADDR is not. To run one "
            "process: unset WORLD_SIZE RANK LOCAL_RANK. To run several: torchrun "
            f"--nproc-per-node {count()} -m headprune ..."
        )


def share_of(batch_size: int) -> int:
    """Return the sequences of a batch for each process.

    Raises:
        HeadpruneError: If they cannot be shared evenly, or the launcher would split the model.
    """
    for name, settings in _SPLITTING.items():
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise HeadpruneError(
                f"The launcher asks for {settings}, which splits a model in its own way. Use "
                "'torchrun --nproc-per-node N -m headprune ...': each process has the whole model, "
                "or a part with --shard."
            )
    share, rest = divmod(batch_size, count())
    if rest or not share:
        raise HeadpruneError(
            f"A batch of {batch_size} sequences cannot be shared evenly by {count()} processes; "
            f"make --batch-size a multiple of {count()}."
        )
    return share


def on_main(work: Callable[[], Result]) -> Result:
    """Wait for all processes, then call ``work`` in the main one alone.

    Returns:
        Its result, in every process.

    Raises:
        HeadpruneError: Its error, in every process.
    """
    if count() == 1:
        return work()
    from torch.distributed import broadcast_object_list

    _state().wait_for_everyone()
    result: list[Result | HeadpruneError | None] = [None]
    if is_main():
        try:
            result[0] = work()
        except HeadpruneError as error:
            result[0] = error
    broadcast_object_list(result, src=0)
    if isinstance(result[0], HeadpruneError):
        raise result[0]
    return cast(Result, result[0])


def mean(values: list[float]) -> list[float]:
    """Return the mean over all processes, number by number."""
    if count() == 1:
        return values
    import torch
    from accelerate.utils import reduce

    # MPS and some others have no float64
    here = torch.tensor(values, dtype=torch.float32, device=_state().device)
    averaged: list[float] = reduce(here, "mean").tolist()
    return averaged


def gathered(value: Result) -> list[Result]:
    """Return the value of each process, in order."""
    if count() == 1:
        return [value]
    from torch.distributed import all_gather_object

    _state()
    values: list[Result | None] = [None] * count()
    all_gather_object(values, value)
    return cast(list[Result], values)


def join() -> None:
    """Make the process group, where several processes have none yet."""
    if count() > 1:
        _state()


def lost(error: BaseException) -> bool:
    """Return whether an error is the loss of another process."""
    # gloo has no class of its own for it; torch's is not imported for --help
    by_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
    return by_gloo or any(kind.__name__ == "DistError" for kind in type(error).__mro__)


def _state() -> PartialState:
    """Return the process group, made on first use; ``Trainer`` uses it too."""
    from accelerate import PartialState

    refuse_without_launcher()
    on_cpu = devices.chosen().type == "cpu"
    state = PartialState(cpu=on_cpu, timeout=timedelta(seconds=PATIENCE_S))
    if state.num_processes != count():  # each would train on its own
        raise HeadpruneError(
            f"{count()} processes were started, but accelerate sees {state.num_processes} of them "
            f"on {state.device}. Start them with torchrun or accelerate launch, one per GPU."
        )
    return state
