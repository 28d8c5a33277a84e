"""`make demo`: plug-in, ASSLA and the output refit side by side.

The network and the heteroscedastic toy data are those of the paper. The network has two hidden
layers of 50 ReLU units and two outputs, mean and log variance. The data are y = 7 sin x +
3|cos(x/2)|·ε with x from three Gaussians at −4, 0 and 4. The demo prints a table and writes
demo.png.
"""

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import ssla
from ssla import metrics, plots
from ssla._checks import check_writable
from ssla.files.replacing import replace_file
from ssla.plots.canvas import import_pyplot
from ssla.predictive import Predictive

# Labels of the table -> the argument `refit` of predict.
REFITS = {
    "plug-in": "plug_in",
    "ASSLA (none)": "none",
    "newton": "newton",
    "output refit": "output",
}
SUFFIXES = (".png", ".pdf", ".svg")
LEVELS = (0.5, 0.75, 0.9, 0.95)
PATIENCE = 300  # epochs without a better validation loss; a guess
GAP = -2.3  # an input between two clusters of the data


def draw_toy_data(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw n rows of the toy data of the paper's section 4.2: x (n, 1), y (n,).

    generator: of the random numbers.
    """
    centre = torch.tensor([-4.0, 0.0, 4.0])
    spread = torch.tensor([0.4, 0.9, 0.4])
    cluster = torch.randint(3, (n,), generator=generator)
    x = centre[cluster] + spread[cluster] * torch.randn(n, generator=generator)
    noise = 3 * torch.cos(x / 2).abs() * torch.randn(n, generator=generator)
    return x[:, None], 7 * torch.sin(x) + noise


def make_paper_network(seed: int) -> nn.Module:
    """Make the paper's network of mean and log variance, untrained.

    This sets torch's global seed, by which the layers draw their weights.
    """
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)
    )


def train_network(
    network: nn.Module, x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, epochs: int = 3000
) -> nn.Module:
    """Train the network in place with Adam, and return it in eval mode with its best weights.

    The loss is the Gaussian negative log likelihood of x (n, 1), y (n,). The best weights are those
    with the lowest loss on the validation rows, of the same shapes. epochs: at most that many.
    """
    likelihood = ssla.likelihoods.HeteroscedasticGaussian()
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    best_loss = math.inf
    epochs_waited = 0
    best_weights = copy.deepcopy(network.state_dict())
    for _ in range(epochs):
        optimiser.zero_grad()
        loss = -likelihood.log_prob(y, network(x)).mean()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            validation_loss = float(-likelihood.log_prob(y_val, network(x_val)).mean())
        epochs_waited += 1
        if validation_loss < best_loss:
            best_loss = validation_loss
            epochs_waited = 0
            best_weights = copy.deepcopy(network.state_dict())

        if epochs_waited > PATIENCE:
            break

    network.load_state_dict(best_weights)
    return network.eval()


def measure_seconds(work: Callable[[], object], repeats: int = 7) -> float:
    """Return the seconds that a call of `work` takes, the least of several runs.

    repeats: the number of runs.
    """
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def run_demo(out: Path, seed: int = 0, n_test: int = 1000) -> dict[str, metrics.Summary]:
    """Train, fit, compare the refits on test points, and plot; return the scores of each refit.

    The comparison is printed, and the figure is written to `out`. seed: of data and network.
    n_test: the number of test points. Raises ValueError for a path that is not that of a picture or
    cannot be written, and ImportError without matplotlib, both before the work.
    """
    check_writable(out)
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"The figure {out} must end in one of {', '.join(SUFFIXES)}.")
    import_pyplot()
    out.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    x, y = draw_toy_data(200, generator)
    x_val, y_val = draw_toy_data(100, generator)
    test_data = draw_toy_data(n_test, generator)
    print(f"training on {len(x)} points …")
    network = train_network(make_paper_network(seed), x, y, x_val, y_val)
    posterior = ssla.fit(network, (x, y), likelihood=ssla.likelihoods.HeteroscedasticGaussian())
    print(f"\n{posterior.report}\n")
    scores = compare_refits(posterior, network, *test_data)
    print(
        "\nmass is the integral before normalisation: 1 for the true predictive, so it shows the "
        "error of each refit."
    )
    draw_figure(posterior, x, y, out)
    print(f"picture: {out}")
    return scores


def compare_refits(
    posterior: ssla.Posterior, network: nn.Module, x: Tensor, y: Tensor
) -> dict[str, metrics.Summary]:
    """Print the scores and the time of each refit on test points x (n, 1), y (n,).

    Returns the scores by the label of the refit. Times are in units of the network's forward pass.
    """

    def forward() -> None:
        """Run the network alone."""
        with torch.no_grad():
            network(x)

    seconds_of_pass = measure_seconds(forward, repeats=50)
    head = (
        f"{len(x):,} test points".ljust(20)
        + "     nll    crps"
        + "".join(f"  cover {v:.0%}" for v in LEVELS)
        + "    mass   time / forward pass"
    )
    print(head + "\n" + "-" * len(head))
    scores: dict[str, metrics.Summary] = {}
    for label, refit in REFITS.items():
        seconds = measure_seconds(lambda refit=refit: posterior.predict(x, refit=refit).mass)  # type: ignore[misc]
        summary = metrics.summary(posterior.predict(x, refit=refit), y, LEVELS)
        coverages = "".join(f"{summary[f'coverage {level:.0%}']:11.1%}" for level in LEVELS)
        print(
            f"{label:<20}{summary['nll']:8.4f}{summary['crps']:8.4f}{coverages}"
            f"{summary['mass']:8.4f}{seconds / seconds_of_pass:12.0f}"
        )
        scores[label] = summary

    return scores


def draw_figure(posterior: ssla.Posterior, x: Tensor, y: Tensor, out: Path) -> None:
    """Draw the predictives of the posterior, and write the figure to `out`.

    On the left are the training rows x (n, 1), y (n,), the bands of the output refit, and the ends
    of the 95% interval of the plug-in. On the right are the densities of three refits at x = GAP.
    The format is that of the suffix of `out`. Matplotlib's backend is then Agg, which needs no
    screen, for the rest of the process. Raises ImportError without matplotlib.
    """
    plt = import_pyplot()
    plt.switch_backend("Agg")

    grid = torch.linspace(-6, 6, 400)[:, None]
    figure, (bands_axes, density_axes) = plt.subplots(
        1, 2, figsize=(12, 4.6), width_ratios=[1.7, 1], layout="constrained"
    )
    plots.bands(
        posterior.predict(grid),
        grid,
        (x, y),
        ax=bands_axes,
        title="Predictive bands of the output refit",
    )
    lower, upper = posterior.predict(grid, refit="plug_in").interval(0.95).unbind(1)
    plug_in_style = {"color": plots.OTHER, "lw": 1.1, "ls": "--"}
    bands_axes.plot(grid.flatten(), lower, label="plug-in 95%", **plug_in_style)
    bands_axes.plot(grid.flatten(), upper, **plug_in_style)
    bands_axes.axvline(GAP, ymin=0.09, color="#888888", lw=0.8, ls=":")  # above the legend
    bands_axes.set(xlabel="x", ylabel="y", ylim=(-22, 22), xlim=(-6, 6))
    bands_axes.legend(frameon=False, fontsize=8, ncols=6, loc="lower center")
    predictives: dict[str, Predictive] = {
        label: posterior.predict(torch.tensor([[GAP]]), refit=REFITS[label])
        for label in ("plug-in", "ASSLA (none)", "output refit")
    }
    plots.density(predictives, 0, ax=density_axes)
    density_axes.set_title(f"Density at x = {GAP:g}".replace("-", "−"), fontsize="medium")
    for axes in (bands_axes, density_axes):
        axes.spines[["top", "right"]].set_visible(False)

    # The draft of a link has the suffix of the file to which it points, so the format is given.
    with replace_file(out) as draft:
        figure.savefig(draft, dpi=130, format=out.suffix[1:])
    plt.close(figure)


def main() -> None:
    """Run the demo from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m ssla.demo",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "--out", type=Path, default=Path("demo.png"), help="path of the figure (default: demo.png)"
    )
    parser.add_argument("--seed", type=int, default=0, help="data and network seed (default: 0)")
    arguments = parser.parse_args()
    run_demo(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
