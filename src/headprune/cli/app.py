"""The commands. Heavy imports wait until a command runs, so that --help is immediate."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headprune import config as cfg
from headprune._version import __version__
from headprune.cli import terminal
from headprune.cli.check import check
from headprune.cli.init import init
from headprune.cli.options import (
    Assume,
    Data,
    DtypeOption,
    Json,
    LabelColumn,
    Model,
    Overwrite,
    Split,
    TextColumn,
    Trust,
    batch_sizes,
    data_config,
    kv_head_counts,
    memory_bytes,
    share_or_count,
)
from headprune.cli.plan import plan
from headprune.cli.report import report
from headprune.cli.run import run
from headprune.cli.score import score
from headprune.cli.sweep import sweep
from headprune.errors import HeadpruneError
from headprune.tensors.units import Unit
from headprune.training import processes

if TYPE_CHECKING:
    from headprune.training.slim import Step
    from headprune.training.trainer import StepRecord

app = typer.Typer(
    name="headprune",
    help="Make the attention of Hugging Face models smaller: train gates, cut heads, prove it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

_GATES = cfg.TrainGatesConfig.model_construct()
_CALIBRATION = cfg.CalibrationConfig()
_CONVERT = cfg.ConvertConfig.model_construct()
_HEAL = cfg.HealConfig(steps=1)  # for its other settings
_EVALUATE = cfg.EvaluateConfig()
_TOGETHER = ("train-gates", "heal")  # what several processes can do


def _read_settings(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the settings of a file the defaults of the options that come after it."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **cfg.read_train_gates(path)}
    return path


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"headprune {__version__}")
        raise typer.Exit
    if processes.count() > 1 and context.invoked_subcommand not in _TOGETHER:
        raise HeadpruneError(
            f"'{context.invoked_subcommand}' is run by one process, and {processes.count()} were "
            f"started; a launcher is of use for {' and '.join(_TOGETHER)} only."
        )


@app.command()
def inspect(model: Model, json_: Json = False, trust_remote_code: Trust = False) -> None:
    """Show a model's attention: heads, head_dim, parameters, KV cache, and what a cut saves."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.inspect import inspect as pipeline

    report = pipeline(model, trust_remote_code=trust_remote_code)
    if json_:
        typer.echo(report.model_dump_json(indent=2))
    else:
        render.inspection(terminal.out, report)


@app.command()
def families(
    json_: Json = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table as the README has it.")
    ] = False,
) -> None:
    """List the supported model families, and what works for each."""
    from headprune.cli import render
    from headprune.families.capabilities import capabilities

    rows = capabilities()
    if json_:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    elif markdown:
        typer.echo(render.families_markdown(rows))
    else:
        render.families(terminal.out, rows)


