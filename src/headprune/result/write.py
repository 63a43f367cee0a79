"""The one way out: an edit becomes a folder, read back and proven."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from headprune import memory
from headprune.config import ProofOption, Writing
from headprune.context import Context
from headprune.errors import CheckpointError
from headprune.io import hub
from headprune.io.folders import COMPANIONS, copy_companions, hashing
from headprune.io.outputs import whole_folder
from headprune.io.shards import Piece, write_shards
from headprune.model import probes
from headprune.model.cost import kv_heads_of
from headprune.model.loading import auto_class_of, remote_code, uneven_heads_are_known
from headprune.model.open import Model, read_model
from headprune.model.placement import placed
from headprune.model.refusals import passed_over
from headprune.model.residency import residency_of, runs_by_layers
from headprune.model.skeleton import Names, Unmapped
from headprune.model.stored import StoredDtypes, identifying
from headprune.placements import ROOM, Placement, asked_placement, too_large
from headprune.result import equivalence, left_alone, tensors
from headprune.result.card import inherit_metadata, write_card
from headprune.result.engines import engines_of, shapes_in
from headprune.result.folder import ModelFolder
from headprune.schemas.manifest import (
    CARD,
    HISTORY,
    Manifest,
    contents,
    read_lineage,
    write_manifest,
)
from headprune.schemas.plan import ModelIdentity, Plan, Shape
from headprune.schemas.records import Done, Heads, Merging, ModelChoice, Pruning, Refit
from headprune.surgery.cut import Cut, cut_heads, fold_gates, resolve
from headprune.surgery.edit import Edit, Tensors, put, replaced, written
from headprune.surgery.streamed import cut_pieces
from headprune.surgery.transfer import native_twin, twin_of

# rounding is amplified more where texts are decoded than in one pass: 13 times in SmolLM2-135M
_SPARE = 100.0
PROOF_ROOM = 1.1  # times the weights, as measured: one model at a time, and a few outputs


@dataclass(frozen=True)
class Pruned(ModelFolder):
    """A written and proven result.

    Attributes:
        output: The folder.
        plan: The heads that stay.
        manifest: The record in the folder.
        warnings: Likely mistakes and unknowns, a sentence each.
    """

    output: Path
    plan: Plan
    manifest: Manifest
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """For ``--json``: the manifest, and the warnings."""
        return {**self.manifest.model_dump(mode="json"), "warnings": list(self.warnings)}


@dataclass(frozen=True)
class Changes:
    """The part of the manifest that the command knows.

    Attributes:
        done: The kind of change.
        refit: The refit of W_O, if there was one.
        choice: The candidates of ``compress``.
        history: The history file of a healing.
    """

    done: Done
    refit: Refit | None = None
    choice: ModelChoice | None = None
    history: Path | None = None


@dataclass(frozen=True)
class Proposal:
    """An edit with its record, ready to be tried or written.

    Attributes:
        edit: The change.
        changes: Its record.
        warnings: Sentences for the user.
    """

    edit: Edit
    changes: Changes
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Result:
    """A model cut in memory or on the meta device, and the tensors to write.

    Attributes:
        net: The model, cut.
        pieces: Its tensors on disk, each with its source.
        facts: The part of the manifest that the model knows.
    """

    net: PreTrainedModel
    pieces: list[Piece]
    facts: dict[str, Any]


def write(
    model: Model,
    edit: Edit,
    output: Path,
    changes: Changes,
    writing: Writing = Writing(),
    context: Context = Context(),
    expected: equivalence.Expectation | None = None,
) -> Pruned:
    """Write an edited model shard by shard, read it back, and compare it with the edit in memory.

    A checkpoint is cut in memory if loading fuses or splits its tensors.

    Args:
        model: The model; its nets are spent.
        edit: The change.
        output: Folder to write; it appears whole or not at all.
        changes: The record of the command.
        writing: Element types, kind of proof, size of shards.
        context: Progress and the record of the command.
        expected: Outputs of the edited model, where several processes measured them.

    Raises:
        CheckpointError: If a file cannot be read or written.
        ProofError: If the result does not compute as the edited model.
    """
    source, stored = model.identity, model.result_dtypes(writing.out_dtype)
    takes = ROOM * sum(_wide(weight) for weight in model.skeleton.parameters())
    why_tensors = None
    if not edit.tensors and writing.proof is ProofOption.AUTO:
        why_tensors = _why_tensors(model, takes)
    result: _Result | None = None
    try:
        result = _cut_on_disk(model, edit, stored)
    except Unmapped as why:
        if writing.proof is ProofOption.TENSORS:
            raise CheckpointError(
                f"--config proof=tensors: {why} Such a model is cut in memory; leave out proof."
            ) from None
    compares = writing.proof is not ProofOption.TENSORS and why_tensors is None
    residency = None
    if expected is None and (compares or result is None):
        wide = model.widened(by_layers=result is not None)
        needed = "" if wide.by_layers else _memory_needed(takes)
        context.stage(f"probing the gated original{needed}")
        if wide is not model:
            model.release()
            model = wide
        net = model.net
        stored = model.result_dtypes(writing.out_dtype)  # refuses an overflow
        residency = residency_of(net)  # holds the written weights
        with replaced(net, edit.tensors):
            expected, cuts = equivalence.expect_stored(net, edit.cuts(net), stored)
            now = written(net, tuple(edit.tensors))
        if result is None:
            if residency is not None:
                raise CheckpointError(
                    f"placement=layers: '{model.source}' is not written tensor by tensor. Use "
                    "--config placement=whole."
                )
            result = _cut_in_memory(model, now, cuts, edit.plan, stored)
        else:
            result = replace(result, pieces=_with_tensors(result, now, folded=True))
            if residency is not None:
                net.to("meta")  # the reloaded model takes its memory
        del net, cuts, now
    elif edit.tensors:
        assert result is not None
        result = replace(result, pieces=_with_tensors(result, edit.tensors, folded=False))
    assert result is not None  # else it was cut in memory
    model.release()
    order = _Order(model, source, edit.plan, output, stored, changes, writing)
    pruned = _written(result, order, context, expected)
    del residency
    warnings = (*pruned.warnings, *([why_tensors] if why_tensors else []))
    return replace(pruned, warnings=warnings)


@dataclass(frozen=True)
class _Order:
    model: Model
    identity: ModelIdentity
    plan: Plan
    output: Path
    stored: StoredDtypes
    changes: Changes
    writing: Writing


def cut_again(
    model: Model, plan: Plan, stored: StoredDtypes
) -> tuple[PreTrainedModel, list[Piece]]:
    """Cut a model, and return it with its tensors to write, for a second proof."""
    edit = Edit(plan)
    try:
        result = _cut_on_disk(model, edit, stored)
    except Unmapped:
        result = _cut_in_memory(model, {}, fold_gates(edit.cuts(model.net)), plan, stored)
    return result.net, result.pieces


def _cut_on_disk(model: Model, edit: Edit, stored: StoredDtypes) -> _Result:
    """Cut the skeleton, and name the part of the checkpoint that every tensor is.

    Raises:
        Unmapped: If a tensor is fused or split when the model is loaded.
    """
    net = model.skeleton
    if net.device.type != "meta":
        raise Unmapped("Its output projections are no tensors of the checkpoint.")
    cuts = edit.cuts(net)
    if twin_of(net, cuts) is not None:
        raise Unmapped("The result is of another class.")
    before = counts(net, cuts)
    aliases = {id(net.get_parameter(name)): name for name in edit.tensors}
    names = {
        name: aliases[id(parameter)]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if id(parameter) in aliases
    }
    pieces, shape = cut_pieces(net, cuts, stored, model.tensors)
    pieces = [replace(piece, live=names.get(piece.live or "", piece.live)) for piece in pieces]
    if not edit.tensors.keys() <= {piece.live for piece in pieces}:
        raise Unmapped("A replaced weight is no tensor of the checkpoint.")
    return _Result(net, pieces, described(net, edit.plan, shape, before, cuts))


def _cut_in_memory(
    model: Model, now: Tensors, cuts: list[Cut], plan: Plan, stored: StoredDtypes
) -> _Result:
    """Cut the model itself; weights that stay as they are come from its files."""
    net = model.net
    whole = {n: weakref.ref(t) for n, t in net.state_dict(keep_vars=True).items()}
    put(net, now)
    before = counts(net, cuts)
    facts = described(net, plan, cut_heads(net, cuts), before, cuts)
    twin = native_twin(net)
    if twin is not None:
        net, facts = twin, {**facts, "shape": Shape.NATIVE, "auto_class": auto_class_of(twin)}
    computed = {name: tensor.dtype for name, tensor in net.state_dict().items()}
    stored.cast(net)
    names = Names.of(net)
    pieces = {
        name: Piece(name, None, tensor, None, tensor.dtype, tensor.dtype)
        for name, tensor in names.tensors.items()
    }
    for live, tensor in net.state_dict(keep_vars=True).items():
        with suppress(Unmapped):
            stays = live in whole and whole[live]() is tensor
            if stays:
                source = names.source(net, live, model.tensors)
                name = names.disk[live]
                pieces[name] = Piece(name, live, source, None, computed[live], tensor.dtype)
    return _Result(net, [*pieces.values()], facts)


def _with_tensors(result: _Result, tensors: Tensors, folded: bool) -> list[Piece]:
    """Return the pieces with replaced sources, which have taken up their gates if ``folded``."""
    pieces = []
    for piece in result.pieces:
        source = tensors.get(piece.live or "")
        if source is not None:
            kept = piece.kept
            if folded and kept is not None:
                kept = replace(kept, scale=None)
            computed = source.dtype if isinstance(source, Tensor) else piece.computed
            piece = replace(piece, source=source, kept=kept, computed=computed)
        pieces.append(piece)
    return pieces


def _written(
    result: _Result,
    order: _Order,
    context: Context,
    expected: equivalence.Expectation | None,
) -> Pruned:
    """Write the tensors of a result, and compare outputs, or tensors where none are expected."""
    model, net, facts, pieces = order.model, result.net, result.facts, result.pieces
    with identifying(model.source) as parent, whole_folder(order.output) as folder:
        context.stage("writing")
        with uneven_heads_are_known():
            same = type(net.config) is type(model.config)
            order.stored.save(net, folder, model.source if same else None)
        size = order.writing.max_shard_size
        write_shards(pieces, folder, facts["parameters"][1], size, context.step)
        _take_over(folder, order, vars(net).get("generation_config"))
        left_out = passed_over(net, model.tensors)
        layout = {path: Heads(**heads) for path, heads in facts["layout"].items()}
        facts["engines"] = engines_of(net, shapes_in(layout, facts["shape"]))
        context.stage("verifying the folder")
        with hashing(folder, contents(folder)) as files:
            dtype = "auto" if expected is None else expected.dtype
            reread = read_model(folder, dtype, model.allowed)
            reread.by_layers = model.by_layers
            source = source_folder(model.source)
            left_alone.refuse_other_settings(source, model.config, net.config, folder)
            left_alone.refuse_other_files(source, folder)
            facts["tensor_proof"] = tensors.compare(reread, pieces, context.step)
            if expected is not None:
                pieces.clear()
                net.to("meta")  # as above, where it was cut in memory
                facts |= _proven_outputs(reread, expected)
            sizes = tuple(sum(t.bytes for t in one.tensors.values()) for one in (model, reread))
            facts |= {"parent": parent(), "files": files(), "weight_bytes": sizes}
        return _finished(folder, order, context, facts, left_out)


def counts(net: PreTrainedModel, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Parameters and KV heads of a model."""
    return net.num_parameters(), sum(kv_heads_of(net, cut.attention) for cut in cuts)


