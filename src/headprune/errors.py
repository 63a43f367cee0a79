"""Errors that a user can act on.

Every message names the setting, the finding and the remedy. The command line prints it and exits
with ``exit_code``. A traceback means a bug of headprune.
"""

from __future__ import annotations


class HeadpruneError(Exception):
    """The user's input cannot be used as it is."""

    exit_code = 2


class FamilyError(HeadpruneError):
    """The model's family, or a setting of its config, is not supported."""


class PlanError(HeadpruneError):
    """A plan does not fit the model, or its goal cannot be saved."""


class DataError(HeadpruneError):
    """The examples cannot be read, or there are too few of them."""


class CheckpointError(HeadpruneError):
    """A model or gates folder cannot be read or written."""


class TrainingError(HeadpruneError):
    """A training reached numbers that are not finite; nothing was written."""

    exit_code = 1


class Interrupted(HeadpruneError):
    """The user stopped a training; it can resume from its last checkpoint."""

    exit_code = 130


class ProofError(HeadpruneError):
    """The cut model does not compute as the gated original; nothing was written."""

    exit_code = 1


class HeadpruneWarning(UserWarning):
    """A part of the input is left out or likely a mistake; the command continues."""
