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
from torch import Tensor
from transformers import PreTrainedModel

from headprune import memory
from headprune.config import ProofOption, Writing
from headprune.context import Context
from headprune.errors import CheckpointError, PlanError
from headprune.io.folders import copy_companions, hashing, source_folder
from headprune.io.outputs import whole_folder
from headprune.io.shards import Piece, write_shards
from headprune.model import probes
from headprune.model.cost import KVCache, kv_heads_of, usual_context
from headprune.model.loading import auto_class_of, remote_code, uneven_heads_are_known
from headprune.model.open import Model, read_model
from headprune.model.placement import move_to_device
from headprune.model.refusals import ignored_tensors, quantised_by
from headprune.model.residency import Residency, residency_of, runs_by_layers
from headprune.model.skeleton import Names, Unmapped
from headprune.model.stored import StoredDtypes, identifying
from headprune.placements import ROOM, Placement, asked_placement, too_large
from headprune.proof import equivalence, left_alone, tensors
from headprune.result.card import inherit_metadata, write_card
from headprune.result.engines import engines_of
from headprune.result.folder import ModelFolder
from headprune.schemas.manifest import (
    HISTORY,
    NO_ID,
    LineageStep,
    Manifest,
    contents,
    read_lineage,
    utc_now,
    versions,
    write_manifest,
)
from headprune.schemas.plan import Plan, Shape
from headprune.schemas.proofs import Proof, Sample, TensorProof
from headprune.schemas.records import Done, Heads, Merging, ModelChoice, Pruning, Refit, Window
from headprune.surgery.cut import (
    Cut,
    cut_heads,
    fold_gates,
    resolve,
    result_shape,
    window_of,
)
from headprune.surgery.edit import Edit, Tensors, put, replaced, written
from headprune.surgery.layer_windows import no_layer_windows
from headprune.surgery.streamed import cut_pieces
from headprune.surgery.transfer import native_twin, twin_of

# rounding is amplified more where texts are decoded than in one pass: 13 times in SmolLM2-135M
_ROUNDING_FACTOR = 100.0
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
class _Sizes:
    """The part of the manifest that a cut model knows; fields as there."""

    shape: Shape
    auto_class: str
    query_heads: tuple[int, int]
    kv_heads: tuple[int, int]
    parameters: tuple[int, int]
    kv_cache_bytes: tuple[int, int]
    kv_cache_tokens: int
    layout: dict[str, Heads]
    window: Window | None


@dataclass(frozen=True)
class _Result:
    """A model cut in memory or on the meta device, and the tensors to write.

    Attributes:
        model: The model that it was cut from.
        net: The model, cut.
        pieces: Its tensors on disk, each with its source.
        sizes: Its sizes.
        stored: The element types to write.
        expected: The outputs that it must give; None where only tensors are compared.
        residency: Holds the weights that an edit wrote until they are in their files.
    """

    model: Model
    net: PreTrainedModel
    pieces: list[Piece]
    sizes: _Sizes
    stored: StoredDtypes
    expected: equivalence.Expectation | None = None
    residency: Residency | None = None


@dataclass(frozen=True)
class _Proven:
    """The proof of a folder; fields as of the manifest."""

    tensor_proof: TensorProof
    weight_bytes: tuple[int, int]
    proof: Proof | None = None
    probe: Sample | None = None


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
    source, why_tensors = model.identity, _why_tensors(model, edit, writing.proof)
    compares = why_tensors is None and writing.proof is not ProofOption.TENSORS
    result = _expected(model, edit, writing, context, expected, compares)
    lineage = read_lineage(source_folder(model.source))
    sizes = _with_layer_windows(result.sizes, lineage)
    with identifying(model.source) as parent, whole_folder(output) as folder:
        context.stage("writing")
        _save(result, edit.plan, changes, writing, folder, context)
        context.stage("verifying the folder")
        with hashing(folder, contents(folder)) as files:
            proven = _conclude(result, folder, context)
            unnamed = Manifest(
                id=NO_ID,
                created=utc_now(),
                versions=versions(),
                provenance=context.provenance,
                source=source,
                parent=parent(),
                lineage=lineage,
                dtype=result.stored.names,
                engines=engines_of(result.net, sizes.layout, sizes.shape),
                done=changes.done,
                refit=changes.refit,
                choice=changes.choice,
                files=files(),
                **vars(sizes),
                **vars(proven),
            )
        manifest = write_manifest(folder, unnamed)
        write_card(folder, output.name, edit.plan, manifest)
        warnings = (*_warnings(folder, manifest, result), *filter(None, [why_tensors]))
        return Pruned(output, edit.plan, manifest, warnings)