def described(
    net: PreTrainedModel,
    plan: Plan,
    shape: Shape,
    before: tuple[int, int],
    cuts: Sequence[Cut],
) -> dict[str, Any]:
    """Return the manifest of a cut model.

    Args:
        net: The model, after the cut.
        plan: The heads that stay.
        shape: How it must be stored.
        before: Its ``counts`` before the cut.
        cuts: The heads that went.
    """
    parameters, kv_heads = zip(before, counts(net, cuts), strict=True)
    return {
        "shape": shape,
        "auto_class": auto_class_of(net),
        "query_heads": (plan.query_heads, plan.kept_heads),
        "kv_heads": kv_heads,
        "parameters": parameters,
        "layout": {cut.attention.path: cut.heads_left() for cut in cuts},
    }


def _take_over(folder: Path, order: _Order, generation: GenerationConfig | None) -> None:
    """Put config, plan and history beside the weights of a result.

    Args:
        folder: The result.
        order: The job of the writer.
        generation: The generation config, for the new counts of heads.
    """
    source = source_folder(order.model.source)
    copy_companions(source, folder)
    for file in remote_code(order.model.config):
        shutil.copyfile(file, folder / file.name)
    _renumber_alignment(folder / "generation_config.json", generation)
    inherit_metadata(source, folder, order.model.source)
    order.plan.write(folder / "plan.json")
    if order.changes.history is not None:
        shutil.copyfile(order.changes.history, folder / HISTORY)


