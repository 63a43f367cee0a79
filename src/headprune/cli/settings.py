"""Settings of a command that come from a YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headprune.declaration import Command
from headprune.errors import HeadpruneError
from headprune.io.parsing import read_yaml
from headprune.registry import did_you_mean


def read_settings(path: Path, command: Command[Any, Any]) -> dict[str, Any]:
    """Reads the section of a command, without the settings that are not set.

    Args:
        path: The file; a section is named as the command, with a dash or an underscore.
        command: The command.

    Raises:
        HeadpruneError: If the file is missing, has no such section, or misspells a setting; near
            misses are named.
    """
    try:
        content = read_yaml(path, HeadpruneError)
    except FileNotFoundError:
        raise HeadpruneError(f"--config: there is no file '{path}'.") from None
    sections = content if isinstance(content, dict) else {}
    name = command.section
    section = sections.get(name, sections.get(command.name))
    if not isinstance(section, dict):
        others = [str(key)[:60] for key in sections if key != name]
        near = next((f" It has '{k}'.{d}" for k in others if (d := did_you_mean(k, [name]))), "")
        raise HeadpruneError(f"--config {path}: it has no section '{name}' with settings.{near}")
    settings = {str(key): value for key, value in section.items() if value is not None}
    _refuse_unknown(settings, command)
    return settings


def _refuse_unknown(settings: dict[str, Any], command: Command[Any, Any]) -> None:
    if "trust_remote_code" in settings:
        raise HeadpruneError(
            "A file cannot allow code that comes with a model: leave out 'trust_remote_code', and "
            "give --trust-remote-code if you trust that code."
        )
    for key in settings:
        if key not in command.options.model_fields:
            raise HeadpruneError(f"There is no setting '{key}'.{command.options.near(key)}")
