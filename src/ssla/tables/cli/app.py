"""The commands and their options.

The work is in `ssla.tables.cli.work`, imported when a command runs. The docstring of a command is
its help text. What it raises and returns is in the docstring of the function that it calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ssla import __version__
from ssla.tables.cli.console import err, print_values, report_errors

app = typer.Typer(
    help="Predictions with intervals from a table: train, predict, evaluate.",
    epilog="Example: ssla train houses.csv --target price -o model/",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]
Data = Annotated[
    Path,
    typer.Argument(
        help="A .csv, .csv.gz, .parquet or .xlsx file, or - for a CSV from standard input."
    ),
]
Model = Annotated[Path, typer.Argument(help="A directory that `ssla train` wrote.")]
Target = Annotated[str, typer.Option("--target", "-t", help="The column to predict.")]
Drop = Annotated[list[str], typer.Option("--drop", help="A column to leave out; may be repeated.")]
Refit = Annotated[
    str, typer.Option(help="The refit, for example newton; default: that of the model.")
]
Decimal = Annotated[
    str | None,
    typer.Option("--decimal", help="Decimal mark: . or , (default: detected for each column)."),
]
Thousands = Annotated[
    str | None, typer.Option("--thousands", help="Thousands mark, for example . in 1.234,5.")
]
OtherDecimal = Annotated[
    str | None, typer.Option("--decimal", help="Decimal mark: . or , (default: as at training).")
]
OtherThousands = Annotated[
    str | None, typer.Option("--thousands", help="Thousands mark (default: as at training).")
]


def _print_version(is_wanted: bool) -> None:
    """Print the version and exit, if --version was given. typer calls this before any command."""
    if is_wanted:
        typer.echo(f"ssla {__version__}")
        raise typer.Exit


@app.callback()
def _read_common_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    # typer needs this function for the options of all commands. A docstring would replace the help
    # of the app. There is nothing to do: --version has a callback of its own.
    pass


@app.command()
@report_errors
def train(
    data: Data,
    target: Target,
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory of the model.")],
    drop: Drop = [],  # noqa: B006
    likelihood: Annotated[
        str,
        typer.Option(
            help="auto, gaussian, heteroscedastic, positive, poisson, log_normal, logit_normal or "
            "classes."
        ),
    ] = "auto",
    members: Annotated[
        int | None,
        typer.Option(help="Networks in the ensemble; if not given, as many as the table allows."),
    ] = None,
    max_epochs: Annotated[int, typer.Option(help="Maximal number of passes over the rows.")] = 200,
    test_fraction: Annotated[
        float, typer.Option(help="Share of rows held out for the scores; 0 trains on all rows.")
    ] = 0.1,
    conformal: Annotated[
        bool, typer.Option(help="Correct intervals on held-out rows (numbers only).")
    ] = False,
    tune_trials: Annotated[
        int, typer.Option(help="Number of settings to try first (Optuna; continues a study).")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Random seed of the split and the networks.")] = 0,
    decimal: Decimal = None,
    thousands: Thousands = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train on a table and write a model.

    Numbers, yes/no, categories and gaps need no preparation. The summary
    shows how each column was used, and the scores of the model on
    held-out rows.

    Example: ssla train houses.csv --target price --drop id -o model/
    """
    from ssla.tables.cli.train import Request
    from ssla.tables.cli.work import train_file

    request = Request(
        data=data,
        target=target,
        output=output,
        drop=tuple(drop),
        likelihood=likelihood,
        members="auto" if members is None else members,
        max_epochs=max_epochs,
        test_fraction=test_fraction,
        conformal=conformal,
        tune_trials=tune_trials,
        seed=seed,
        decimal=decimal,
        thousands=thousands,
    )
    print_values(train_file(request, quiet or as_json), as_json, "trained")


@app.command()
@report_errors
def predict(
    model: Model,
    data: Data,
    output: Annotated[Path, typer.Option("--output", "-o", help="A .csv or .parquet file.")],
    level: Annotated[
        list[float], typer.Option(help="Probability of the interval or set; may be repeated.")
    ] = [0.95],  # noqa: B006
    keep: Annotated[
        list[str], typer.Option(help="An input column to copy to the output; may be repeated.")
    ] = [],  # noqa: B006
    refit: Refit = "",
    decimal: OtherDecimal = None,
    thousands: OtherThousands = None,
    as_json: Json = False,
) -> None:
    """Write a prediction with its interval for every row.

    Example: ssla predict model/ new.csv -o out.csv --keep id --level 0.95

    Columns of the output, for numbers and counts:

    \b
    mean, sd            of the target, noise included
    lower_95, upper_95  the interval that contains the target with probability
                        95%; one such pair for each --level
    q0.025 ... q0.975   quantiles
    epistemic           the part of sd that more data would remove: a standard
                        deviation, sd^2 = epistemic^2 + noise^2
    mass                integral before normalisation; a value far from 1
                        shows that the approximation failed in this row
    rung                the refit that was used (see --refit)
    notes               inputs that were missing or unknown; the prediction is
                        then mixed over their training values

    For classes:

    \b
    label               the most probable class
    p(...)              probability of each class
    set_95              the smallest set of classes that contains the true
                        with probability 95%, as in cat|dog; one for each
                        --level
    mass, rung, notes   as above
    """
    from ssla.tables.cli.work import NumberFormat, predict_file

    number_format = NumberFormat(decimal, thousands)
    summary = predict_file(model, data, output, tuple(level), refit, tuple(keep), number_format)
    print_values(summary, as_json, "predicted")