def _renumber_alignment(file: Path, generation: GenerationConfig | None) -> None:
    """Has a copied file name the heads that ``cut_heads`` left of those it names."""
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    left = getattr(generation, "alignment_heads", None)
    if settings.get("alignment_heads") == left:
        return
    settings.pop("alignment_heads", None)
    if left is not None:
        settings["alignment_heads"] = left
    file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _proven_outputs(reread: Model, expected: equivalence.Expectation) -> dict[str, Any]:
    """Compare the outputs of a result with the expected ones, for the manifest.

    Raises:
        ProofError: If they differ.
    """
    reloaded = probes.probe(placed(reread.weighted()), expected.inputs)
    return {
        "proof": equivalence.conclude(expected, reloaded),
        "probe": equivalence.sample(expected.inputs, expected.wanted),
    }


def _finished(
    folder: Path,
    order: _Order,
    context: Context,
    facts: dict[str, Any],
    left_out: Sequence[str],
) -> Pruned:
    """Write the manifest and the card of a result."""
    model, changes = order.model, order.changes
    manifest = write_manifest(
        folder,
        made_by=context.made_by,
        source=order.identity,
        lineage=read_lineage(source_folder(model.source)),
        dtype=order.stored.names,
        done=changes.done,
        refit=changes.refit,
        choice=changes.choice,
        **facts,
    )
    write_card(folder, order.output.name, order.plan, manifest)
    warnings = tuple(_said_of(folder, manifest, left_out))
    return Pruned(order.output, order.plan, manifest, warnings)