def _expected(
    model: Model,
    edit: Edit,
    writing: Writing,
    context: Context,
    expected: equivalence.Expectation | None,
    compares: bool,
) -> _Result:
    """Cut a model, and measure what must come out, if outputs are to be compared."""
    takes, result = _bytes_wide(model), None
    try:
        result = _cut_on_disk(model, edit, model.result_dtypes(writing.out_dtype))
    except Unmapped as why:
        if writing.proof is ProofOption.TENSORS:
            raise CheckpointError(
                f"--config proof=tensors: {why} Such a model is cut in memory; leave out proof."
            ) from None
    if result is not None and (expected is not None or not compares):
        model.release()
        pieces = _with_tensors(result, edit.tensors, folded=False)
        return replace(result, pieces=pieces, expected=expected)
    wide = model.to_float32(by_layers=result is not None)
    needed = "" if wide.by_layers else _memory_needed(takes)
    context.stage(f"probing the gated original{needed}")
    if wide is not model:
        model.release()
    net = wide.net
    stored = wide.result_dtypes(writing.out_dtype)  # refuses an overflow
    residency = residency_of(net)
    with replaced(net, edit.tensors):
        expected, cuts = equivalence.expect_stored(net, edit.cuts(net), stored)
        now = written(net, tuple(edit.tensors))
    wide.release()
    if result is not None:
        if residency is not None:
            net.to("meta")  # the reloaded model takes its memory
        pieces = _with_tensors(result, now, folded=True)
        result = replace(result, model=wide, pieces=pieces, stored=stored)
        return replace(result, expected=expected, residency=residency)
    if residency is not None:
        raise CheckpointError(
            f"placement=layers: '{model.source}' is not written tensor by tensor. Use "
            "--config placement=whole."
        )
    return replace(_cut_in_memory(wide, net, now, cuts, edit.plan, stored), expected=expected)


def cut_again(
    model: Model, plan: Plan, stored: StoredDtypes
) -> tuple[PreTrainedModel, list[Piece]]:
    """Cut a model, and return it with its tensors to write, for a second proof."""
    edit = Edit(plan)
    try:
        result = _cut_on_disk(model, edit, stored)
    except Unmapped:
        net = model.net
        result = _cut_in_memory(model, net, {}, fold_gates(edit.cuts(net)), plan, stored)
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
    another = model.is_loaded and type(model.net) is not type(net)  # healing can exchange it
    if another or twin_of(net, cuts) is not None:
        raise Unmapped("The result is of another class.")
    before = counts(net, cuts)
    aliases = {id(net.get_parameter(name)): name for name in edit.tensors}
    names = {
        name: aliases[id(parameter)]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if id(parameter) in aliases
    }
    if model.packed:
        pieces, shape = _carried(model, net, cuts)
    else:
        pieces, shape = cut_pieces(net, cuts, stored, model.tensors)
    pieces = [replace(piece, live=names.get(piece.live or "", piece.live)) for piece in pieces]
    if not edit.tensors.keys() <= {piece.live for piece in pieces}:
        raise Unmapped("A replaced weight is no tensor of the checkpoint.")
    sizes = _sizes(net, edit.plan, shape, before, cuts, stored)
    return _Result(model, net, pieces, sizes, stored)


def _carried(model: Model, net: PreTrainedModel, cuts: Sequence[Cut]) -> tuple[list[Piece], Shape]:
    """Return the packed tensors of a checkpoint; an edit may touch none of them.

    Raises:
        PlanError: If it would.
    """
    if result_shape(cuts, net.config) is not Shape.NATIVE or window_of(cuts) is None:
        why = no_layer_windows(net.config) or "only windows of whole layers leave them as they are."
        raise PlanError(
            f"'{model.source}' is quantised ({quantised_by(model.config)}), and its weights stay "
            f"packed: {why}"
        )
    shape = cut_heads(net, cuts)
    net.config.quantization_config = model.config.quantization_config
    return [Piece.whole(name, tensor) for name, tensor in model.tensors.items()], shape


