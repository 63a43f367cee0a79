"""headprune compress: candidates are made and measured, the best is kept, healed if that helps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
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
    is_recoverable,
)
from headprune.compression.goals import goal_of
from headprune.compression.heldout import HeldOut, Lengths, WrittenMetric
from headprune.compression.selection import Selection
from headprune.config import (
    CompressConfig,
    DataConfig,
    HealConfig,
    LayoutOption,
    Writing,
    sequences_per_pass,
)
from headprune.config.data import refuse_pairs
from headprune.config.stages import STEP_TOKENS
from headprune.context import Context
from headprune.data.sentences import OF_SENTENCES
from headprune.distillation.heal import heal
from headprune.errors import (
    DataError,
    HeadpruneError,
    Interrupted,
    PlanError,
)
from headprune.evaluation.task_table import TASKS
from headprune.evaluation.written import COUNTED, refuse_metrics
from headprune.evidence.windows import refuse_context
from headprune.io.outputs import claimed, whole_folder
from headprune.io.writing import beside, of_full_disk, reserved
from headprune.model.batch import most_tokens
from headprune.model.loading import CLASSIFIERS, Task, task_of
from headprune.model.open import Model, open_model
from headprune.model.refusals import refuse_without_text
from headprune.planning.constraints import constraints_of
from headprune.proof.twins import refuse_unproven
from headprune.registry import did_you_mean
from headprune.result.card import write_card
from headprune.result.folder import ModelFolder
from headprune.result.write import Proposal, Pruned, write
from headprune.schemas.manifest import amend_manifest
from headprune.schemas.records import ModelChoice, Pruning, Windowing
from headprune.surgery.edit import Edit

_SEQUENCES = 8  # at least: one of eight chooses the ridge of fits to the others
_JUDGED = 512  # tokens of a judged sequence: of longer ones there would be too few


@dataclass(frozen=True)
class Compressed(ModelFolder):
    """A finished compression.

    Attributes:
        pruned: The result, as of every command that cuts.
        choice: The candidates, and the choice among them.
        unseen_beyond: Tokens of the longest measured context, where the model reads
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
    """A compression, before the work.

    Attributes:
        goal: What may stay.
        texts: Texts to fit to, and in a held-out part to judge on.
        candidates: Names of the candidates; the first may be the only one.
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
        data: Texts by name, mixed in equal parts; none for the texts that ship with headprune.
        overwrite: Replace an existing output.
        context: Progress and permissions.

    Raises:
        HeadpruneError: If model, goal and text do not fit together.
        ProofError: If the result does not compute as it should.
    """
    data = data or {}
    _refuse_metric(config.metric, context)
    if output is None:
        return _Compression(model, config, data, context).outline()
    with claimed(output, overwrite, (model, *(each.source for each in data.values()))):
        return _Compression(model, config, data, context).into(output)


