"""What README and docs show runs as it stands, and their links exist."""

import re
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ssla
from ssla import demo
from ssla.tables.cli.app import app

ROOT = Path(__file__).parents[1]


def blocks(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def executed(page, names=None):
    """The names after all Python blocks of a page, run in their order.

    names: what the page takes as given.
    """
    names = dict(names or {})
    for block in blocks(page):
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
    assert torch.equal(
        names["again"].predict(names["x"]).interval(0.95),
        names["posterior"].predict(names["x"]).interval(0.95),
    )


def test_the_page_on_pictures_draws_every_picture_of_the_library(capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    names = executed("docs/pictures.md")
    names["plots"].pit(names["predictive"], names["y_test"]).figure.canvas.draw()
    text = (ROOT / "docs" / "pictures.md").read_text()
    assert not [
        name for name in ssla.plots.__all__ if name.islower() and f"plots.{name}(" not in text
    ]
    assert "of which the prior decides" in capsys.readouterr().out
    import_module("matplotlib.pyplot").close("all")


@pytest.mark.parametrize(
    "page", ["docs/index.md", "docs/choosing.md", "docs/howto.md", "docs/report.md"]
)
def test_the_code_of_the_other_pages_runs(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    executed(page)
    assert capsys.readouterr().out


def test_the_tours_run(tmp_path, monkeypatch, capsys):
    """The Python blocks, then the commands on the files that they wrote."""
    import_module("matplotlib").use("Agg")
    monkeypatch.chdir(tmp_path)
    executed("docs/tours.md")
    import_module("matplotlib.pyplot").close("all")
    assert "conflict" in capsys.readouterr().out
    shell = "".join(re.findall(r"```sh\n(.*?)```", (ROOT / "docs" / "tours.md").read_text(), re.S))
    commands = [
        shlex.split(line, comments=True)[1:]
        for line in shell.splitlines()
        if line.startswith("ssla ")
    ]
    assert [command[0] for command in commands] == [
        "train",
        "predict",
        "evaluate",
        "report",
        "reproduce",
    ]
    for command in commands[:-1]:
        done = CliRunner().invoke(
            app, [*command, *(["--max-epochs", "5"] if command[0] == "train" else [])]
        )
        assert done.exit_code == 0, done.output
    assert all((ROOT / "docs" / "paper" / f"{name}.md").exists() for name in commands[-1][1:])


def test_the_code_of_the_page_on_bayesian_optimisation_runs(capsys):
    pytest.importorskip("botorch", reason="needs BoTorch: pip install 'ssla[botorch]'")
    names = executed("docs/botorch.md")
    assert names["Y"].shape == (11, 1)
    assert names["pending"].fitted.report.n == 12
    assert capsys.readouterr().out


def test_the_code_of_the_page_on_refits_gives_one_predictive():
    """Refits of single counts, normalised by their own sum, against the predictives that
    interpolate between a few of them.
    """
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    y = torch.poisson(torch.exp(1 + x[:, 0]), generator=torch.Generator().manual_seed(0))
    model = nn.Linear(1, 1, dtype=torch.float64).eval()
    posterior = ssla.fit(
        model, (x, y), likelihood=ssla.likelihoods.Poisson(), prior=ssla.priors.Gaussian(1.0)
    )
    names = executed(
        "docs/refits.md", {"ssla": ssla, "posterior": posterior, "x": x[:2], "y": y[:2]}
    )
    counts = torch.arange(40, dtype=torch.float64).expand(2, -1)
    log_mass = ssla.ssla(posterior, x[:2], counts).total.logsumexp(1)
    expected = names["increments"].total - log_mass
    for name, error in (("predictive", 1e-4), ("strict", 1e-4), ("auto", 0.05)):
        torch.testing.assert_close(names[name].log_prob(y[:2]), expected, rtol=0, atol=error)
    torch.testing.assert_close(names["predictive"].mass.log(), log_mass, rtol=0, atol=1e-4)


def test_the_code_of_the_page_on_tables_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X = np.random.default_rng(0).normal(size=(40, 2))
    names = executed("docs/tables.md", {"X": X, "y": X[:, 0] + 0.1 * X[:, 1] ** 2, "X_new": X[:3]})
    assert (tmp_path / "model").is_dir()
    assert names["model"].members == "auto"


class Ray(ModuleType):
    """What the library calls of ray, in this process; tests/distributed uses the real one where
    it is installed.
    """

    def init(self, address):
        assert address == "auto"

    def remote(self, function):
        task = ModuleType("task")
        task.remote = function
        return task

    def put(self, value):
        return value

    get = put

    def wait(self, parts):
        return parts, []


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:Sending large graph"
)
def test_the_code_of_the_page_on_clusters_runs(monkeypatch, capsys):
    """Its clusters are replaced: a group of one rank, a Dask cluster of this process, and a ray
    of this process.
    """
    distributed = pytest.importorskip("dask.distributed")
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None]
    rows = [
        (x[:20], 2 * x[:20, 0] + 0.1 * x[:20, 0].sin()),
        (x[20:], 2 * x[20:, 0] - 0.1 * x[20:, 0].cos()),
    ]
    model = nn.Linear(1, 1, dtype=torch.float64).eval()
    names = {
        "load_model": lambda: model,
        "read_shard": lambda rank, world: rows[rank],
        "model": model,
        "likelihood": ssla.likelihoods.Gaussian(noise=0.1),
        "read_rows": rows.__getitem__,
        "paths": [0, 1],
        "__name__": "__main__",
    }
    group, dask, ray = blocks("docs/clusters.md")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for key, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "RANK": 0,
        "WORLD_SIZE": 1,
    }.items():
        monkeypatch.setenv(key, str(value))
    try:
        exec(group, names)
    finally:
        if torch.distributed.is_initialized():  # the page itself ends the group
            torch.distributed.destroy_process_group()
    assert "likelihood" in capsys.readouterr().out
    monkeypatch.setattr(
        distributed,
        "Client",
        lambda address, real=distributed.Client: real(
            processes=False, n_workers=1, dashboard_address=":0"
        ),
    )
    exec(dask, names)
    assert names["post"].report.n == 40
    monkeypatch.setitem(sys.modules, "ray", Ray("ray"))
    names["shards"] = rows
    exec(ray, names)
    with ThreadPoolExecutor(1) as client:
        expected = ssla.distributed.fit(model, rows, client=client, likelihood=names["likelihood"])
    torch.testing.assert_close(names["post"].theta, expected.theta)


