"""headprune roles: what every head of a model does, with controls and intervals."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import DataConfig, RolesConfig
from headprune.context import Context
from headprune.data.read import digest_of_data, refuse_missing_file
from headprune.evaluation.refusals import refuse_other_tokenizer
from headprune.io.figures import SUFFIXES, save
from headprune.io.outputs import claims_output, whole_folder
from headprune.model.attention import attention_of, of_kinds, refuse_unknown_kinds
from headprune.model.loading import load_tokenizer
from headprune.model.open import load
from headprune.model.refusals import refuse_without_text
from headprune.role import ROLES, Role
from headprune.role.against import changes
from headprune.role.collection import watch
from headprune.role.contribution import Contributions, with_contributions
from headprune.role.effects import effects
from headprune.role.hidden import hidden_input
from headprune.role.inputs import loss_batches, repeated_inputs, text_input, token_classes
from headprune.role.labels import labelled
from headprune.role.parsed import baselines, parsed_input
from headprune.role.pictures import roles_figure, scores_figure
from headprune.role.spec import Source
from headprune.schemas.manifest import utc_now, versions
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.roles import (
    ROLES_FILE,
    ModuleRoles,
    RoleFacts,
    RolesRecord,
    SetEffect,
)


@claims_output("model", "data", "against", "config.trees")
def roles(
    model: str,
    output: Path,
    data: DataConfig,
    config: RolesConfig = RolesConfig(),
    against: str | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> RolesRecord:
    """Measures what heads do, and writes ``roles.json`` and its pictures to ``output``.

    Args:
        model: Folder or hub id.
        output: The folder; it appears whole or not at all.
        data: Where the text comes from.
        config: How much of it is read, and how it is judged.
        against: The original of a cut model, to say what became of its roles.
        overwrite: Replace an existing output.
        context: What it runs in.

    Raises:
        HeadpruneError: If model and data do not fit, or a module gives no attention weights.
    """
    refuse_unknown_kinds(config.attention)
    refuse_missing_file(data.source)
    places = [model] if against is None else [model, against]
    remote = context.allowed.trust_remote_code
    tokenizers = [load_tokenizer(place, trust_remote_code=remote) for place in places]
    if against is not None:
        refuse_other_tokenizer(tokenizers[0], tokenizers[1], places)
    found: list[tuple[ModelIdentity, RolesFound]] = []
    for place in places:  # one after the other: only one is in memory
        # what the loss says is asked of the model alone
        asked = config.model_copy(update={"ablation_tokens": 0}) if found else config
        context.stage(f"loading '{place}'")
        net, identity = load(place, config.dtype, context.allowed)
        refuse_without_text(net, "roles")
        found.append((identity, roles_of(net, tokenizers[0], data, asked, context)))
        del net
    (identity, now), *originals = found
    trees = config.trees
    record = RolesRecord(
        created=utc_now(),
        versions=versions(),
        model=identity,
        data=data,
        data_sha256=digest_of_data(data) if Path(data.source).exists() else None,
        trees_sha256=trees and digest_of_data(DataConfig(source=trees)),
        settings=config,
        tokens=now.tokens,
        roles={name: _facts(name) for name in ROLES},
        modules=now.modules,
        sets=now.sets,
        against=originals[0][0] if originals else None,
        original=originals[0][1].modules if originals else (),
        changes=changes(originals[0][1].modules, now.modules) if originals else {},
    )
    with whole_folder(output) as folder:
        text = record.model_dump_json(indent=1) + "\n"
        (folder / ROLES_FILE).write_text(text, encoding="utf-8")
        context.stage("drawing")
        for name, figure in {
            "roles": roles_figure(record),
            "scores": scores_figure(record),
        }.items():
            for suffix in SUFFIXES:
                save(figure, folder / f"{name}{suffix}")
    return record


@dataclass(frozen=True)
class RolesFound:
    """What was found of a model.

    Attributes:
        modules: What its heads do.
        tokens: Tokens of text that said so.
        sequences: Sequences that these are in.
        sets: What all heads of a role do to the loss, where that was asked for.
    """

    modules: tuple[ModuleRoles, ...]
    tokens: int
    sequences: int
    sets: dict[str, SetEffect]


def roles_of(
    net: PreTrainedModel,
    tokenizer: Any,
    data: DataConfig,
    config: RolesConfig,
    context: Context,
) -> RolesFound:
    """What the heads of a loaded model do.

    Args:
        net: The model.
        tokenizer: Its tokenizer.
        data: Where the text comes from.
        config: How much of it is read, and how it is judged.
        context: What it runs in.
    """
    attentions = of_kinds(attention_of(net), config.attention)
    text, tokens = text_input(net, tokenizer, data, config)
    twice, other = repeated_inputs(net, tokenizer, config)
    batches = loss_batches(net, tokenizer, data, config) if config.ablation_tokens else []
    trees = parsed_input(net, tokenizer, config)
    if config.needle_lengths:
        context.stage("looking for needles")
    contexts = hidden_input(net, tokenizer, data, config)
    classes = token_classes(tokenizer)
    context.stage("reading text")
    norms = Contributions(net, attentions)
    seen = watch(net, attentions, text, _on("text"), classes, context.step, norms)
    context.stage("reading random tokens twice")
    again = watch(net, attentions, twice, _on("repeated"), classes, context.step)
    context.stage("reading the control")
    others = {name: role for name, role in ROLES.items() if role.control == "unrepeated"}
    control = watch(net, attentions, other, others, classes, context.step)
    found = {**seen.found, **again.found}
    controls = {**seen.controls, **again.controls, **control.found}
    if trees is not None:
        context.stage("reading parsed sentences")
        parsed = watch(net, attentions, trees, _on("trees"), classes, context.step)
        found |= parsed.found
        controls |= {**parsed.controls, **baselines(parsed, trees)}
    if contexts is not None:
        context.stage("reading contexts with needles")
        copied = watch(net, attentions, contexts, _on("needles"), classes, context.step)
        found |= copied.found
        controls |= copied.controls
    context.stage("resampling")
    modules = labelled(attentions, found, controls, config, context.step)
    modules = with_contributions(modules, norms)
    sets: dict[str, SetEffect] = {}
    if batches:
        context.stage("taking out every head, and the heads of every role")
        modules, sets = effects(net, attentions, modules, batches, config, context.step)
    sequences = sum(len(batch["input_ids"]) for batch in text.batches)
    return RolesFound(modules, tokens, sequences, sets)


def _on(source: Source) -> dict[str, Role]:
    return {name: role for name, role in ROLES.items() if role.on == source}


def _facts(name: str) -> RoleFacts:
    role = ROLES[name]
    return RoleFacts(**{field: getattr(role, field) for field in RoleFacts.model_fields})