def _cut_in_memory(
    model: Model,
    net: PreTrainedModel,
    now: Tensors,
    cuts: list[Cut],
    plan: Plan,
    stored: StoredDtypes,
) -> _Result:
    """Cut the loaded model itself; weights that stay as they are come from its files."""
    whole = {n: weakref.ref(t) for n, t in net.state_dict(keep_vars=True).items()}
    put(net, now)
    before = counts(net, cuts)
    sizes = _sizes(net, plan, cut_heads(net, cuts), before, cuts, stored)
    twin = native_twin(net)
    if twin is not None:
        net = twin
        sizes = replace(sizes, shape=Shape.NATIVE, auto_class=auto_class_of(twin))
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
    return _Result(model, net, [*pieces.values()], sizes, stored)


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


def _sizes(
    net: PreTrainedModel,
    plan: Plan,
    shape: Shape,
    before: tuple[int, int, int],
    cuts: Sequence[Cut],
    stored: StoredDtypes,
) -> _Sizes:
    """Return the sizes of a model after a cut, whose ``counts`` were ``before``."""
    parameters, kv_heads, (cached, cached_after) = zip(before, counts(net, cuts), strict=True)
    window, width = window_of(cuts), stored.default.itemsize
    return _Sizes(
        shape=shape,
        auto_class=auto_class_of(net),
        query_heads=(plan.query_heads, plan.kept_heads),
        kv_heads=kv_heads,
        parameters=parameters,
        kv_cache_bytes=(cached * width, cached_after * width),
        kv_cache_tokens=usual_context(net),
        layout=layout_of(cuts),
        window=None if window is None else Window(size=window[0], sinks=window[1]),
    )


def _with_layer_windows(sizes: _Sizes, lineage: Sequence[LineageStep]) -> _Sizes:
    """Return sizes with the windows of layers that a source has by its plain config."""
    last = lineage[-1] if lineage else None
    if last is None or last.window is None or not last.shape is sizes.shape is Shape.NATIVE:
        return sizes
    layout = {
        path: heads.model_copy(update={"window_heads": len(heads.kv_heads)})
        if path in last.layout and last.layout[path].window_heads
        else heads
        for path, heads in sizes.layout.items()
    }
    return replace(sizes, layout=layout, window=sizes.window or last.window)


def layout_of(cuts: Sequence[Cut]) -> dict[str, Heads]:
    """Return the heads of every module; after the cut."""
    return {cut.attention.path: Heads.model_validate(cut.heads_left()) for cut in cuts}


def counts(net: PreTrainedModel, cuts: Sequence[Cut]) -> tuple[int, int, int]:
    """Return a model's parameters, KV heads, and numbers in its cache of the usual context."""
    kv_heads = sum(kv_heads_of(net, cut.attention) for cut in cuts)
    return net.num_parameters(), kv_heads, KVCache.of(net).elements(usual_context(net))


def _save(
    result: _Result, plan: Plan, changes: Changes, writing: Writing, folder: Path, context: Context
) -> None:
    """Write the config, the tensors and the files beside them."""
    model, net = result.model, result.net
    with uneven_heads_are_known():
        same = type(net.config) is type(model.config)
        result.stored.save(net, folder, model.source if same else None)
    parameters, size = result.sizes.parameters[1], writing.max_shard_size
    write_shards(result.pieces, folder, parameters, size, context.step)
    _take_over(folder, model, plan, changes.history, net)


def _conclude(result: _Result, folder: Path, context: Context) -> _Proven:
    """Read a folder back, and compare it with its source and the expected outputs.

    Raises:
        ProofError: If it differs.
    """
    model, net, expected = result.model, result.net, result.expected
    reread = read_model(folder, "auto" if expected is None else expected.dtype, model.allowed)
    reread.by_layers, reread.packed = model.by_layers, model.packed
    source = source_folder(model.source)
    left_alone.refuse_other_settings(source, model.config, net.config, folder)
    left_alone.refuse_other_files(source, folder)
    before, after = (sum(t.bytes for t in one.tensors.values()) for one in (model, reread))
    proven = _Proven(tensors.compare(reread, result.pieces, context.step), (before, after))
    if expected is None:
        return proven
    result.pieces.clear()
    net.to("meta")  # the reloaded model takes its memory
    outputs = probes.probe(move_to_device(reread.weighted()), expected.inputs)
    return replace(
        proven,
        proof=equivalence.conclude(expected, outputs),
        probe=equivalence.sample(expected.inputs, expected.wanted),
    )


