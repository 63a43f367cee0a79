"""Which names of a checkpoint a model's class ties to others."""

from __future__ import annotations

from pathlib import Path

from headprune.errors import CheckpointError
from headprune.model.loading import load_config, native_of
from headprune.model.sizes import without_weights


def tied_names(folder: Path) -> dict[str, str]:
    """Names whose tensors loading ties to those of other names, by the class of the config.

    Args:
        folder: With a config.json.

    Returns:
        Name to the name that it is tied to. Empty for a class that transformers does not have, or
        cannot build from this config: loading says why.
    """
    try:
        config = load_config(folder)
        model = without_weights(native_of(config), config)
    except CheckpointError:
        return {}
    return dict(model.all_tied_weights_keys)