@app.command("train-gates")
def train_gates(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option(help="Folder for the gates.")],
    target_heads: Annotated[
        str | None,
        typer.Option(help="Heads to keep, hit exactly: a share (0.75) or a count (202)."),
    ] = None,
    l0_penalty: Annotated[
        float | None,
        typer.Option(help="Instead of a target: Voita's constant penalty per open head."),
    ] = None,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of attention that gets gates, for encoder-decoders: encoder, decoder or "
            "cross (repeatable). The heads of the others all stay."
        ),
    ] = None,
    unit: Annotated[
        Unit | None,
        typer.Option(help="What is removed as one piece. Default: head for MHA, kv-group for GQA."),
    ] = None,
    train: Annotated[cfg.Train, typer.Option(help="What is trained beside the gates.")] = (
        _GATES.train
    ),
    objective: Annotated[
        cfg.Objective,
        typer.Option(help="The loss. distill needs no labels: it matches the ungated model."),
    ] = _GATES.objective,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps.")] = None,
    epochs: Annotated[float, typer.Option(help="Passes over the data, without --steps.")] = (
        _GATES.epochs
    ),
    batch_size: Annotated[
        int, typer.Option(help="Sequences per step, of all processes.")
    ] = _GATES.batch_size,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = _GATES.seq_len,
    gate_lr: Annotated[float, typer.Option(help="Learning rate of the gates.")] = _GATES.gate_lr,
    scale_lr: Annotated[
        float, typer.Option(help="Learning rate of the factors of the heads that stay.")
    ] = _GATES.scale_lr,
    weight_lr: Annotated[float, typer.Option(help="Learning rate of the weights.")] = (
        _GATES.weight_lr
    ),
    temperature: Annotated[float, typer.Option(help="beta of the hard-concrete gates.")] = (
        _GATES.temperature
    ),
    rounds: Annotated[
        int | None,
        typer.Option(help="How often heads are chosen. Default: one per quarter of all heads."),
    ] = None,
    warmup: Annotated[
        float, typer.Option(help="Share of a round's choosing in which its target is reached.")
    ] = _GATES.warmup,
    settle: Annotated[
        float, typer.Option(help="Share of every round, at its end, with its heads chosen.")
    ] = _GATES.settle,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Save memory, at a third more time.")
    ] = False,
    dtype: DtypeOption = _GATES.dtype,
    init_log_alpha: Annotated[
        float, typer.Option(help="Where gates start; 3 is open nearly always.")
    ] = _GATES.init_log_alpha,
    seed: Annotated[int, typer.Option(help="Seed of the noise and of the data order.")] = (
        _GATES.seed
    ),
    config_file: Annotated[
        Path | None,
        typer.Option(
            "--config",
            is_eager=True,
            callback=_read_settings,
            help="YAML with settings, such as the config.yaml of an earlier run; options given "
            "here win.",
        ),
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: a tenth.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in --output.")
    ] = False,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
) -> None:
    """Train hard-concrete gates on every head, towards an exact number of heads."""
    config = cfg.build(
        cfg.TrainGatesConfig,
        {
            "target_heads": share_or_count(target_heads, "--target-heads"),
            "l0_penalty": l0_penalty,
            "attention": attention or (),
            "unit": unit,
            "train": train,
            "objective": objective,
            "steps": steps,
            "epochs": epochs,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "gate_lr": gate_lr,
            "scale_lr": scale_lr,
            "weight_lr": weight_lr,
            "temperature": temperature,
            "init_log_alpha": init_log_alpha,
            "rounds": rounds,
            "warmup": warmup,
            "settle": settle,
            "gradient_checkpointing": gradient_checkpointing,
            "dtype": dtype,
            "seed": seed,
            "save_every": save_every,
        },
    )
    source = data_config(data, split, text_column, label_column)
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.train_gates import train_gates as pipeline

    with terminal.step_progress("numbers") as progress:
        task = progress.add_task("starting", total=None, numbers="")

        def on_step(record: StepRecord) -> None:
            progress.update(
                task,
                completed=record.step,
                total=record.steps,
                numbers=render.step_numbers(record),
            )

        run = pipeline(
            model,
            source,
            output,
            config,
            resume=resume,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            on_step=on_step,
            on_stage=lambda stage: progress.update(task, description=stage),
        )
    if json_:
        typer.echo(run.metadata.model_dump_json(indent=2))
    else:
        render.gates_run(terminal.out, run, model)