def _take_over(
    folder: Path,
    model: Model,
    plan: Plan,
    history: Path | None,
    net: PreTrainedModel,
) -> None:
    """Put plan, history and the source's files beside the weights of a result ``net``."""
    source = source_folder(model.source)
    copy_companions(source, folder)
    for file in remote_code(model.config):
        shutil.copyfile(file, folder / file.name)
    _adapt_generation(folder / "generation_config.json", net)
    inherit_metadata(source, folder, model.source)
    plan.write(folder / "plan.json")
    if history is not None:
        shutil.copyfile(history, folder / HISTORY)


def _adapt_generation(file: Path, net: PreTrainedModel) -> None:
    """Has a copied file name the heads that ``cut_heads`` left of those it names."""
    settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    heads = getattr(vars(net).get("generation_config"), "alignment_heads", None)
    if settings.pop("alignment_heads", None) != heads:
        settings |= {} if heads is None else {"alignment_heads": heads}
        file.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _warnings(folder: Path, manifest: Manifest, result: _Result) -> Iterator[str]:
    """Return sentences that a user of the result should know."""
    left_out = ignored_tensors(result.net, result.model.tensors)
    heads, kv_heads = manifest.query_heads, manifest.kv_heads
    same = heads[0] == heads[1] and kv_heads[0] == kv_heads[1]
    if same and manifest.window is None and isinstance(manifest.done, Pruning | Merging):
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
    if 0 < 1.01 * before < after:  # and not by sink logits
        yield (
            f"The weights take {after:,} bytes, the original's {before:,}: they are "
            f"written in {manifest.dtype}."
        )


def refuse_unprovable(model: Model, plan: Plan) -> None:
    """Refuses, before long work, a plan whose proof would show nothing.

    Raises:
        ProofError: If rounding hides what one head contributes.
    """
    _refuse_unprovable(model.to_float32().net, plan)
    gc.collect()  # a model that runs layer by layer refers to itself


def _refuse_unprovable(net: PreTrainedModel, plan: Plan) -> None:
    if net.dtype not in equivalence.TOLERANCE:
        return  # there is no second one to widen; the proof itself says so
    cuts = resolve(plan.model_copy(update={"model": None}), net, ragged=True)
    if (
        equivalence.expect(net, cuts, decoded=False).inconclusive(rounding_factor=_ROUNDING_FACTOR)
        is not None
    ):
        equivalence.expect(net, cuts).refuse_inconclusive()


def _bytes_wide(model: Model) -> float:
    """Return the memory of a model in the type of a proof."""
    takes: float = ROOM * sum(
        weight.numel() * torch.promote_types(weight.dtype, torch.float32).itemsize
        for weight in model.skeleton.parameters()
    )
    return takes


def _memory_needed(takes: float) -> str:
    """Return the memory of a proof, for the stage; nothing for little, or a layer at a time."""
    weights = int(takes / ROOM)
    placement, needed = asked_placement(), PROOF_ROOM * weights / 1e9
    layers = placement is Placement.LAYERS
    if layers or (placement is Placement.AUTO and too_large(weights)) or needed < 0.1:
        return ""
    return f" (takes about {needed:.1f} GB of memory)"


def _why_tensors(model: Model, edit: Edit, proof: ProofOption) -> str | None:
    """Return why only tensors are compared; None where memory suffices, or outputs must be."""
    if model.packed:
        return (
            "No outputs were compared, as the weights are quantised. Every tensor is the "
            "original's, and the config names the windows."
        )
    needed, free = _bytes_wide(model), memory.available()
    if edit.tensors or proof is not ProofOption.AUTO or free is None or needed <= free:
        return None
    if asked_placement() is not Placement.WHOLE and runs_by_layers(model.skeleton, model.tensors):
        return None
    return (
        f"No outputs were compared: that takes {needed / 1e9:.1f} GB of memory, and "
        f"{free / 1e9:.1f} GB are free. Every tensor was (--config proof=tensors)."
    )
