"""headprune compress: candidates are made and measured, the best is kept, healed if that helps."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headprune import devices
from headprune.compression import texts
from headprune.compression.candidates import (
    SCORED,
    Candidate,
    Job,
    candidates_for,
    is_its_own,
)
from headprune.compression.goals import goal_of
from headprune.compression.heldout import HeldOut
from headprune.compression.selection import Selection
from headprune.config import (
    CompressConfig,
    DataConfig,
    HealConfig,
    LayoutOption,
    sequences_per_pass,
)
from headprune.context import Context
from headprune.data.read import refuse_missing_file
from headprune.data.sentences import OF_SENTENCES
from headprune.distillation.heal import heal
from headprune.errors import (
    DataError,
    HeadpruneError,
    Interrupted,
    PlanError,
)
from headprune.exporting.card import write_card
from headprune.exporting.publish import Pruned
from headprune.io.outputs import claimed, whole_folder
from headprune.io.writing import beside, of_full_disk, reserved
from headprune.model.attention import attention_of
from headprune.model.lengths import most_tokens
from headprune.model.loading import CLASSIFIERS, UNMEASURED, load_tokenizer, task_of
from headprune.model.opening import load
from headprune.model.refusals import refuse_without_text
from headprune.model.stored import stored_dtypes, stored_tensors
from headprune.planning.constraints import constraints_of
from headprune.schemas.manifest import amend_manifest
from headprune.schemas.records import ModelChoice, Pruning

_OF_RUNNING_TEXT = ("causal-lm", "masked-lm")  # cut into sequences
_SEQUENCES = 8  # at least: one of eight chooses the ridge of what is fitted to the others
_JUDGED = 512  # tokens of a sequence that is judged on: of longer ones there would be too few


@dataclass(frozen=True)
class Compressed:
    """A finished compression.

    Attributes:
        pruned: The result, as of every command that cuts.
        choice: What it was chosen among.
        unseen_beyond: Tokens of the longest context that was looked at, where the model reads
            longer ones and generates.
    """

    pruned: Pruned
    choice: ModelChoice
    unseen_beyond: int | None = None

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        choice = self.choice.model_dump(mode="json")
        own = {"choice": choice, "unseen_beyond": self.unseen_beyond}
        return {"output": str(self.pruned.output), **own, **self.pruned.as_json()}


@dataclass(frozen=True)
class Outline:
    """What a compression would do.

    Attributes:
        goal: What may stay.
        texts: What is learnt from, and in a part that is held out judged on.
        candidates: What would be made and measured.
        heal_steps: How long the best would be healed; None for not at all.
    """

    goal: str
    texts: tuple[str, ...]
    candidates: tuple[str, ...]
    heal_steps: int | None

    def as_json(self) -> dict[str, Any]:
        """For ``--dry-run --json``."""
        return {
            "goal": self.goal,
            "texts": list(self.texts),
            "candidates": list(self.candidates),
            "heal_steps": self.heal_steps,
        }


def compress(
    model: str,
    output: Path | None,
    config: CompressConfig,
    data: Mapping[str, DataConfig] | None = None,
    overwrite: bool = False,
    context: Context = Context(),
) -> Compressed | Outline:
    """Makes a model smaller in the way that costs the held-out text least.

    Args:
        model: Folder or hub id.
        output: Folder to write; it appears whole or not at all. None for an outline alone.
        config: What may stay, and how it is chosen.
        data: Texts by name, mixed in equal parts; none for those that ship with headprune.
        overwrite: Replace an existing output.
        context: What it runs in.

    Raises:
        HeadpruneError: If model, goal and text do not fit together.
        ProofError: If the result does not compute what it should.
    """
    data = data or {}
    for each in data.values():
        refuse_missing_file(each.source)
    inputs = (model, *(each.source for each in data.values()))
    claim: AbstractContextManager[None] = nullcontext()
    if output is not None:
        claim = claimed(output, overwrite, inputs)
    with claim:
        work = _Compression(model, config, data, context)
        return work.outline() if output is None else work.into(output)


class _Compression:
    """A compression at work; arguments as for ``compress``."""

    def __init__(
        self,
        model: str,
        config: CompressConfig,
        data: Mapping[str, DataConfig],
        context: Context,
    ) -> None:
        self.model, self.context = model, context
        self.named = (
            ", ".join(one.source for one in data.values()) or "the text that ships with headprune"
        )
        context.stage("loading the model")
        self.net, _ = load(model, config.dtype, context.allowed)
        refuse_without_text(self.net, "compress")
        constraints_of(self.net, LayoutOption.PER_LAYER, config.targets)  # refuses what none takes
        task = task_of(self.net)
        _refuse_unfit(task, list(data.values()))
        remote = context.allowed.trust_remote_code
        self.tokenizer = load_tokenizer(model, trust_remote_code=remote)
        most = most_tokens(self.net.config, self.tokenizer) or config.seq_len
        read = min(config.seq_len, most)
        self.judged = min(read, _JUDGED)
        if task in _OF_RUNNING_TEXT:
            read = min(read, max(2, config.calibration_tokens // _SEQUENCES))
        self.config = config.model_copy(update={"seq_len": read})
        self.most = most if task == "causal-lm" else None
        self.texts = texts.read(data or texts.shipped())
        if task in OF_SENTENCES:
            self.texts = self.texts.by_sentence()
        stored = stored_dtypes(self.net, stored_tensors(model)).default
        self.goal = goal_of(self.config, self.net, attention_of(self.net), stored)
        self.candidates = candidates_for(self.goal)
        self.parts = len(self.candidates) + (config.heal_steps is not None)

    def outline(self) -> Outline:
        """What would be done."""
        return Outline(
            goal=self.goal.said,
            texts=tuple(text.name for text in self.texts.learning),
            candidates=tuple(candidate.name for candidate in self.candidates),
            heal_steps=self.config.heal_steps,
        )

    def into(self, output: Path) -> Compressed:
        """Does it."""
        self.context.line(f"To be kept: {self.goal.said}; text: {self.named}")
        config = self.config
        held_out = HeldOut(
            self.net,
            self.tokenizer,
            self.texts,
            self.judged,
            config.held_out_tokens,
            sequences_per_pass(config.batch_size, self.judged),
        )
        selection = Selection(held_out, config.dtype, config.seed, self.context.step, self.goal)
        self.context.stage("measuring the original")
        selection.begin(self.net, self.model)
        del self.net  # candidates load their own
        with reserved(beside(output, "{}-candidates")) as work:
            work.mkdir()
            job = self._job(work)
            best = self._best(job, selection)
            best = self._named(best)
            if config.heal_steps is not None:
                best = self._healed(best, job, selection, config.heal_steps)
            choice = selection.concluded()
            manifest = amend_manifest(best.output, choice=choice)
            write_card(best.output, output.name, best.plan, manifest)
            with whole_folder(output) as folder:
                for entry in best.output.iterdir():
                    entry.rename(folder / entry.name)
        done = replace(best, output=output, manifest=manifest)
        return Compressed(done, choice, self._unseen_beyond(done))

    def _job(self, work: Path) -> Job:
        config, healing = self.config, self._healing()
        trained = 0
        if healing is not None:  # a pass over twice as much text as is needed once does no harm
            trained = 2 * healing.steps * healing.batch_size * healing.seq_len
        some = texts.mixed(self.texts.learning, config.calibration_tokens, trained)
        text = texts.write(some, work / "text")
        return Job(self.model, self.goal, text, config, work, self.context)

    def _best(self, job: Job, selection: Selection) -> Pruned:
        """Makes all candidates and measures them; only the best so far stays on disk."""
        best: Pruned | None = None
        errors: list[Exception] = []
        for number, candidate in enumerate(self.candidates, start=1):
            where = f"{number}/{len(self.candidates)} {candidate.name}"

            def stage(what: str, where: str = where) -> None:
                self.context.stage(f"{where}: {what}")

            self.context.whole(number - 1, self.parts)
            began, folder = time.monotonic(), job.work / str(number)
            try:
                made = candidate.way.make(job, folder, replace(self.context, stage=stage))
                seconds = time.monotonic() - began
                stage("measuring")
                better = selection.add(
                    _name(candidate, made), folder, seconds, self.context.allowed
                )
            except Exception as error:  # memory runs out in several kinds; others go on
                if not is_its_own(error):
                    raise
                errors.append(error)
                selection.failed[candidate.name] = _why(error)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            loser = best if better else made
            if loser is not None:
                shutil.rmtree(loser.output)
            best = made if better else best
        if best is None and errors:
            raise errors[0]
        if best is None:
            name, why = next(iter(selection.failed.items()))
            raise PlanError(f"No candidate comes to the goal, {job.goal.said}. {name}: {why}")
        return best

    def _named(self, best: Pruned) -> Pruned:
        """The same with a record that names the text and not the file that it was mixed in."""
        refit = best.manifest.refit
        if refit is None:
            return best
        named = refit.model_copy(update={"data": self.named})
        return replace(best, manifest=amend_manifest(best.output, refit=named))

    def _unseen_beyond(self, best: Pruned) -> int | None:
        """The longest context of what made a language model, if it reads longer ones."""
        made = best.manifest
        scored_alone = isinstance(made.done, Pruning) and made.refit is None
        seen = min(self.config.seq_len, SCORED) if scored_alone else self.config.seq_len
        return seen if self.most is not None and self.most > seen else None

    def _healing(self) -> HealConfig | None:
        steps = self.config.heal_steps
        if steps is None:
            return None
        usual = HealConfig(steps=steps)
        length = min(usual.seq_len, self.config.seq_len)
        return self.config.part(
            HealConfig, steps=steps, seq_len=length, batch_size=usual.batch_size
        )

    def _healed(self, best: Pruned, job: Job, selection: Selection, steps: int) -> Pruned:
        """The best one healed, if that brings it nearer to the original."""
        healing, unhealed = self._healing(), selection.contenders[0]
        assert healing is not None  # as there are steps
        name, began = f"{unhealed.name}, healed {steps} steps", time.monotonic()
        self.context.whole(len(self.candidates), self.parts)
        try:
            healed = heal(
                best.output,
                self.model,
                job.text,
                job.work / "healed",
                healing,
                context=self.context,
            )
            if not healed.taken_after:
                why = "Healing brought it no nearer to the original: try more steps."
                selection.failed[name] = why
                return best
            self.context.stage("measuring the healed model")
            seconds, output = time.monotonic() - began, healed.pruned.output
            better = selection.add(name, output, seconds, self.context.allowed)
        except Interrupted:
            raise Interrupted(
                "Stopped while healing; nothing was written, and compress starts anew."
            ) from None
        except Exception as error:  # memory and disk run out in several kinds; others go on
            if not isinstance(error, HeadpruneError) and _machine_ran_out(error) is None:
                raise
            selection.failed[name] = _why(error)
            return best
        return healed.pruned if better else best


def _machine_ran_out(error: Exception) -> str | None:
    """What the machine had too little of, in a sentence; None if that was not the reason."""
    if devices.out_of_memory(error):
        return f"{devices.chosen()} ran out of memory."
    # what a training says of a full disk is raised from that, and tells to resume the training
    causes = (error, error.__context__)
    full = any(isinstance(each, Exception) and of_full_disk(each) for each in causes)
    return "The disk is full." if full else None


def _why(error: Exception) -> str:
    """Why a candidate is not there, in a sentence."""
    return _machine_ran_out(error) or str(error)


def _name(candidate: Candidate, made: Pruned) -> str:
    """What a candidate is called, now that it is known whether its refit helped."""
    done = made.manifest.done
    left_out = isinstance(done, Pruning) and done.refit_left_out is not None
    return f"{candidate.name} (left out)" if left_out else candidate.name


def _refuse_unfit(task: str, data: Sequence[DataConfig]) -> None:
    """Refuses text that a task cannot be learnt from.

    Raises:
        DataError: If an encoder-decoder gets no pairs, or a classifier no labels.
    """
    if task == "seq2seq-lm" and not (data and all(one.pairs for one in data)):
        raise DataError(
            "An encoder-decoder is compressed on pairs: give --data with --text-column "
            "SOURCE,TARGET (CSV, TSV, JSONL or parquet)."
        )
    if task in UNMEASURED:
        raise DataError(
            f"There is no measure for the head of this model ({task}) to choose by. Use score, "
            "prune and heal, and a script of its task."
        )
    if task in CLASSIFIERS and not (data and all(one.label_column for one in data)):
        raise DataError(
            "A classifier is compressed on labelled examples: give --data with --label-column "
            "(CSV, TSV, JSONL or parquet)."
        )
