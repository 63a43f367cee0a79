"""From a plan and a loaded model to a folder: cut, write, reload, compare, describe."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PreTrainedModel

from headprune.config import Writing
from headprune.context import Context, MadeBy
from headprune.exporting.card import inherit_metadata, write_card
from headprune.io import hub
from headprune.io.folders import COMPANIONS, copy_companions, hashing
from headprune.io.outputs import whole_folder
from headprune.model import probes
from headprune.model.identity import identifying
from headprune.model.loading import auto_class_of, uneven_heads_are_known
from headprune.model.opening import as_it_fits
from headprune.model.placement import placed
from headprune.model.precision import widened
from headprune.model.refusals import passed_over
from headprune.model.residency import residency_of
from headprune.model.stored import StoredDtypes, stored_bytes, stored_tensors
from headprune.proof import equivalence
from headprune.schemas.manifest import (
    CARD,
    HISTORY,
    Manifest,
    contents,
    read_lineage,
    write_manifest,
)
from headprune.schemas.plan import ModelIdentity, Plan, Shape
from headprune.schemas.records import Done, Merging, Pruning, Refit
from headprune.surgery.cut import Cut, cut_heads, resolve
from headprune.surgery.transfer import native_twin

# what rounding is amplified more where texts are decoded than in one pass: 13 times in SmolLM2-135M
_SPARE = 100.0


@dataclass(frozen=True)
class Pruned:
    """A finished cut.

    Attributes:
        output: The folder.
        plan: What stayed.
        manifest: The record in the folder.
        warnings: What is likely not meant or not known, a sentence each.
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
    """What a command did to a model, for the record.

    Attributes:
        done: What was done.
        refit: How W_O made up for the heads that went, if it did.
        made_by: The command, if it was one.
        history: The history.jsonl of a healing.
    """

    done: Done
    refit: Refit | None = None
    made_by: MadeBy | None = None
    history: Path | None = None


@dataclass(frozen=True)
class WriteOrder:
    """What is to be written.

    Attributes:
        source: Who the model is.
        origin: Folder or hub id it came from; tokenizer files are taken from there.
        plan: What stays.
        output: Folder to write.
        stored: Element types to write.
        work: What was done to the model, and is done with this cut.
        writing: How.
    """

    source: ModelIdentity
    origin: str | Path
    plan: Plan
    output: Path
    stored: StoredDtypes
    work: Changes
    writing: Writing = Writing()


def write_proven(
    net: PreTrainedModel, cuts: list[Cut], order: WriteOrder, context: Context
) -> Pruned:
    """Cuts a model in memory, writes it and proves the folder; the end of commands that change it.

    Args:
        net: The model, uncut.
        cuts: The plan, resolved on it.
        order: What is written.
        context: What it runs in.

    Raises:
        CheckpointError: If the folder cannot be written.
        ProofError: If the result does not compute what the gated ``net`` computes.
    """
    stored = order.stored
    before = counts(net, cuts)
    context.stage("probing the gated original")
    expected, cuts = equivalence.expect_stored(net, cuts, stored)
    context.stage("cutting")
    shape = cut_heads(net, cuts)
    facts = described(net, order, shape, before, cuts)
    outputs = probes.probe(net, expected.inputs)
    twin = native_twin(net)
    if twin is not None:
        net, facts = twin, {**facts, "shape": Shape.NATIVE, "auto_class": auto_class_of(twin)}
    net.cpu()  # the device is for the result now
    with identifying(order.origin) as parent, whole_folder(order.output) as folder:
        context.stage("writing")
        with uneven_heads_are_known():
            stored.save(net, folder, max_shard_size=order.writing.max_shard_size)
        left_out = passed_over(net, stored_tensors(order.origin))
        generation = vars(net).get("generation_config")
        del net
        take_over(folder, order, generation)
        context.stage("verifying the folder")
        with hashing(folder, contents(folder)) as files:
            facts |= proven_outputs(folder, expected, outputs)
            facts |= {"parent": parent(), "files": files()}
        return finished(folder, order, facts, left_out)