@app.command()
@report_errors
def evaluate(
    model: Model,
    data: Data,
    refit: Refit = "",
    decimal: OtherDecimal = None,
    thousands: OtherThousands = None,
    as_json: Json = False,
) -> None:
    """Score a model on a table that has the target.

    nll and crps: lower is better. coverage 95%: the share of rows
    inside their 95% interval.

    Example: ssla evaluate model/ test.csv
    """
    from ssla.tables.cli.work import NumberFormat, evaluate_file

    scores = evaluate_file(model, data, refit, NumberFormat(decimal, thousands))
    print_values(scores, as_json, "scores")


@app.command()
@report_errors
def sensitivity(
    model: Model,
    data: Data,
    decimal: OtherDecimal = None,
    thousands: OtherThousands = None,
    as_json: Json = False,
) -> None:
    """Compare the predictions under weaker and stronger priors.

    Prints how far mean, doubt and intervals move with the prior of each network.

    Example: ssla sensitivity model/ new.csv
    """
    from ssla.tables.cli.work import NumberFormat, compare_priors

    comparisons = compare_priors(model, data, NumberFormat(decimal, thousands))
    print_values(comparisons, as_json, "sensitivity to the prior")


@app.command()
@report_errors
def report(
    model: Model,
    data: Annotated[
        Path | None, typer.Argument(help="A table with the target: the page is about its rows.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The page, an .html file; needs DATA.")
    ] = None,
    decimal: OtherDecimal = None,
    thousands: OtherThousands = None,
    as_json: Json = False,
) -> None:
    """Settings, training data and scores of a model; with a table, a page.

    The page is one file that opens without a network: scores beside
    those of the plug-in, calibration, the rows with the most doubt, each
    row's prediction under weaker and stronger priors, what was done with
    every column, versions, and the SHA-256 of the table.

    Example: ssla report model/ test.csv -o report.html
    """
    if (data is None) != (output is None):
        raise ValueError(
            "A page needs a table and a file: ssla report model/ test.csv -o report.html"
        )
    if data is None or output is None:
        from ssla.tables.cli.work import describe_model

        print_values(describe_model(model), as_json, "model")
        return

    from ssla.tables.cli.report_command import write_page
    from ssla.tables.cli.work import NumberFormat

    summary = write_page(model, data, output, NumberFormat(decimal, thousands))
    print_values(summary, as_json, "report")


@app.command()
@report_errors
def cost(
    data: Data,
    target: Target,
    drop: Drop = [],  # noqa: B006
    weights: Annotated[str, typer.Option(help="last_layer or all.")] = "last_layer",
    structure: Annotated[str, typer.Option(help="dense, kfac, diag or low_rank.")] = "dense",
    decimal: Decimal = None,
    thousands: Thousands = None,
    as_json: Json = False,
) -> None:
    """Memory and time of a fit, before it starts.

    Example: ssla cost houses.csv --target price --weights all --structure kfac
    """
    from ssla.tables.cli.work import NumberFormat, estimate_file_cost

    number_format = NumberFormat(decimal, thousands)
    facts = estimate_file_cost(data, target, tuple(drop), weights, structure, number_format)
    print_values(facts, as_json, "cost")


@app.command()
@report_errors
def demo(
    output: Annotated[Path, typer.Option("--output", "-o", help="The picture.")] = Path("demo.png"),
) -> None:
    """Train on toy data, compare predictives, plot them.

    Example: ssla demo -o demo.png
    """
    from ssla.demo import run_demo

    run_demo(output)
    err.print(f"wrote {output}", markup=False)


@app.command()
@report_errors
def reproduce(
    studies: Annotated[
        list[str] | None, typer.Argument(help="Names of studies; an unknown name lists them.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every study.")] = False,
    quick: Annotated[bool, typer.Option(help="A small version of each study.")] = False,
    folder: Annotated[
        Path,
        typer.Option(help="Folder of records and results; an interrupted run continues there."),
    ] = Path("paper"),
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
    page: Annotated[
        Path | None, typer.Option(help="Write the page here too, with copies of the figures.")
    ] = None,
    report: Annotated[
        bool,
        typer.Option("--report", help="No computation: tables and page from existing records."),
    ] = False,
) -> None:
    """Studies of the paper: published numbers beside those of ssla.

    Example: ssla reproduce --all --quick --folder /tmp/paper
    """
    try:
        from ssla_paper.__main__ import reproduce as run_studies
        from ssla_paper.studies import STUDIES
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ssla_paper":
            raise
        raise ImportError(
            "The studies are a separate package, which is not installed. In the repository run: "
            "pip install ./reproduction"
        ) from None

    names = list(STUDIES) if every else (studies or [])
    if not names:
        raise ValueError(f"Name a study ({', '.join(STUDIES)}), or give --all.")
    try:
        run_studies(names, folder, quick=quick, jobs=jobs, page=page, work=not report)
    except KeyboardInterrupt:
        err.print(
            "Interrupted: finished tasks are kept. Run the command again to continue.", style="red"
        )
        raise typer.Exit(130) from None