RUN = {
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            "models",
            "index",
            "tours",
            "choosing",
            "howto",
            "refits",
            "tables",
            "clusters",
            "pictures",
            "report",
            "botorch",
        )
    ),
    "docs/recipes.md",  # by tests/test_recipes.py
}
PAGES = [
    "README.md",
    *sorted(page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.md")),
]
BUILT = {"docs/messages.md"}  # written when the site is built


def test_every_page_with_code_is_run():
    assert {page for page in PAGES if blocks(page)} == RUN


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in BUILT and not page.startswith("docs/examples/")]
)
def test_every_picture_and_relative_link_is_a_tracked_file(page):
    """A file that lies here but that git ignores is missing from every clone."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a clone, or no git: the tracked files cannot be listed")
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    tracked = set(listed.stdout.splitlines())
    text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(), flags=re.S)
    links = re.findall(r"\]\(\s*<?([^)\s>]+)", text) + re.findall(
        r"""(?:src|href)=["']([^"']+)""", text
    )
    files = [link.split("#")[0] for link in links if not re.match(r"[a-z]+:|#", link)]
    missing = [
        file
        for file in files
        if (ROOT / page).parent.joinpath(file).resolve().relative_to(ROOT).as_posix() not in tracked
    ]
    assert not set(missing) - {Path(page).name for page in BUILT}
    assert files or page != "README.md"


def test_the_demo_runs_and_the_refit_is_no_worse_than_the_plug_in(tmp_path):
    scores = demo.run_demo(tmp_path / "demo.png", n_test=300)
    assert (tmp_path / "demo.png").stat().st_size > 20_000
    assert scores["output refit"]["nll"] < scores["plug-in"]["nll"]
    assert abs(scores["output refit"]["mass"] - 1) < abs(scores["ASSLA (none)"]["mass"] - 1)


# gpytorch, which ssla.botorch imports, is compiled with torch.jit.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_public_names_are_there():
    for name in ssla.__all__:
        assert hasattr(ssla, name)
    assert torch.is_tensor(
        ssla.likelihoods.Gaussian(noise=1.0).log_prob(torch.zeros(1), torch.zeros(1, 1))
    )