def counts(net: PreTrainedModel, cuts: Sequence[Cut]) -> tuple[int, int]:
    """Parameters and KV heads of a model."""
    return net.num_parameters(), sum(cut.attention.kv_heads for cut in cuts)


def described(
    net: PreTrainedModel,
    order: WriteOrder,
    shape: Shape,
    before: tuple[int, int],
    cuts: Sequence[Cut],
) -> dict[str, Any]:
    """What the manifest says of a model that was cut.

    Args:
        net: The model, after the cut.
        order: What is written.
        shape: How it must be stored.
        before: Its ``counts`` before the cut.
        cuts: What it lost.
    """
    parameters, kv_heads = zip(before, counts(net, cuts), strict=True)
    return {
        "shape": shape,
        "auto_class": auto_class_of(net),
        "query_heads": (order.plan.query_heads, order.plan.kept_heads),
        "kv_heads": kv_heads,
        "parameters": parameters,
        "layout": {cut.attention.path: cut.heads_left() for cut in cuts},
    }


def take_over(folder: Path, order: WriteOrder, generation: GenerationConfig | None) -> None:
    """Puts beside the weights of a result what it has of its source, its plan and its history.

    Args:
        folder: The result.
        order: What is written.
        generation: How the result generates, with its heads as they are counted now.
    """
    source = _source_folder(order.origin)
    copy_companions(source, folder)
    _renumber_alignment(folder / "generation_config.json", generation)
    inherit_metadata(source, folder, order.origin)
    order.plan.write(folder / "plan.json")
    if order.work.history is not None:
        shutil.copyfile(order.work.history, folder / HISTORY)


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


def proven_outputs(
    folder: Path, expected: equivalence.Expectation, cut: probes.Outputs | None
) -> dict[str, Any]:
    """Reads a result back and compares its outputs with those expected, for the manifest.

    Raises:
        ProofError: If they differ.
    """
    reloaded = probes.probe(placed(as_it_fits(folder, expected.dtype)), expected.inputs)
    return {
        "proof": equivalence.conclude(expected, cut, reloaded),
        "probe": equivalence.sample(expected.inputs, expected.wanted),
    }


def finished(
    folder: Path, order: WriteOrder, facts: dict[str, Any], left_out: Sequence[str]
) -> Pruned:
    """Writes the manifest and the card of a result.

    Args:
        folder: The result.
        order: What was to be written.
        facts: What its manifest says of it.
        left_out: Tensors of the source that its class passes over.
    """
    manifest = write_manifest(
        folder,
        made_by=order.work.made_by,
        source=order.source,
        lineage=read_lineage(_source_folder(order.origin)),
        dtype=order.stored.names,
        weight_bytes=(stored_bytes(order.origin), stored_bytes(folder)),
        done=order.work.done,
        refit=order.work.refit,
        **facts,
    )
    write_card(folder, order.output.name, order.plan, manifest)
    warnings = tuple(_said_of(folder, manifest, left_out))
    return Pruned(order.output, order.plan, manifest, warnings)


def _said_of(folder: Path, manifest: Manifest, left_out: Sequence[str]) -> Iterator[str]:
    """What a user of the result should know of it."""
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
            f"The weights take {after:,} bytes, and those of the original {before:,}: they are "
            f"written in {manifest.dtype}."
        )


def refuse_unprovable(net: PreTrainedModel, plan: Plan) -> None:
    """Refuses, before long work, a plan whose proof would show nothing.

    Raises:
        ProofError: If rounding hides what one head contributes.
    """
    if residency_of(net) is not None and net.dtype not in equivalence.TOLERANCE:
        return  # there is no second one to widen; the proof itself says so
    wide = net if net.dtype in equivalence.TOLERANCE else widened(copy.deepcopy(net))
    cuts = resolve(plan.model_copy(update={"model": None}), wide, ragged=True)
    if equivalence.expect(wide, cuts, decoded=False).inconclusive(spare=_SPARE) is not None:
        equivalence.expect(wide, cuts).refuse_inconclusive()


def _source_folder(model: str | Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    with hub.asked_once(model):
        return Path(snapshot_download(str(model), allow_patterns=["*.json", CARD, *COMPANIONS]))
