"""The time of a default fit of a last layer of real size, in units of laplace-torch's.

Features like those of a deep network (rectified, one cluster or more for each class, some labels
wrong) and a head that a few steps of L-BFGS trained on them, in float32. Beside it laplace-torch's
last layer with Kronecker factors and the prior precision by its marginal likelihood. Each fit is a
process of its own with one thread: processor seconds, and peak memory above that of a process that
only made the data.

    python benchmarks/speed/head_speed.py [--case 10000x512x10 …] [--structure auto]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings

import torch
from torch import Tensor, nn

CASES = (
    "10000x512x10",
    "50000x512x10",
    "10000x512x100",
    "50000x768x2",
    "20000x2048x10",
    "5000x512x1000",
    "20000x512x0",
)
METHODS = ("nothing", "laplace-torch", "ssla")
WRONG = 0.03  # labels
SPREAD = (
    1.6  # of the features around the centre of their class, in units of the spread of the centres
)
STEPS = 40  # of L-BFGS
TEST_ROWS = 2000


def made(case: str, seed: int = 0) -> tuple[nn.Sequential, Tensor, Tensor, Tensor, Tensor]:
    """A network with a trained head, its training rows and test rows. Zero classes: regression."""
    rows, width, classes = map(int, case.split("x"))
    generator = torch.Generator().manual_seed(seed)
    kinds = classes or 20
    centres = torch.randn(kinds, 32, generator=generator)
    lift = torch.randn(32, width, generator=generator) / 32**0.5

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        label = torch.randint(kinds, (count,), generator=generator)
        inside = centres[label] + SPREAD * torch.randn(count, 32, generator=generator) / (
            1 if kinds < 50 else 2
        )
        phi = torch.relu(inside @ lift + 0.1 * torch.randn(count, width, generator=generator))
        if not classes:
            return phi, (
                torch.sin(inside[:, :1])
                + inside[:, 1:2]
                + 0.3 * torch.randn(count, 1, generator=generator)
            )
        wrong = torch.rand(count, generator=generator) < WRONG
        return phi, torch.where(wrong, torch.randint(kinds, (count,), generator=generator), label)

    x, y = drawn(rows)
    x_test, y_test = drawn(TEST_ROWS)
    model = nn.Sequential(nn.Identity(), nn.Linear(width, classes or 1))
    nn.init.zeros_(model[1].weight)
    nn.init.zeros_(model[1].bias)
    loss_of = nn.functional.cross_entropy if classes else nn.functional.mse_loss
    optimiser = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=STEPS, history_size=10)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = loss_of(model(x), y) + 0.5 / rows * (model[1].weight ** 2).sum()
        loss.backward()
        return loss

    optimiser.step(closure)
    model.requires_grad_(True)
    return model.eval(), x, y, x_test, y_test


def run(method: str, case: str, structure: str) -> None:
    """One fit: processor seconds, peak memory in MiB, log-loss of the plug-in and of the
    predictive on test rows.
    """
    torch.set_num_threads(1)
    model, x, y, x_test, y_test = made(case)
    classes = int(case.split("x")[2])
    found: dict[str, object] = {}
    resting = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    score = float("nan")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if method == "ssla":
                import ssla

                _ = ssla.fit  # loaded on first use

                start = time.process_time()
                likelihood = (
                    ssla.likelihoods.Categorical()
                    if classes
                    else ssla.likelihoods.Gaussian(noise="estimate")
                )
                options = {} if structure == "default" else {"structure": structure}
                posterior = ssla.fit(model, (x, y), likelihood=likelihood, **options)
                used = time.process_time() - start
                found["structure"] = posterior.report.structure
                found["rounds"] = posterior.report.rounds
                found["mode"] = posterior.report.mode
                found["prior"] = posterior.report.prior
                if classes <= 100:
                    score = -float(
                        posterior.predict(x_test)
                        .log_prob(y_test if classes else y_test[:, 0])
                        .mean()
                    )
            elif method == "laplace-torch":
                from laplace import Laplace

                start = time.process_time()
                rows = torch.utils.data.TensorDataset(x, y)
                loader = torch.utils.data.DataLoader(rows, batch_size=512)
                kind = "classification" if classes else "regression"
                peer = Laplace(
                    model, kind, subset_of_weights="last_layer", hessian_structure="kron"
                )
                peer.fit(loader)
                if classes:
                    peer.optimize_prior_precision(method="marglik")
                else:
                    log_prior, log_noise = (
                        torch.zeros(1, requires_grad=True),
                        torch.zeros(1, requires_grad=True),
                    )
                    optimiser = torch.optim.Adam([log_prior, log_noise], lr=1e-1)
                    for _ in range(100):
                        optimiser.zero_grad()
                        loss = -peer.log_marginal_likelihood(log_prior.exp(), log_noise.exp())
                        loss.backward()
                        optimiser.step()
                used = time.process_time() - start
                if classes <= 100 and classes:
                    p = peer(x_test)
                    score = -float(p[torch.arange(len(y_test)), y_test].log().mean())
            else:
                used = 0.0
                with torch.no_grad():
                    if classes:
                        score = float(nn.functional.cross_entropy(model(x_test), y_test))
        found["warnings"] = [str(w.message)[:160] for w in caught if "converge" in str(w.message)]
    except Exception as error:  # a peer that fails is a row of the table
        used = time.process_time() - start
        found["error"] = f"{type(error).__name__}: {error}"[:160]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found.update(seconds=used, resting=resting / 1024, peak=peak / 1024, score=score)
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--case", nargs="+", default=CASES, help="rows x features x classes (0: regression)"
    )
    parser.add_argument("--structure", default="default")
    parser.add_argument("--only", choices=METHODS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        run(options.only, options.case[0], options.structure)
        return
    print(
        f"{'case':<16}{'method':<15}{'seconds':>9}{'ratio':>7}{'MiB':>8}{'log-loss':>10}  remarks"
    )
    for case in options.case:
        base = float("nan")
        for method in METHODS:
            command = [
                sys.executable,
                __file__,
                "--case",
                case,
                "--structure",
                options.structure,
                "--only",
                method,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(
                    f"{case:<16}{method:<15} ended with code {done.returncode} {done.stderr[-300:]}"
                )
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            base = found["seconds"] if method == "laplace-torch" and "error" not in found else base
            remarks = {
                k: v
                for k, v in found.items()
                if k not in ("seconds", "peak", "resting", "score") and v != []
            }
            print(
                f"{case:<16}{method:<15}{found['seconds']:>9.2f}{found['seconds'] / base:>7.2f}"
                f"{found['peak'] - found['resting']:>8.0f}{found['score']:>10.4f}  {remarks}",
                flush=True,
            )


if __name__ == "__main__":
    main()
