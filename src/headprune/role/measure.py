"""headprune roles: what every head of a model does, with controls and intervals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from headprune.config import DataConfig, RolesConfig
from headprune.context import Context
from headprune.data.read import digest_of_data
from headprune.evaluation.refusals import refuse_other_tokenizer
from headprune.io.figures import SUFFIXES, save
from headprune.io.outputs import claims_output, whole_folder
from headprune.model.attention import attention_of, of_kinds, refuse_unknown_kinds
from headprune.model.loading import load_tokenizer
from headprune.model.open import load
from headprune.model.refusals import refuse_without_text
from headprune.role.ablation import effects
from headprune.role.inputs import (
    Reading,
    loss_batches,
    needles_input,
    repeated_inputs,
    text_input,
    token_classes,
    trees_input,
)
from headprune.role.pictures import roles_figure, scores_figure
from headprune.role.scores import changes, scored
from headprune.role.table import ROLES, Role, offset_control
from headprune.role.watch import Tallies, watch
from headprune.role.writing import Contributions
from headprune.schemas.manifest import utc_now, versions
from headprune.schemas.plan import ModelIdentity
from headprune.schemas.roles import ROLES_FILE, ModuleRoles, RoleFacts, RolesRecord, SetEffect


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
    """Measure the roles of heads, and write ``roles.json`` and its pictures.

    Args:
        model: Folder or hub id.
        output: The folder; it appears whole or not at all.
        data: The text.
        config: Amounts and levels.
        against: The original of a cut model, to compare with.
        overwrite: Replace an existing output.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If model and data do not fit, or a module gives no attention weights.
    """
    refuse_unknown_kinds(config.attention)
    sources = [model] if against is None else [model, against]
    remote = context.allowed.trust_remote_code
    tokenizers = [load_tokenizer(source, trust_remote_code=remote) for source in sources]
    if against is not None:
        refuse_other_tokenizer(tokenizers[0], tokenizers[1], sources)
    measured: list[tuple[ModelIdentity, MeasuredRoles]] = []
    for source in sources:  # one after the other: only one is in memory
        settings = config.model_copy(update={"ablation_tokens": 0}) if measured else config
        context.stage(f"loading '{source}'")
        net, identity = load(source, config.dtype, context.allowed)
        refuse_without_text(net, "roles")
        measured.append((identity, roles_of(net, tokenizers[0], data, settings, context)))
        del net
    (identity, now), *originals = measured
    original = originals[0][1].modules if originals else ()
    record = RolesRecord(
        created=utc_now(),
        versions=versions(),
        model=identity,
        data=data,
        data_sha256=digest_of_data(data) if Path(data.source).exists() else None,
        trees_sha256=config.trees and digest_of_data(DataConfig(source=config.trees)),
        settings=config,
        tokens=now.tokens,
        roles={
            name: RoleFacts.model_validate(role, from_attributes=True)
            for name, role in ROLES.items()
        },
        modules=now.modules,
        sets=now.sets,
        against=originals[0][0] if originals else None,
        original=original,
        changes=changes(original, now.modules) if originals else {},
    )
    with whole_folder(output) as folder:
        text = record.model_dump_json(indent=1) + "\n"
        (folder / ROLES_FILE).write_text(text, encoding="utf-8")
        context.stage("drawing")
        for name, draw in (("roles", roles_figure), ("scores", scores_figure)):
            figure = draw(record)
            for suffix in SUFFIXES:
                save(figure, folder / f"{name}{suffix}")
    return record


@dataclass(frozen=True)
class MeasuredRoles:
    """The roles of a model, and the amount of text behind them."""

    modules: tuple[ModuleRoles, ...]
    tokens: int
    sets: dict[str, SetEffect]


def roles_of(
    net: PreTrainedModel, tokenizer: Any, data: DataConfig, config: RolesConfig, context: Context
) -> MeasuredRoles:
    """Return the roles of a loaded model's heads."""
    attentions = of_kinds(attention_of(net), config.attention)
    text, tokens = text_input(net, tokenizer, data, config)
    twice, unrepeated = repeated_inputs(net, tokenizer, config)
    batches = loss_batches(net, tokenizer, data, config) if config.ablation_tokens else []
    trees = trees_input(net, tokenizer, config)
    if config.needle_lengths:
        context.stage("looking for needles")
    needles = needles_input(net, tokenizer, data, config)
    classes, norms = token_classes(tokenizer), Contributions(net, attentions)
    sums: Tallies = {}
    controls: Tallies = {}

    def read(stage: str, reading: Reading, roles: Mapping[str, Role], **more: Any) -> None:
        context.stage(f"reading {stage}")
        watched = watch(net, attentions, reading, roles, classes, context.step, **more)
        (controls if reading is unrepeated else sums).update(watched.sums)
        controls.update(watched.controls)
        for position, name in watched.sums:
            if ROLES[name].control == "offset":
                controls[position, name] = offset_control(reading.facts, watched.causal[position])

    def on(source: str) -> dict[str, Role]:
        return {name: role for name, role in ROLES.items() if role.on == source}

    read("text", text, on("text"), contributions=norms)
    read("random tokens twice", twice, on("repeated"))
    against = {name: role for name, role in ROLES.items() if role.control == "unrepeated"}
    read("the control", unrepeated, against)
    if trees is not None:
        read("parsed sentences", trees, on("trees"))
    if needles is not None:
        read("contexts with needles", needles, on("needles"))
    context.stage("resampling")
    modules = scored(attentions, sums, controls, config, norms, context.step)
    sets: dict[str, SetEffect] = {}
    if batches:
        context.stage("taking out every head, and the heads of every role")
        modules, sets = effects(net, attentions, modules, batches, config, context.step)
    return MeasuredRoles(modules, tokens, sets)
