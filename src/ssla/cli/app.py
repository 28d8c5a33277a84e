"""The commands and their options. The work is in `ssla.cli.work`, imported when a command runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssla.cli.console import err, show, told

app = typer.Typer(
    help="Predictions with honest intervals from a table: train, predict, evaluate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Data = Annotated[Path, typer.Argument(help="A CSV or Parquet file.")]
Model = Annotated[Path, typer.Argument(help="A directory that `ssla train` wrote.")]
Target = Annotated[str, typer.Option("--target", "-t", help="The column to predict.")]
Drop = Annotated[list[str], typer.Option("--drop", help="A column to leave out; may be repeated.")]


@app.command()
@told
def train(
    data: Data,
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the model goes: a directory.")],
    drop: Drop = [],  # noqa: B006
    likelihood: Annotated[str, typer.Option(help="auto, gaussian, heteroscedastic, poisson or classes.")] = "auto",
    members: Annotated[int, typer.Option(help="Networks in the ensemble.")] = 1,
    max_epochs: Annotated[int, typer.Option(help="At most so many passes over the rows.")] = 200,
    test_fraction: Annotated[float, typer.Option(help="Share of rows kept for the scores; 0 to learn from all.")] = 0.1,
    conformal: Annotated[bool, typer.Option(help="Correct intervals on rows kept aside (numbers only).")] = False,
    tune_trials: Annotated[int, typer.Option(help="Try so many settings first (Optuna; continues a study).")] = 0,
    seed: Annotated[int, typer.Option(help="Of the split and the networks.")] = 0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on a table and write a model."""
    from ssla.cli.training import Request, run

    request = Request(
        data, target, output, tuple(drop), likelihood, members, max_epochs, test_fraction, conformal, tune_trials, seed
    )
    show(run(request, quiet or as_json), as_json, "trained")


@app.command()
@told
def predict(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .csv or .parquet file.")],
    level: Annotated[float, typer.Option(help="Of the interval.")] = 0.95,
    refit: Annotated[str, typer.Option(help="Rung of the ladder; the model's own if not given.")] = "",
    as_json: Json = False,
) -> None:
    """Write mean, sd, interval, quantiles, mass and rung for every row (classes: label and probabilities)."""
    from ssla.cli.work import predict_file

    show(predict_file(model, data, output, level, refit), as_json, "predicted")


@app.command()
@told
def evaluate(model: Model, data: Data, refit: Annotated[str, typer.Option(help="Rung.")] = "", as_json: Json = False) -> None:
    """Score a model on a table that has the target."""
    from ssla.cli.work import evaluate_file

    show(evaluate_file(model, data, refit), as_json, "scores")


@app.command()
@told
def sensitivity(model: Model, data: Data, as_json: Json = False) -> None:
    """How much the predictions depend on the prior."""
    from ssla.cli.work import sensitivity_of

    show(sensitivity_of(model, data), as_json, "sensitivity to the prior")


@app.command()
@told
def report(model: Model, as_json: Json = False) -> None:
    """What a model is, what it saw, and how it scored when it was trained."""
    from ssla.cli.work import report_of

    show(report_of(model), as_json, "model")


@app.command()
@told
def cost(
    data: Data,
    target: Target,
    drop: Drop = [],  # noqa: B006
    weights: Annotated[str, typer.Option(help="last_layer or all.")] = "last_layer",
    structure: Annotated[str, typer.Option(help="dense, kfac, diag or low_rank.")] = "dense",
    as_json: Json = False,
) -> None:
    """What a fit would take, before it is begun."""
    from ssla.cli.work import cost_of

    show(cost_of(data, target, tuple(drop), weights, structure), as_json, "cost")


@app.command()
@told
def demo(output: Annotated[Path, typer.Option("--output", "-o", help="The picture.")] = Path("demo.png")) -> None:
    """Train on toy data, compare predictives, draw them."""
    from ssla.demo import run

    run(output)
    err.print(f"wrote {output}")


@app.command()
@told
def reproduce(
    studies: Annotated[list[str] | None, typer.Argument(help="Their names; a wrong one lists them.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Every study.")] = False,
    quick: Annotated[bool, typer.Option(help="A small version of each.")] = False,
    folder: Annotated[Path, typer.Option(help="Where records and results go; a killed run goes on from there.")] = Path("paper"),
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    page: Annotated[Path | None, typer.Option(help="Write the page here too, with copies of the figures.")] = None,
    report: Annotated[bool, typer.Option("--report", help="No work: tables and page from the records that are there.")] = False,
) -> None:
    """Studies of the paper: the published number beside ours.

    Example: ssla reproduce --all --quick --folder /tmp/paper
    """
    try:
        from ssla_paper.__main__ import reproduce as work
        from ssla_paper.studies import STUDIES
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ssla_paper":
            raise
        raise ImportError(
            "The studies are a package of their own, which is not installed. In the repository run: pip install ./reproduction"
        ) from None

    names = list(STUDIES) if every else (studies or [])
    if not names:
        raise ValueError(f"Name a study ({', '.join(STUDIES)}), or give --all.")
    try:
        work(names, folder, quick=quick, jobs=jobs, page=page, work=not report)
    except KeyboardInterrupt:
        err.print("Interrupted: what was done is kept. Start again to go on.", style="red")
        raise typer.Exit(130) from None