class _Compression:
    """A compression at work; arguments as for ``compress``."""

    def __init__(
        self,
        model: str,
        config: CompressConfig,
        data: Mapping[str, DataConfig],
        context: Context,
    ) -> None:
        self.context = context
        self.named = (
            ", ".join(one.source for one in data.values()) or "the text that ships with headprune"
        )
        context.stage("loading the model")
        self.model = open_model(model, config.dtype, context.allowed, calibrates=True)
        refuse_unproven(self.model, context)
        net = self.model.net
        refuse_without_text(net, "compress")
        constraints_of(net, LayoutOption.PER_LAYER, config.targets)  # refuses what none takes
        task = task_of(net)
        _refuse_unfit(task, list(data.values()), config.metric)
        limit = most_tokens(net, self.model.tokenizer)
        most = limit or config.seq_len
        refuse_context(config.context_tokens, limit)
        read = min(config.seq_len, most)
        self.judged = min(read, _JUDGED)
        if TASKS[task].closed is not None:
            read = min(read, max(2, config.calibration_tokens // _SEQUENCES))
        self.heal_seq_len = config.seq_len if config.seq_len < STEP_TOKENS else None
        self.config = config.model_copy(update={"seq_len": read})
        self.most = most if task == "causal-lm" else None
        self.texts = texts.read(data or texts.shipped(), self.model.tokenizer)
        if task in OF_SENTENCES:
            self.texts = self.texts.by_sentence()
        stored = self.model.result_dtypes(config.out_dtype).default
        self.goal = goal_of(self.config, net, self.model.attentions, stored)
        self.candidates = candidates_for(self.goal)
        self.tried = sum(not candidate.fallback for candidate in self.candidates)
        self.parts = self.tried + (config.heal_steps is not None)

    def outline(self) -> Outline:
        """Return the outline."""
        return Outline(
            goal=self.goal.said,
            texts=tuple(text.name for text in self.texts.fit),
            candidates=tuple(candidate.outline for candidate in self.candidates),
            heal_steps=self.config.heal_steps,
        )

    def into(self, output: Path) -> Compressed:
        """Does it."""
        self.context.line(f"To be kept: {self.goal.said}; text: {self.named}")
        config = self.config
        if not config.targets:
            self.context.line(
                "Layers may keep different numbers of heads. Such a result loads with "
                "trust_remote_code or headprune; with --for anywhere it is a plain model."
            )
        if config.context_tokens is not None and self.goal.window is None:
            self.context.line("No windows are tried: model, engine or budget leave no room for any")
        held_out = HeldOut(
            self.model.net,
            self.model.tokenizer,
            self.texts,
            Lengths(
                self.judged,
                config.held_out_tokens,
                sequences_per_pass(config.batch_size, self.judged),
                self.goal.window,
            ),
            WrittenMetric(config.metric, config.max_new_tokens) if config.metric else None,
        )
        self.context.stage("measuring the original")
        selection = Selection(self.model, held_out, self.context.step, self.goal)
        self.longest = held_out.seq_len
        with reserved(beside(output, "{}-candidates")) as work:
            work.mkdir()
            job = self._job(work)
            best = self._best(job, selection)
            if config.heal_steps is None:
                choice = self._concluded(selection, best.edit)
                done = self._written(best, output, choice)
            else:
                done, healed = self._healed(best, job, selection, work)
                choice = self._concluded(selection, healed or best.edit)
                manifest = amend_manifest(done.output, choice=choice)
                write_card(done.output, output.name, done.plan, manifest)
                with whole_folder(output) as folder:
                    for entry in done.output.iterdir():
                        entry.rename(folder / entry.name)
                done = replace(done, output=output, manifest=manifest)
        return Compressed(done, choice, self._unseen_beyond(done))

    def _concluded(self, selection: Selection, best: Edit | Model) -> ModelChoice:
        self.context.stage("measuring the best on the other half of the text")
        return selection.conclude(best)

    def _job(self, work: Path) -> Job:
        config, healing = self.config, self._healing()
        trained = 0
        if healing is not None:  # a pass over twice as much text as is needed once does no harm
            trained = 2 * healing.steps * STEP_TOKENS
        some = texts.mixed(self.texts.fit, config.calibration_tokens, trained)
        text = texts.write(some, work / "text")
        if text.pairs and self.model.task == "causal-lm":  # references choose, prompts calibrate
            text = text.model_copy(update={"text_column": "text"})
        return Job(self.model, self.goal, text, config, self.context)

    def _best(self, job: Job, selection: Selection) -> Proposal:
        """Try candidates in memory, until one is good enough, and return the best."""
        best: Proposal | None = None
        before: Proposal | None = None  # None if it failed
        errors: list[Exception] = []
        for number, candidate in enumerate(self.candidates, start=1):
            if candidate.fallback and before is not None and not _refit_left_out(before):
                continue
            where = f"{number}/{len(self.candidates)} {candidate.name}"

            def stage(what: str, where: str = where) -> None:
                self.context.stage(f"{where}: {what}")

            done = sum(not one.fallback for one in self.candidates[: number - 1])
            self.context.whole(done, self.parts)
            began, before = time.monotonic(), None
            try:
                proposal = candidate.way.make(job, replace(self.context, stage=stage))
                seconds, name = time.monotonic() - began, _name(candidate, proposal)
                stage("measuring")
                if selection.add(selection.measured(name, proposal.edit, seconds)):
                    best = proposal
                before = proposal
                enough = candidate.ends_search_below
                if enough is not None and selection.loses_less_than(enough):
                    why = f"{candidate.name} lose less than {100 * enough:.0f} %."
                    later = (one for one in self.candidates[number:] if not one.fallback)
                    selection.left_out.update((one.name, why) for one in later)
                    self.tried, self.parts = done + 1, self.parts - self.tried + done + 1
                    break
            except Exception as error:  # memory runs out in several kinds; others are raised
                if not is_recoverable(error):
                    raise
                errors.append(error)
                selection.left_out[candidate.name] = _why(error)
        if best is None and errors:
            raise errors[0]
        if best is None:
            name, why = next(iter(selection.left_out.items()))
            raise PlanError(f"No candidate comes to the goal, {job.goal.said}. {name}: {why}")
        return best

    def _written(self, best: Proposal, folder: Path, choice: ModelChoice | None = None) -> Pruned:
        """Write the best candidate; its record names the text, not the file it was mixed in."""
        changes = replace(best.changes, choice=choice)
        if changes.refit is not None:
            named = changes.refit.model_copy(update={"data": self.named})
            changes = replace(changes, refit=named)
        writing = Writing(out_dtype=self.config.out_dtype)
        pruned = write(self.model, best.edit, folder, changes, writing, self.context)
        return replace(pruned, warnings=(*pruned.warnings, *best.warnings))

    def _unseen_beyond(self, best: Pruned) -> int | None:
        """The longest context of what made a language model, if it reads longer ones."""
        made = best.manifest
        scored_alone = isinstance(made.done, Pruning) and made.refit is None
        seen = min(self.config.seq_len, SCORED) if scored_alone else self.config.seq_len
        seen = max(seen, self.longest if self.goal.window is not None else 0)
        return seen if self.most is not None and self.most > seen else None

    def _healing(self) -> HealConfig | None:
        steps = self.config.heal_steps
        if steps is None:
            return None
        return self.config.part(HealConfig, steps=steps, seq_len=self.heal_seq_len, batch_size=None)

    def _healed(
        self, proposal: Proposal, job: Job, selection: Selection, work: Path
    ) -> tuple[Pruned, Model | None]:
        """Write the best candidate and heal it.

        Returns:
            The one nearer to the original, and its model if that is the healed one.
        """
        best = self._written(proposal, work / "best")
        healing, unhealed = self._healing(), selection.contenders[0]
        assert healing is not None
        steps = healing.steps
        name, began = f"{unhealed.name}, healed {steps} steps", time.monotonic()
        self.context.whole(self.tried, self.parts)
        try:
            healed = heal(
                best.output,
                self.model.source,
                job.text,
                best.output.with_name("healed"),
                healing,
                context=self.context,
            )
            if not healed.taken_after:
                why = "Healing did not lower the loss on held-out text: try more steps."
                selection.left_out[name] = why
                return best, None
            self.context.stage("measuring the healed model")
            seconds = time.monotonic() - began
            result = open_model(healed.pruned.output, self.config.dtype, self.context.allowed)
            better = selection.add(selection.measured(name, result, seconds))
        except Interrupted:  # its checkpoint goes with the folder of the candidates
            raise KeyboardInterrupt from None
        except Exception as error:  # memory and disk run out in several kinds; others are raised
            if not isinstance(error, HeadpruneError) and _machine_ran_out(error) is None:
                raise
            selection.left_out[name] = _why(error)
            return best, None
        return (healed.pruned, result) if better else (best, None)


def _machine_ran_out(error: Exception) -> str | None:
    """Say in a sentence whether memory or disk ran out; None for another reason."""
    if devices.out_of_memory(error):
        return f"{devices.chosen()} ran out of memory."
    # a training raises its error from the full disk, and advises to resume
    causes = (error, error.__context__)
    full = any(isinstance(each, Exception) and of_full_disk(each) for each in causes)
    return "The disk is full." if full else None


def _why(error: Exception) -> str:
    """Why a candidate is not there, in a sentence."""
    return _machine_ran_out(error) or str(error)


def _name(candidate: Candidate, proposal: Proposal) -> str:
    """Return the name of a candidate, with what became known: its windows, a refit left out."""
    done = proposal.changes.done
    if isinstance(done, Windowing):
        return f"windows of {done.window.size:,} tokens, {done.heads} KV heads"
    return f"{candidate.name} (left out)" if _refit_left_out(proposal) else candidate.name


def _refit_left_out(proposal: Proposal) -> bool:
    """Return whether a refit was left out, as it did not help."""
    done = proposal.changes.done
    return isinstance(done, Pruning) and done.refit_left_out is not None


def _refuse_metric(metric: str | None, context: Context) -> None:
    if metric is None:
        return
    if metric not in COUNTED:
        raise HeadpruneError(
            f"--metric {metric}: a compression is chosen by one of {', '.join(COUNTED)}."
            f"{did_you_mean(metric, [*COUNTED])}"
        )
    refuse_metrics([metric], context.allowed)


def _refuse_unfit(task: Task, data: Sequence[DataConfig], metric: str | None) -> None:
    """Refuses text that a task cannot be learnt from.

    Raises:
        DataError: If an encoder-decoder gets no pairs, a classifier no labels, or a metric no text.
    """
    if metric is not None and task not in ("causal-lm", "seq2seq-lm"):
        raise DataError(
            f"--metric {metric} is of written text, and this model ({task}) writes none. Leave it "
            "out."
        )
    for one in data if metric is None else ():
        refuse_pairs(task, one)
    if task == "seq2seq-lm" and not (data and all(one.pairs for one in data)):
        raise DataError(
            "An encoder-decoder is compressed on pairs: give --data and --text-column "
            "SOURCE,TARGET (CSV, TSV, JSONL or parquet)."
        )
    if task not in TASKS or TASKS[task].measure is None:
        raise DataError(
            f"There is no measure for the head of this model ({task}) to choose by. Use score, "
            "prune and heal, and a script of its task."
        )
    if task in CLASSIFIERS and not (data and all(one.label_column for one in data)):
        raise DataError(
            "A classifier is compressed on labelled examples: give --data with label_column "
            "(CSV, TSV, JSONL or parquet)."
        )
