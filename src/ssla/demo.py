"""`make demo`: the paper's network on the paper's heteroscedastic toy data; plug-in, ASSLA and the
output refit side by side.

Two hidden layers of 50, ReLU, mean and log variance; y = 7 sin x + 3|cos(x/2)|·ε, x from three
Gaussians at −4, 0, 4. Writes demo.png.
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
from ssla._checks import writable
from ssla.files.replacing import new_file
from ssla.predictive import Predictive

RUNGS = {"plug-in": "plug_in", "ASSLA (none)": "none", "newton": "newton", "output refit": "output"}
PICTURES = (".png", ".pdf", ".svg")
LEVELS = (0.5, 0.75, 0.9, 0.95)


def toy(n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """The toy data of the paper's section 4.2: x (n, 1), y (n,)."""
    centre = torch.tensor([-4.0, 0.0, 4.0])
    spread = torch.tensor([0.4, 0.9, 0.4])
    which = torch.randint(3, (n,), generator=generator)
    x = centre[which] + spread[which] * torch.randn(n, generator=generator)
    noise = 3 * torch.cos(x / 2).abs() * torch.randn(n, generator=generator)
    return x[:, None], 7 * torch.sin(x) + noise


def paper_network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(1, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 2)
    )


def train(
    network: nn.Module, x: Tensor, y: Tensor, x_val: Tensor, y_val: Tensor, epochs: int = 3000
) -> nn.Module:
    """Adam on the Gaussian negative log likelihood; the weights with the best validation loss
    are kept.
    """
    likelihood = ssla.likelihoods.HeteroscedasticGaussian()
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    best, kept, waited = math.inf, copy.deepcopy(network.state_dict()), 0
    for _ in range(epochs):
        optimiser.zero_grad()
        loss = -likelihood.log_prob(y, network(x)).mean()
        loss.backward()
        optimiser.step()
        with torch.no_grad():
            score = float(-likelihood.log_prob(y_val, network(x_val)).mean())
        waited += 1
        if score < best:
            best, kept, waited = score, copy.deepcopy(network.state_dict()), 0
        if waited > 300:
            break
    network.load_state_dict(kept)
    return network.eval()


def timed(work: Callable[[], object], repeats: int = 7) -> float:
    """Seconds, the best of several runs."""
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best


def run(out: Path, seed: int = 0, n_test: int = 1000) -> dict[str, metrics.Summary]:
    """Train, fit, compare, plot."""
    writable(out)
    if out.suffix.lower() not in PICTURES:
        raise ValueError(f"The figure {out} must end in one of {', '.join(PICTURES)}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    (x, y), (x_val, y_val), (x_test, y_test) = (toy(n, generator) for n in (200, 100, n_test))
    print(f"training on {len(x)} points …")
    network = train(paper_network(seed), x, y, x_val, y_val)
    posterior = ssla.fit(network, (x, y), likelihood=ssla.likelihoods.HeteroscedasticGaussian())
    print(f"\n{posterior.report}\n")

    def forward() -> None:
        with torch.no_grad():
            network(x_test)

    one_pass = timed(forward, 50)
    scores: dict[str, metrics.Summary] = {}
    head = (
        f"{n_test:,} test points".ljust(20)
        + "     nll    crps"
        + "".join(f"  cover {v:.0%}" for v in LEVELS)
        + "    mass   time / forward pass"
    )
    print(head + "\n" + "-" * len(head))
    for label, refit in RUNGS.items():
        cost = timed(lambda refit=refit: posterior.predict(x_test, refit=refit).mass) / one_pass  # type: ignore[misc]
        scores[label] = s = metrics.summary(posterior.predict(x_test, refit=refit), y_test, LEVELS)
        cover = "".join(f"{s[f'coverage {v:.0%}']:11.1%}" for v in LEVELS)
        print(f"{label:<20}{s['nll']:8.4f}{s['crps']:8.4f}{cover}{s['mass']:8.4f}{cost:12.0f}")
    print(
        "\nmass is the integral before normalisation: 1 for the true predictive, so it shows the "
        "error of each refit."
    )
    draw(posterior, x, y, out)
    print(f"picture: {out}")
    return scores


def draw(posterior: ssla.Posterior, x: Tensor, y: Tensor, out: Path) -> None:
    """Bands of the output refit, and the density at one input inside the gap of the data."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    grid = torch.linspace(-6, 6, 400)[:, None]
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12, 4.6), width_ratios=[1.7, 1], layout="constrained"
    )
    plots.bands(
        posterior.predict(grid), grid, (x, y), ax=left, title="Predictive bands of the output refit"
    )
    for i, end in enumerate(posterior.predict(grid, refit="plug_in").interval(0.95).unbind(1)):
        left.plot(
            grid.flatten(),
            end,
            color=plots.OTHER,
            lw=1.1,
            ls="--",
            label=None if i else "plug-in 95%",
        )
    spot = torch.tensor([[-2.3]])
    left.axvline(float(spot), ymin=0.09, color="#888888", lw=0.8, ls=":")  # above the legend
    left.set(xlabel="x", ylabel="y", ylim=(-22, 22), xlim=(-6, 6))
    left.legend(frameon=False, fontsize=8, ncols=6, loc="lower center")
    names: dict[str, Predictive] = {
        label: posterior.predict(spot, refit=RUNGS[label])
        for label in ("plug-in", "ASSLA (none)", "output refit")
    }
    plots.density(names, 0, ax=right)
    right.set_title(f"Density at x = {float(spot):g}".replace("-", "−"), fontsize="medium")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    with new_file(out) as draft:
        figure.savefig(draft, dpi=130, format=out.suffix[1:] or "png")
    plt.close(figure)


def main() -> None:
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
    run(arguments.out, arguments.seed)


if __name__ == "__main__":
    main()
