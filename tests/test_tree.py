"""The tree under src/ssla: where imports stand, how many entries there are, and what the core
needs.
"""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ssla"
LAZY = {
    "__init__.py",
    "tables/cli/__init__.py",
    "tables/cli/app.py",
}  # `ssla --help` does not wait for torch


def inner_imports(tree):
    """Lines of imports from ssla inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    inside = [node for f in ast.walk(tree) if isinstance(f, functions) for node in ast.walk(f)]
    named = [(n.lineno, n.module or "") for n in inside if isinstance(n, ast.ImportFrom)]
    named += [
        (n.lineno, alias.name) for n in inside if isinstance(n, ast.Import) for alias in n.names
    ]
    return sorted({line for line, name in named if name.split(".")[0] == "ssla"})


def test_imports_of_the_package_stand_at_the_top_of_a_file():
    """Directions are checked by import-linter (`make lint`, contract in pyproject.toml)."""
    assert inner_imports(
        ast.parse("def f():\n    from ssla.curvature import Dense\n    import ssla.data")
    ) == [2, 3]
    found = {}
    for path in SOURCE.rglob("*.py"):
        name = path.relative_to(SOURCE).as_posix()
        if name not in LAZY and (lines := inner_imports(ast.parse(path.read_text()))):
            found[name] = lines
    assert not found


def test_the_top_of_the_package_has_at_most_29_entries():
    entries = [entry.name for entry in SOURCE.iterdir() if entry.name != "__pycache__"]
    assert len(entries) <= 29, sorted(entries)
    assert not [
        path
        for path in SOURCE.rglob("*.py")
        if path.name in ("utils.py", "base.py", "helpers.py", "common.py")
    ]


def test_no_two_modules_have_one_name():
    """But for the public paths at the top, which are doors to integrations."""
    doors = {"botorch.py", "mlflow.py"}
    names = [p.name for p in SOURCE.rglob("*.py") if not p.name.startswith("__")]
    assert not {name for name in names if names.count(name) > 1} - doors


def test_the_core_never_imports_the_tables():
    """The first floor works without the second: import-linter checks this, too."""
    code = (
        "import sys, torch, ssla; ssla.fit; ssla.load; ssla.credal; ssla.distributed; ssla.plots; "
        "sys.exit(any(name.startswith('ssla.tables') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


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
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
