"""All weights of a small CNN: output refits and refits of the linearised network, on digits 0 to 7.

Prints test log-loss of the network, of the output refit and of the linearised weight refit for some
prior precisions, with the processor time, the share that converged and the peak memory.

    python -m benchmarks.networks.linearised_cnn [--rows 100] [--precisions 10 100 1000] [--structure kfac]
"""

from __future__ import annotations

import argparse
import resource
import time
import warnings

import torch
from benchmarks.networks.tasks import TASKS
from torch import nn

import ssla


def trained(rows, seed: int) -> nn.Module:
    """Adam, with the weights of the epoch that has the lowest log-loss on validation rows."""
    torch.manual_seed(seed)
    task = TASKS["cnn"]
    network = task.network()
    x, y = rows.train
    optimiser = torch.optim.Adam(network.parameters(), lr=task.rate, weight_decay=task.decay)
    best = float("inf")
    state = network.state_dict()
    for _ in range(task.epochs):
        network.train()
        for batch in torch.randperm(len(x)).split(task.batch):
            loss = nn.functional.cross_entropy(network(x[batch]), y[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        network.eval()
        with torch.no_grad():
            score = float(
                nn.functional.cross_entropy(network(rows.validation[0]), rows.validation[1])
            )
        if score < best:
            best = score
            state = {name: value.clone() for name, value in network.state_dict().items()}
    network.load_state_dict(state)
    return network.eval()


def peak() -> float:
    """Peak memory of the process in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precisions", type=float, nargs="+", default=[10.0, 100.0, 1000.0])
    parser.add_argument("--structure", default="kfac")
    parser.add_argument("--gaussian", default="laplace")
    parser.add_argument("--budget", type=float, default=1.0, help="memory budget in GiB")
    parser.add_argument("--shift", default=None, help="a shift of the test rows, as 'noise 0.3'")
    parser.add_argument("--linearised", choices=["yes", "auto"], default="yes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = TASKS["cnn"].rows()
    network = trained(rows, options.seed)
    x, y = rows.test if options.shift is None else rows.shifts[options.shift]
    x, y = x[: options.rows], y[: options.rows]
    with torch.no_grad():
        plug_in = nn.functional.cross_entropy(network(x), y)
    weights = sum(value.numel() for value in network.parameters())
    print(
        f"{weights:,} weights, {len(rows.train[0])} rows; plug-in {plug_in:.4f}, {peak():.0f} MiB"
    )
    refit = ssla.WeightRefit(linearised=True if options.linearised == "yes" else None)
    for precision in options.precisions:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = ssla.fit(
                network,
                rows.train,
                likelihood=ssla.likelihoods.Categorical(),
                prior=ssla.priors.Gaussian(precision=precision),
                weights="all",
                structure=options.structure,
                gaussian=options.gaussian,
                memory_budget=int(options.budget * 2**30),
            )
            output = posterior.predict(x)
            before = time.process_time()
            answer = posterior.predict(x, refit=refit)
            seconds = time.process_time() - before
        for name, predictive in (("output", output), ("weights", answer)):
            print(f"precision {precision:g}  {name:8s} {-float(predictive.log_prob(y).mean()):.4f}")
        flags = answer.diagnostics
        print(f"   {seconds:.1f} s, {seconds / len(x):.2f} s a row, {peak():.0f} MiB; {flags}")
        for warning in caught:
            print(f"   {str(warning.message)[:300]}")


if __name__ == "__main__":
    main()
