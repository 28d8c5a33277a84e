"""Every room can be the first that is imported, and public names are the same whichever way
they are reached.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import ssla

SOURCE = Path(ssla.__file__).parent
EXTRAS = {
    "botorch",
    "cli",
    "mlflow",
    "scoring",
    "sklearn",
    "tables",
    "plots",
    "demo",
    "paper",
}  # need more than torch and numpy
ROOMS = sorted(
    {p.stem if p.is_file() else p.name for p in SOURCE.iterdir() if not p.name.startswith("_")}
    - EXTRAS
    - {"py"}
)


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_room_can_come_first():
    """One process: each room is imported with the package forgotten before."""
    forget = (
        "[sys.modules.pop(m) for m in list(sys.modules) if m == 'ssla' or m.startswith('ssla.')]"
    )
    lines = "\n".join(f"{forget}; import ssla.{room}" for room in ROOMS if room != "py")
    found = run(f"import sys, torch\n{lines}")
    assert found.returncode == 0, found.stderr[-800:]


@pytest.mark.parametrize(
    "first",
    [
        "from ssla.diagnostics.sensitivities import Sensitivity",
        "import ssla.diagnostics.credal_sets",
        "import ssla",
    ],
)
def test_functions_are_not_hidden_by_rooms(first):
    functions = "ssla.sensitivity, ssla.credal, ssla.fit, ssla.ssla, ssla.mixture"
    code = f"{first}\nimport ssla\nassert all(callable(f) for f in ({functions}))"
    found = run(
        code + "\nassert ssla.predictive.from_marginal and ssla.likelihoods.Gaussian and 'fit' in "
        "ssla.__all__"
    )
    assert found.returncode == 0, found.stderr[-800:]


def test_the_package_alone_does_not_load_torch():
    found = run(
        "import sys, ssla\nassert 'torch' not in sys.modules\nssla.fit\nassert 'torch' in "
        "sys.modules"
    )
    assert found.returncode == 0, found.stderr[-800:]


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="module 'ssla' has no attribute 'fitt'"):
        _ = ssla.fitt


def test_no_fit_or_prediction_loads_the_compiler():
    """torch's compiler needs sympy, whose import takes two to eight seconds;
    torch.broadcast_shapes, for example, loads both.
    """
    code = """
import sys, torch, ssla
from ssla import likelihoods as L
x = torch.linspace(-1, 1, 20)[:, None]
own = L.custom(lambda y, f: -(y - f[..., 0]).abs(), support="real")
for law, outputs in ((L.Gaussian(1.0), 1), (L.Categorical(), 3), (L.Bernoulli(), 1), (L.Poisson(), 1), (own, 1)):
    y = x[:, 0] if isinstance(law, L.Gaussian) else (x[:, 0] > 0).long()
    ssla.fit(torch.nn.Linear(1, outputs), (x, y), likelihood=law).predict(x).log_prob(y)
assert "sympy" not in sys.modules
"""
    found = run(code)
    assert found.returncode == 0, found.stderr[-800:]
