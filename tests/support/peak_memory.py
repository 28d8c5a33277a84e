"""How much memory fits take, measured in this process: `python -m support.peak_memory NAME …`
prints JSON.

The peak of the resident memory during a fit, less what was resident before it (torch, the network,
the data). It is run in a process of its own, whose allocator returns freed memory at once (see
`measure`): otherwise the figures are those of its history.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from torch import nn

import ssla

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CASES = {
    # name: (scope, inputs, hidden, outputs, rows, likelihood, structure, gaussian, copies of the
    # structure's largest matrices)
    "dense classes": ("last_layer", 119, 0, 10, 300, "categorical", "dense", "laplace", 4),
    "dense noise": ("last_layer", 119, 0, 10, 300, "gaussian", "dense", None, 4),
    "dense counts": ("last_layer", 1200, 0, 1, 1500, "poisson", "dense", "laplace", 8),
    "dense variational": ("last_layer", 119, 0, 10, 300, "categorical", "dense", "variational", 8),
    "all dense": ("all", 30, 36, 2, 800, "gaussian", "dense", None, 4),
    "all dense variational": ("all", 30, 36, 2, 800, "categorical", "dense", "variational", 8),
    "kfac": ("last_layer", 1200, 0, 3, 500, "categorical", "kfac", "laplace", 7),
    "kfac variational": ("last_layer", 1200, 0, 3, 500, "categorical", "kfac", "variational", 8),
    "diag by default": ("all", 800, 800, 3, 4, "categorical", "diag", None, 12),
    "diag variational": ("all", 800, 800, 3, 4, "categorical", "diag", "variational", 20),
    "kfac validation": ("last_layer", 800, 0, 10, 900, "categorical", "kfac", None, 8),
    "refused": ("last_layer", 119, 0, 10, 300, "categorical", "dense", "variational", 7),
}
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "MALLOC_TRIM_THRESHOLD_": "262144",
    "OMP_NUM_THREADS": "1",
}


def measure(names):
    """{name: (peak / budget, error or None)} of the cases, from another process."""
    done = subprocess.run(
        [sys.executable, "-m", "support.peak_memory", *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env={**os.environ, **ALLOCATOR, "PYTHONPATH": os.pathsep.join(map(str, sys.path))},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def resident(key):
    return next(
        1024 * int(line.split()[1])
        for line in STATUS.read_text().splitlines()
        if line.startswith(key)
    )


def fit(name):
    """One case: the peak as a part of the budget, and the error of a refusal."""
    scope, inputs, hidden, outputs, rows, law, structure, gaussian, copies = CASES[name]
    torch.manual_seed(0)
    x = torch.randn(rows, inputs)
    layers = (
        [nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)]
        if hidden
        else [nn.Linear(inputs, outputs)]
    )
    model = nn.Sequential(*layers).eval()
    with torch.no_grad():
        f = model(x)
    targets = {
        "categorical": (ssla.likelihoods.Categorical(), f.argmax(1)),
        "gaussian": (ssla.likelihoods.Gaussian(noise="estimate"), f + 0.3 * torch.randn_like(f)),
        "poisson": (ssla.likelihoods.Poisson(), torch.poisson(f[:, 0].exp())),
    }
    likelihood, y = targets[law]
    free = sum(p.numel() for p in model.parameters())
    # Numbers in the structure's largest part; those of the diagonal choose their prior, which takes
    # further vectors
    largest = {"dense": free**2, "kfac": (inputs + 1) ** 2, "diag": free}[structure]
    prior = None if structure == "diag" else ssla.priors.Gaussian(100.0)
    budget = int(1.02 * 8 * copies * largest)
    # A third of the rows, which the network has not learned either
    unseen, chosen = None, prior
    if name.endswith("validation"):
        unseen, chosen = (torch.randn(rows // 3, inputs), torch.arange(rows // 3) % outputs), None
    CLEAR.write_text("5")  # the peak is that of the future
    before, error = resident("VmRSS"), None
    try:
        ssla.fit(
            model,
            (x, y),
            likelihood=likelihood,
            prior=chosen,
            validation=unseen,
            weights=scope,
            structure=structure,
            gaussian=gaussian,
            memory_budget=budget,
        )
    except ValueError as refusal:
        error = str(refusal)
    return (resident("VmHWM") - before) / budget, error


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    fit("all dense")  # what is loaded once: kernels and their buffers
    print(json.dumps({name: fit(name) for name in sys.argv[1:]}))