@app.command()
def prune(
    model: Model,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the result; not needed with --dry-run.")
    ] = None,
    gates: Annotated[Path | None, typer.Option(help="Folder from train-gates.")] = None,
    scores: Annotated[Path | None, typer.Option(help="Folder from score; needs --keep.")] = None,
    criterion: Annotated[
        str | None, typer.Option(help="With --scores: which of them, if there are several.")
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            help="plan.json, or a JSON map from module path to the heads to remove, as "
            r'{"model.layers.0.self_attn": \[0, 3]}.'
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Share or count of heads to keep: with --scores, or another than the gates were "
            "trained for."
        ),
    ] = None,
    refit: Annotated[
        str | None,
        typer.Option(
            metavar="DATA",
            help="Refit W_O by least squares on this text, layer after layer, so that the heads "
            "that stay make up for those that go.",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="With --refit: how much of the text is used.")
    ] = _CALIBRATION.tokens,
    seq_len: Annotated[
        int, typer.Option(help="With --refit: tokens per sequence.")
    ] = _CALIBRATION.seq_len,
    shape: Annotated[
        cfg.ShapeOption,
        typer.Option(
            help="auto: other counts in every layer, equal groups within a layer. native: the same "
            "counts everywhere, so that a plain config holds the result. ragged: any head, also "
            "where that leaves KV heads with unequal numbers of queries."
        ),
    ] = cfg.ShapeOption.AUTO,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan, write nothing.")
    ] = False,
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    split: Split = "train",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
) -> None:
    """Cut heads out for real, prove that the result is the gated model, and write it."""
    if output is None and not dry_run:
        raise HeadpruneError("prune needs --output, the folder to write (or --dry-run).")
    calibration = cfg.build(
        cfg.CalibrationConfig,
        {"tokens": calibration_tokens, "seq_len": seq_len, "dtype": dtype},
    )
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines import prune as pipeline

    what: dict[str, Any] = {
        "gates": gates,
        "plan": plan,
        "scores": scores,
        "criterion": criterion,
        "keep": share_or_count(keep, "--keep"),
        "shape": shape,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "assume_supported": assume_supported,
    }
    if dry_run:
        preview = pipeline.preview(model, **what)
        if json_:
            typer.echo(json.dumps(preview.as_json(), indent=2))
        else:
            render.preview(terminal.out, preview)
        return
    assert output is not None
    with terminal.stages() as on_stage:
        pruned = pipeline.prune(
            model,
            output,
            refit=None if refit is None else data_config(refit, split, text_column, label_column),
            calibration=calibration,
            overwrite=overwrite,
            on_stage=on_stage,
            **what,
        )
    if json_:
        typer.echo(pruned.manifest.model_dump_json(indent=2))
    else:
        render.pruned(terminal.out, pruned)


