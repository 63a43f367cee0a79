"""From a plan and a loaded model to a folder: cut, write, reload, compare, describe."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from transformers import PreTrainedModel

from headprune.config import LayoutOption
from headprune.errors import PlanError
from headprune.exporting.card import write_card
from headprune.io import hub
from headprune.io.folders import copy_companions
from headprune.io.outputs import whole_folder
from headprune.model import probes
from headprune.model.identity import id_of_model
from headprune.model.loading import auto_class_of, from_pretrained, uneven_heads_are_known
from headprune.model.precision import widened
from headprune.model.refusals import passed_over
from headprune.model.stored import StoredDtypes, stored_bytes, stored_tensors
from headprune.proof import equivalence
from headprune.schemas.manifest import HISTORY, Manifest, read_lineage, write_manifest
from headprune.schemas.plan import ModelIdentity, Plan, Shape
from headprune.schemas.records import Done, MadeBy, Refit
from headprune.surgery.cut import Cut, cut_heads, fold_gates, resolve
from headprune.surgery.transfer import native_twin

Stage = Callable[[str], None]
OnModule = Callable[[int, int], None]
"""Called with how many attention modules are done, and how many there are."""


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


def write_proven(
    net: PreTrainedModel,
    source: ModelIdentity,
    origin: str | Path,
    plan: Plan,
    cuts: list[Cut],
    output: Path,
    stored: StoredDtypes,
    work: Changes,
    on_stage: Stage,
) -> Pruned:
    """Cuts a loaded model, writes it and proves the folder; the end of every command that cuts.

    Args:
        net: The model, uncut.
        source: Who it is.
        origin: Folder or hub id it came from; tokenizer files are taken from there.
        plan: What stays.
        cuts: The plan, resolved on ``net``.
        output: Folder to write.
        stored: Element types to write.
        work: What was done to ``net``, and is done with this cut.
        on_stage: Called with a few words before every stage.

    Raises:
        CheckpointError: If the folder cannot be written.
        ProofError: If the result does not compute what the gated ``net`` computes.
    """
    home = _source_folder(origin)
    lineage = read_lineage(home)
    before = (net.num_parameters(), sum(cut.attention.kv_heads for cut in cuts))

    on_stage("probing the gated original")
    inputs = probes.probe_inputs(widened(net))
    exact = equivalence.probe_gated(net, cuts, inputs) if stored.narrows(net) else None
    cuts = fold_gates(cuts)
    changed = stored.round(net)
    expected = equivalence.expect(net, cuts, inputs)
    expected.refuse_inconclusive()
    cast = equivalence.difference(exact, expected.wanted) if exact is not None and changed else 0.0

    on_stage("cutting")
    shape = cut_heads(net, cuts)
    after = (net.num_parameters(), sum(cut.attention.kv_heads for cut in cuts))
    layout = {cut.attention.path: cut.heads_left() for cut in cuts}
    cut_outputs = probes.probe(net, inputs)
    twin = native_twin(net)
    if twin is not None:
        net, shape = twin, Shape.NATIVE

    with whole_folder(output) as folder:
        on_stage("writing")
        with uneven_heads_are_known():
            stored.save(net, folder)
        copy_companions(home, folder)
        plan.write(folder / "plan.json")
        if work.history is not None:
            shutil.copyfile(work.history, folder / HISTORY)
        auto_class, left_out = auto_class_of(net), passed_over(net, stored_tensors(origin))
        del net

        on_stage("verifying the folder")
        reloaded = probes.probe(from_pretrained(folder, dtype=expected.dtype), inputs)
        proven = equivalence.conclude(expected, cut_outputs, reloaded, cast)
        manifest = write_manifest(
            folder,
            made_by=work.made_by,
            source=source,
            parent=id_of_model(origin),
            lineage=lineage,
            shape=shape,
            auto_class=auto_class,
            dtype=stored.names,
            weight_bytes=(stored_bytes(origin), stored_bytes(folder)),
            query_heads=(plan.query_heads, plan.kept_heads),
            kv_heads=(before[1], after[1]),
            parameters=(before[0], after[0]),
            layout=layout,
            done=work.done,
            refit=work.refit,
            proof=proven,
            probe=equivalence.sample(inputs, expected.wanted),
        )
        write_card(folder, output.name, plan, manifest)
    return Pruned(output, plan, manifest, tuple(_said_of(manifest, left_out)))


def _said_of(manifest: Manifest, left_out: Sequence[str]) -> Iterator[str]:
    """What a user of the result should know of its weights."""
    if left_out:
        yield (
            f"Not in the result: {len(left_out)} of the checkpoint's tensors, which the class of "
            f"transformers passes over by design ('{left_out[0]}' is the first)."
        )
    before, after = manifest.weight_bytes or (0, 0)
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
    wide = net if net.dtype in equivalence.TOLERANCE else widened(copy.deepcopy(net))
    cuts = resolve(plan.model_copy(update={"model": None}), wide, ragged=True)
    equivalence.expect(wide, cuts).refuse_inconclusive()


def check_shape(asked: LayoutOption, stored: Shape) -> None:
    """Refuses a result that is not stored as asked.

    Raises:
        PlanError: If a plain config was asked for and cannot hold it.
    """
    if asked is LayoutOption.UNIFORM and stored is not Shape.NATIVE:
        raise PlanError(
            "--layout uniform: this plan does not fit a plain config, which needs the same counts "
            "in every layer and a family that can hold them ('headprune families'; Llama's wants a "
            "number of heads that divides hidden_size). With --gates or --scores, "
            "headprune chooses such a plan; leave out --layout for the runtime."
        )


def _source_folder(model: str | Path) -> Path:
    if Path(model).is_dir():
        return Path(model)
    patterns = ["*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
    with hub.asked_once(model):
        return Path(snapshot_download(str(model), allow_patterns=patterns))
