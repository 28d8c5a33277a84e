"""The rule of "auto": the error of the output refit's log density beside its indicators, over many
models and inputs.

    python benchmarks/accuracy/auto_rule.py [--classes]

The error of an input is the mean over y ~ weights of |log p_weights(y) − log p_output(y)|. Prints
how it relates to s², the square of the largest step that a plausible y makes (in posterior standard
deviations), and to m, the distance of the mass from one; then, for targets of `AutoRefit`, the
share of inputs that are not refitted, and how many of these exceed the target. --classes: the same
for classes (digits, digits 0–4, wine, breast cancer, moons; both Gaussians, the default prior and
precision 1), whose indicator is the probability of all classes but the most probable one.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator

import small_networks as networks
import torch
import truth
from torch import Tensor, nn

import ssla
from ssla import likelihoods as L
from ssla.refit.auto import CLASS_ERROR, MASS_ERROR, STEP_ERROR, find_largest_step

LAWS = (L.HeteroscedasticGaussian(), L.Poisson(), L.StudentT(4.0, 0.4))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def last_layer(law: L.Likelihood, n: int, width: int, inputs: int) -> tuple[ssla.Posterior, Tensor]:
    x = normal(n, inputs, seed=1)
    mean, noise = torch.sin(x[:, 0]), normal(n, seed=2)
    outputs, y = 1, mean + 0.4 * noise
    if isinstance(law, L.HeteroscedasticGaussian):
        outputs, y = 2, mean + (0.2 + 0.2 * x[:, 1].abs()) * noise
    elif isinstance(law, L.Poisson):
        y = torch.poisson((0.5 + 0.7 * x[:, 0]).exp(), generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    model = (
        nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))
        .double()
        .eval()
    )
    new = torch.cat([normal(30, inputs, seed=4), 3 * normal(10, inputs, seed=5)])
    return ssla.fit(
        model, (x, y), likelihood=law, prior=ssla.priors.Gaussian(), gaussian="laplace"
    ), new


def cases() -> Iterator[tuple[str, ssla.Posterior, Tensor]]:
    for n in (70, 200, 600):
        for law in LAWS:
            yield (
                f"last layer, {type(law).__name__}, n = {n}, 5 features",
                *last_layer(law, n, 4, 2),
            )
    for n in (300, 1000):
        yield (
            f"last layer, HeteroscedasticGaussian, n = {n}, 51 features",
            *last_layer(LAWS[0], n, 50, 8),
        )
    for seed in range(3):
        model, x, y = truth.train(150, seed)
        prior = ssla.priors.Gaussian(truth.PRECISION)
        post = ssla.fit(
            model, (x, y), likelihood=LAWS[0], prior=prior, gaussian="laplace", weights="all"
        )
        yield (
            f"all weights of benchmarks/accuracy/truth.py, seed {seed}",
            post,
            torch.linspace(-4, 4, 17, dtype=torch.float64)[:, None],
        )


def errors(post: ssla.Posterior, new: Tensor) -> Tensor:
    """(inputs, 3): the error, s², m, where the refits were resolved."""
    output, weights = post.predict(new), post.predict(new, refit="weights")
    y = weights.icdf((torch.arange(64, dtype=torch.float64) + 0.5) / 64)
    error = (weights.log_prob(y) - output.log_prob(y)).abs().mean(1)
    step = find_largest_step(ssla.WeightRefit()(post, new).output, output.interval(0.95))
    flags = weights.diagnostics
    return torch.stack([error, step**2, (output.mass - 1).abs()], 1)[
        ~(flags.unconverged | flags.inaccurate)
    ]


CLASS_SETS = {
    "digits": (networks.digits, (50, 50)),
    "digits 0-4": (networks.few_digits, (50, 50)),
    "wine": (networks.wine, (50,)),
    "breast cancer": (networks.breast_cancer, (50,)),
    "moons": (networks.moons, (50,)),
}


def classes(inputs: int = 60) -> None:
    print(
        "| classes | Gaussian | prior | error, median and largest | error / others, 50%, 90% and "
        "99% |\n|---|---|---|---|---|"
    )
    parts: dict[str, list[Tensor]] = {gaussian: [] for gaussian in CLASS_ERROR}
    for name, (make, hidden) in CLASS_SETS.items():
        split = make(1)
        model = networks.perceptron(split.x.shape[1], hidden, split.outputs, "tanh")
        networks.train(model, L.Categorical(), split, 1)
        new = torch.cat([split.x_test[:inputs], split.x_ood[: inputs // 3]])
        for gaussian, kept in parts.items():
            for prior in (None, ssla.priors.Gaussian()):
                post = networks.fit(
                    model.eval(), split.x, split.y, L.Categorical(), gaussian, prior
                )
                output, weights = post.predict(new).probs, post.predict(new, refit="weights").probs
                error, others = (
                    (weights * (weights.log() - output.log()).abs()).sum(1),
                    1 - output.amax(1),
                )
                kept.append(torch.stack([error, others], 1))
                ratios = (error / others)[error > 1e-3]
                parts_of = (
                    [float(ratios.quantile(q)) for q in (0.5, 0.9, 0.99)]
                    if len(ratios)
                    else [float("nan")] * 3
                )
                print(
                    f"| {name} | {gaussian} | {'default' if prior is None else 'precision 1'} | "
                    f"{float(error.median()):.1e}, "
                    f"{float(error.max()):.1e} | "
                    f"{', '.join(f'{part:.2f}' for part in parts_of)} |",
                    flush=True,
                )
    for gaussian, kept in parts.items():
        error, others = torch.cat(kept).unbind(1)
        print(f"\n{gaussian}:")
        decisions(error, CLASS_ERROR[gaussian] * others)


def decisions(error: Tensor, guess: Tensor) -> None:
    print(
        "\n| target | not refitted | of these, above the target | their mean error | refitted, "
        "below half the target |"
    )
    print("|---|---|---|---|---|")
    for target in (0.01, 0.02, 0.05, 0.1):
        left = guess <= target
        print(
            f"| {target} | {left.double().mean():.0%} | "
            f"{(error[left] > target).double().mean():.1%} "
            f"| {float(error[left].mean()):.1e} | "
            f"{(error[~left] < target / 2).double().mean():.0%} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--classes", action="store_true")
    warnings.simplefilter("ignore", UserWarning)
    if parser.parse_args().classes:
        classes()
        return
    parts = []
    print(
        "| model | error, median and largest | error / s², median | error / m, median "
        "|\n|---|---|---|---|"
    )
    for name, post, new in cases():
        part = errors(post, new)
        parts.append(part)
        error, s, m = part.unbind(1)
        print(
            f"| {name} | {float(error.median()):.1e}, {float(error.max()):.1e} | "
            f"{float((error / s).median()):.2f} | {float((error / m).median()):.0f} |",
            flush=True,
        )
    error, s, m = torch.cat(parts).unbind(1)
    seen = error > 1e-3
    for name, ratio in (("s²", error / s), ("m", error / m)):
        low, middle, high = (float(ratio[seen].quantile(q)) for q in (0.05, 0.5, 0.95))
        print(
            f"error / {name} of {int(seen.sum())} inputs: median {middle:.2g}, 90% between "
            f"{low:.2g} and {high:.2g}"
        )
    decisions(error, torch.maximum(STEP_ERROR * s, MASS_ERROR * m))


if __name__ == "__main__":
    main()