@app.command("convert-gqa")
def convert_gqa(
    model: Model,
    output: Annotated[Path, typer.Option(help="Folder for the result.")],
    kv_heads: Annotated[
        str | None,
        typer.Option(
            help="KV heads per layer: one number, a comma-separated list with one per attention "
            "module, or a JSON file with such a list."
        ),
    ] = None,
    kv_budget: Annotated[
        float | None,
        typer.Option(help="Instead: the share of all KV heads to keep, spread over the layers."),
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(
            help="How the heads of a group become one: mean, first, random, medoid, norm-mean, "
            "procrustes, lowrank. Default: lowrank with --calibrate, mean without."
        ),
    ] = None,
    grouping: Annotated[
        cfg.Grouping,
        typer.Option(help="Which heads share: neighbours, or those that lose least by it."),
    ] = _CONVERT.grouping,
    calibrate: Annotated[
        str | None, typer.Option(help="Text that shows what the heads do; as --data elsewhere.")
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(help="How much of that text is used.")
    ] = _CONVERT.calibration_tokens,
    seq_len: Annotated[int, typer.Option(help="Tokens per window.")] = _CONVERT.seq_len,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            help="Kind of attention to convert, for encoder-decoders: encoder, decoder or cross "
            "(repeatable)."
        ),
    ] = None,
    shape: Annotated[
        cfg.ShapeOption,
        typer.Option(help="native: refuse what a plain config of the family cannot hold."),
    ] = cfg.ShapeOption.AUTO,
    heal_steps: Annotated[
        int | None,
        typer.Option("--heal", help="Then train the result to match the original, so many steps."),
    ] = None,
    train: Annotated[cfg.HealTrain, typer.Option(help="With --heal: what is trained.")] = (
        _HEAL.train
    ),
    learning_rate: Annotated[float, typer.Option(help="With --heal: highest learning rate.")] = (
        _HEAL.learning_rate
    ),
    bf16: Annotated[bool, typer.Option("--bf16", help="With --heal: compute in bfloat16.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of what is random.")] = 0,
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    split: Split = "train",
    text_column: TextColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
) -> None:
    """Share KV heads among more queries (GQA, MQA), prove the result, and write it."""
    config = cfg.build(
        cfg.ConvertConfig,
        {
            "kv_heads": kv_head_counts(kv_heads),
            "kv_budget": kv_budget,
            "merge": merge,
            "grouping": grouping,
            "attention": attention or (),
            "calibration_tokens": calibration_tokens,
            "seq_len": seq_len,
            "dtype": dtype,
            "seed": seed,
        },
    )
    if heal_steps is not None and calibrate is None:
        raise HeadpruneError("--heal trains on the text of --calibrate: give --calibrate DATA.")
    source = None if calibrate is None else data_config(calibrate, split, text_column, None)
    terminal.quiet_libraries()
    from headprune.checkpoint.folders import check_output
    from headprune.cli import render
    from headprune.pipelines.convert_gqa import convert_gqa as pipeline

    check_output(output, overwrite)
    converted_to = output if heal_steps is None else output.with_name(f"{output.name}-unhealed")
    with terminal.step_progress() as progress:
        task = progress.add_task("starting", total=None)
        result = pipeline(
            model,
            converted_to,
            config,
            calibrate=source,
            shape=shape,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            on_stage=lambda stage: progress.update(task, description=stage),
            on_module=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if heal_steps is None:
        if json_:
            typer.echo(json.dumps(result.as_json(), indent=2))
        else:
            render.converted(terminal.out, result)
        return
    if not json_:
        render.converted(terminal.out, result)
    assert calibrate is not None
    heal(
        str(converted_to),
        teacher=model,
        data=calibrate,
        output=output,
        steps=heal_steps,
        seq_len=min(seq_len, _HEAL.seq_len),
        train=train,
        learning_rate=learning_rate,
        bf16=bf16,
        seed=seed,
        overwrite=overwrite,
        split=split,
        text_column=text_column,
        json_=json_,
        trust_remote_code=trust_remote_code,
        assume_supported=assume_supported,
    )
    shutil.rmtree(converted_to, ignore_errors=True)


@app.command()
def heal(
    model: Model,
    teacher: Annotated[str, typer.Option(help="The model it came from: a folder or a hub id.")],
    data: Data,
    output: Annotated[Path, typer.Option(help="Folder for the result.")],
    steps: Annotated[int, typer.Option(help="Optimiser steps.")],
    train: Annotated[cfg.HealTrain, typer.Option(help="What is trained.")] = _HEAL.train,
    lora_rank: Annotated[int, typer.Option(help="With --train lora: its rank.")] = _HEAL.lora_rank,
    batch_size: Annotated[
        int, typer.Option(help="Sequences per step, of all processes.")
    ] = _HEAL.batch_size,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = _HEAL.seq_len,
    learning_rate: Annotated[float, typer.Option(help="Highest learning rate.")] = (
        _HEAL.learning_rate
    ),
    bf16: Annotated[
        bool, typer.Option("--bf16", help="Compute in bfloat16; weights stay in float32.")
    ] = False,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Save memory, at a third more time.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the data order.")] = _HEAL.seed,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints. Default: a tenth.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint beside --output.")
    ] = False,
    overwrite: Overwrite = False,
    split: Split = "train",
    text_column: TextColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
) -> None:
    """Train a cut or converted model to match the model it came from, on plain text."""
    config = cfg.build(
        cfg.HealConfig,
        {
            "steps": steps,
            "train": train,
            "lora_rank": lora_rank,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "learning_rate": learning_rate,
            "bf16": bf16,
            "gradient_checkpointing": gradient_checkpointing,
            "seed": seed,
            "save_every": save_every,
        },
    )
    source = data_config(data, split, text_column, None)
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.heal import heal as pipeline

    with terminal.step_progress("numbers") as progress:
        task = progress.add_task("starting", total=None, numbers="")

        def on_step(record: Step) -> None:
            numbers = f"divergence {record.loss:.4f}"
            progress.update(task, completed=record.step, total=record.steps, numbers=numbers)

        result = pipeline(
            model,
            teacher,
            source,
            output,
            config,
            resume=resume,
            overwrite=overwrite,
            trust_remote_code=trust_remote_code,
            assume_supported=assume_supported,
            on_step=on_step,
            on_stage=lambda stage: progress.update(task, description=stage),
        )
    if json_:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        render.healed(terminal.out, result)