def _said_of(folder: Path, manifest: Manifest, left_out: Sequence[str]) -> Iterator[str]:
    """Return sentences that a user of the result should know."""
    heads, kv_heads = manifest.query_heads, manifest.kv_heads
    same = heads[0] == heads[1] and kv_heads[0] == kv_heads[1]
    if same and isinstance(manifest.done, Pruning | Merging):
        yield "Nothing was removed or merged: the result has all heads of its source."
    if (folder / "custom_generate").is_dir():
        yield (
            "The code in custom_generate/ was copied, not run: transformers runs it when it loads "
            "the result with trust_remote_code=True."
        )
    if left_out:
        yield (
            f"Not in the result: {len(left_out)} of the checkpoint's tensors, which the class of "
            f"transformers passes over by design ('{left_out[0]}' is the first)."
        )
    before, after = manifest.weight_bytes
    if 0 < before < after:
        yield (
            f"The weights take {after:,} bytes, the original's {before:,}: they are "
            f"written in {manifest.dtype}."
        )


def refuse_unprovable(model: Model, plan: Plan) -> None:
    """Refuses, before long work, a plan whose proof would show nothing.

    Raises:
        ProofError: If rounding hides what one head contributes.
    """
    _refuse_unprovable(model.widened().net, plan)
    gc.collect()  # a model that runs layer by layer refers to itself


def _refuse_unprovable(net: PreTrainedModel, plan: Plan) -> None:
    if net.dtype not in equivalence.TOLERANCE:
        return  # there is no second one to widen; the proof itself says so
    cuts = resolve(plan.model_copy(update={"model": None}), net, ragged=True)
    if equivalence.expect(net, cuts, decoded=False).inconclusive(spare=_SPARE) is not None:
        equivalence.expect(net, cuts).refuse_inconclusive()


def source_folder(model: str | Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    with hub.asked_once(model):
        return Path(snapshot_download(str(model), allow_patterns=["*.json", CARD, *COMPANIONS]))


def _wide(weight: Tensor) -> int:
    """Return the bytes of a weight in the type of a proof."""
    return weight.numel() * torch.promote_types(weight.dtype, torch.float32).itemsize


def _memory_needed(takes: float) -> str:
    """Return the memory of a proof, for the stage; nothing for little, or a layer at a time."""
    weights = int(takes / ROOM)
    placement, needed = asked_placement(), PROOF_ROOM * weights / 1e9
    layers = placement is Placement.LAYERS
    if layers or (placement is Placement.AUTO and too_large(weights)) or needed < 0.1:
        return ""
    return f" (takes about {needed:.1f} GB of memory)"


def _why_tensors(model: Model, needed: float) -> str | None:
    """Return why only tensors are compared; None where memory suffices, or layers come and go."""
    free = memory.available()
    if free is None or needed <= free:
        return None
    if asked_placement() is not Placement.WHOLE and runs_by_layers(model.skeleton, model.tensors):
        return None
    return (
        f"No outputs were compared: that takes {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free. Every tensor was (--config proof=tensors)."
    )
