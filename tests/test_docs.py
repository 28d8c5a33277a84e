"""What README and docs show runs as it stands, and their links exist."""

import re
import shutil
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import torch

import ssla
from ssla import demo

ROOT = Path(__file__).parents[1]


def executed(page):
    """The names after all Python blocks of a page, run in their order."""
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        exec(block, names)
    return names


def test_the_readmes_code_runs(capsys):
    text = (ROOT / "README.md").read_text()
    assert text.index("make demo") < text.index("make test") < 200
    assert len(text.split()) <= 600
    assert executed("README.md")["predictive"].interval(0.95).shape == (2, 2)
    assert "polished" in capsys.readouterr().out


def test_the_code_of_the_page_on_models_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = executed("docs/models.md")
    assert torch.equal(names["again"].predict(names["x"]).interval(0.95), names["posterior"].predict(names["x"]).interval(0.95))


def test_the_page_on_pictures_draws_every_picture_of_the_library(capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    names = executed("docs/pictures.md")
    names["plots"].pit(names["predictive"], names["y_test"]).figure.canvas.draw()
    text = (ROOT / "docs" / "pictures.md").read_text()
    assert not [name for name in ssla.plots.__all__ if name.islower() and f"plots.{name}(" not in text]
    assert "of which the prior decides" in capsys.readouterr().out
    import_module("matplotlib.pyplot").close("all")


PAGES = ["README.md", *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_every_picture_and_relative_link_is_a_tracked_file(page):
    """A file that lies here but that git ignores is missing from every clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone, or no git: the tracked files cannot be listed")
    listed = subprocess.run(["git", "-c", "safe.directory=*", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = set(listed.stdout.splitlines())
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.S)
    links = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(r"""(?:src|href)=["']([^"']+)""", text)
    files = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [
        file for file in files if (ROOT / page).parent.joinpath(file).resolve().relative_to(ROOT).as_posix() not in tracked
    ]
    assert not missing
    assert files or page != "README.md"


def test_the_demo_runs_and_the_refit_is_no_worse_than_the_plug_in(tmp_path):
    scores = demo.run(tmp_path / "demo.png", n_test=300)
    assert (tmp_path / "demo.png").stat().st_size > 20_000
    assert scores["output refit"]["nll"] < scores["plug-in"]["nll"]
    assert abs(scores["output refit"]["mass"] - 1) < abs(scores["ASSLA (none)"]["mass"] - 1)


def test_public_names_are_there():
    for name in ssla.__all__:
        assert hasattr(ssla, name)
    assert torch.is_tensor(ssla.likelihoods.Gaussian(noise=1.0).log_prob(torch.zeros(1), torch.zeros(1, 1)))