@app.command()
def migrate(
    model: Model,
    output: Annotated[Path, typer.Argument(help="Folder for the result.", metavar="OUT")],
    overwrite: Overwrite = False,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    json_: Json = False,
    trust_remote_code: Trust = False,
    assume_supported: Assume = False,
) -> None:
    """Rewrite a folder whose heads transformers 4 pruned, so that transformers 5 loads it."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines import prune as pipeline

    with terminal.stages() as on_stage:
        result = pipeline.migrate(
            model, output, overwrite, dtype, trust_remote_code, assume_supported, on_stage
        )
    if json_:
        typer.echo(result.manifest.model_dump_json(indent=2))
    else:
        render.pruned(terminal.out, result)


@app.command()
def verify(
    folder: Annotated[
        Path, typer.Argument(help="A folder that headprune wrote.", metavar="FOLDER")
    ],
    against: Annotated[
        str | None,
        typer.Option(help="The model it was made from: compare with its gated form in full."),
    ] = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Prove a result again: hashes, load routes, and outputs against those that were stored."""
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.verify import verify as pipeline

    with terminal.stages() as on_stage:
        result = pipeline(folder, against, trust_remote_code, on_stage)
    if json_:
        typer.echo(json.dumps(result.as_json(), indent=2))
    else:
        render.verification(terminal.out, result)
    if not result.passed:
        raise typer.Exit(1)


@app.command()
def evaluate(
    model: Model,
    data: Data,
    against: Annotated[
        str | None, typer.Option(help="Base model: report paired differences to it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write the report as JSON.")] = None,
    seq_len: Annotated[int, typer.Option(help="Tokens per window.")] = _EVALUATE.seq_len,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.")] = (
        _EVALUATE.batch_size
    ),
    max_windows: Annotated[
        int | None, typer.Option(help="Use only the first so many windows or examples.")
    ] = None,
    confidence: Annotated[float, typer.Option(help="Level of the intervals.")] = (
        _EVALUATE.confidence
    ),
    speed: Annotated[bool, typer.Option(help="Time prefill and decoding.")] = True,
    decode_batches: Annotated[
        str, typer.Option(help="Batch sizes at which decoding is timed, comma-separated.")
    ] = "1,8",
    memory: Annotated[
        str | None,
        typer.Option(help="Memory such as 24GiB: say how long a context fits beside the weights."),
    ] = None,
    dtype: DtypeOption = cfg.Dtype.AUTO,
    seed: Annotated[int, typer.Option(help="Seed of masks and of the bootstrap.")] = 0,
    split: Split = "test",
    text_column: TextColumn = None,
    label_column: LabelColumn = None,
    json_: Json = False,
    trust_remote_code: Trust = False,
) -> None:
    """Measure quality, size and speed, also against another model."""
    config = cfg.build(
        cfg.EvaluateConfig,
        {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "max_windows": max_windows,
            "confidence": confidence,
            "speed": speed,
            "decode_batches": batch_sizes(decode_batches),
            "memory": memory_bytes(memory),
            "dtype": dtype,
            "seed": seed,
        },
    )
    source = data_config(data, split, text_column, label_column)
    terminal.quiet_libraries()
    from headprune.cli import render
    from headprune.pipelines.evaluate import evaluate as pipeline

    with terminal.step_progress() as progress:
        task = progress.add_task("evaluating", total=None)
        report = pipeline(
            model,
            source,
            config,
            against=against,
            trust_remote_code=trust_remote_code,
            progress=lambda done, total: progress.update(task, completed=done, total=total),
        )
    if output is not None:
        report.write(output)
    if json_:
        typer.echo(report.model_dump_json(indent=2))
    else:
        render.evaluation(terminal.out, report)


app.command("score")(score)
app.command("plan")(plan)
app.command("sweep")(sweep)
app.command("report")(report)
app.command("check")(check)
app.command("run")(run)
app.command("init")(init)


def main() -> None:
    """Entry point."""
    terminal.run(app)
