"""The checker of import directions finds what it must, and the house is in order."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(source):
    return subprocess.run([sys.executable, ROOT / "tools/check_imports.py", str(source)], capture_output=True, text=True)


def test_imports_point_downward():
    done = run(ROOT / "src/ssla")
    assert done.returncode == 0, done.stdout


def test_the_checker_finds_an_upward_import(tmp_path):
    (tmp_path / "linalg.py").write_text("from ssla.posterior import Posterior\n")
    (tmp_path / "posterior.py").write_text("def predict():\n    from ssla.predictive import predict\n")
    (tmp_path / "priors.py").write_text("from ssla import likelihoods\n")
    done = run(tmp_path)
    assert done.returncode == 1
    assert "linalg.py:1: linalg must not import posterior" in done.stdout
    assert "priors.py:1: priors must not import likelihoods" in done.stdout
    assert "posterior.py" not in done.stdout  # the door is allowed inside a function


def test_the_core_needs_torch_and_numpy_alone():
    """`import ssla` and a fit work with every extra hidden."""
    code = """
import sys
for name in ("scipy", "scoringrules", "matplotlib", "tqdm", "sklearn", "pandas"):
    sys.modules[name] = None
import torch, ssla
model = torch.nn.Linear(2, 1)
x = torch.randn(30, 2)
post = ssla.fit(model, (x, x[:, 0] + 0.1 * torch.randn(30)), likelihood=ssla.likelihoods.Gaussian(noise="estimate"))
assert post.predict(x).interval(0.9).shape == (30, 2)
try:
    ssla.metrics.crps(post.predict(x), x[:, 0])
except ImportError as error:
    assert "pip install 'ssla[metrics]'" in str(error)
else:
    raise SystemExit("expected a hint at the extra")
"""
    done = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
