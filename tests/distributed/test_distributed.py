"""Shards read by other processes give the posterior of all data read by one."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

import ssla
from ssla import likelihoods as L
from ssla.curvature import LowRank
from support.distributed_cases import CASES, LIKELIHOODS, rows, summary, unseen, validated, whole

HERE = Path(__file__).parents[1] / "support"
pytestmark = pytest.mark.filterwarnings("ignore:The network is")


def assert_equal(found, expected, tolerance=1e-10):
    """found: what `summary` gives."""
    for name, value in expected.items():
        scale = float(value.abs().max()) + 1e-300
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance * scale), name


# --- torch.distributed ---------------------------------------------------------------------


def run_ranks(script, tmp_path, count=2):
    """`count` processes of a gloo group; their outputs and exit codes."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    }
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                str(HERE / "distributed_cases.py"),
                script,
                str(tmp_path),
                str(rank),
                str(count),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in started]
    return outputs, [process.returncode for process in started]


@pytest.mark.parametrize("count", [2, 3])
def test_every_rank_gets_the_posterior_of_all_shards(tmp_path, count):
    outputs, codes = run_ranks("all_cases", tmp_path, count)
    assert codes == [0] * count, outputs
    for name in CASES:
        found = [
            torch.load(tmp_path / f"{name}-{rank}.pt", weights_only=True) for rank in range(count)
        ]
        assert_equal(found[0], ssla_summary(name))
        for other in found[1:]:
            assert all(torch.equal(other[key], found[0][key]) for key in other)  # the same bits


def ssla_summary(name):
    from support.distributed_cases import summary

    return summary(whole(name))


def test_an_error_on_one_rank_ends_all_of_them_with_its_message(tmp_path):
    outputs, codes = run_ranks("one_fails", tmp_path)
    assert codes == [0, 0], outputs
    assert "another rank failed. rank 1: ValueError: x must be finite" in outputs[0]
    assert "x must be finite" in outputs[1]


def test_ranks_with_different_networks_and_ranks_without_rows_are_refused(tmp_path):
    outputs, codes = run_ranks("different", tmp_path)
    assert codes == [0, 0], outputs
    for output in outputs:
        assert "The ranks hold different networks" in output
        assert "rank 1 has no rows" in output
    assert "alone: 30" in outputs[0]


def test_ranks_that_differ_in_anything_but_the_data_are_refused(tmp_path):
    outputs, codes = run_ranks("unlike", tmp_path)
    assert codes == [0, 0], outputs
    for output in outputs:
        said = dict(line.split(": ", 1) for line in output.splitlines())
        for name in ("body", "buffers"):
            assert said[name].startswith("The ranks hold different networks")
        for name, what in (
            ("noise", "likelihoods"),
            ("estimate", "likelihoods"),
            ("tempered", "likelihoods"),
            ("own", "likelihoods"),
            ("prior", "priors"),
            ("mode", "modes"),
            ("structure", "structures"),
            ("free", "free parameters"),
            ("budget", "structures"),
            ("update", "structures"),
        ):
            assert f"The ranks were given different {what} (rank 1 not as rank 0)" in said[name], (
                name
            )
        assert said["alike"] == "90"
        assert "default mode" not in said  # it is the same mode
        assert "nonsense" in said["early error"]
        assert "data is a str" in said["no data"]
    assert "another rank failed. rank 1: ValueError: Unknown mode 'nonsense'" in outputs[0]


def test_validation_rows_choose_the_same_on_every_rank_and_must_be_the_same(tmp_path):
    outputs, codes = run_ranks("validation", tmp_path)
    assert codes == [0, 0], outputs
    expected = validated(rows(90, "trained classes"), unseen())
    for rank, output in enumerate(outputs):
        said = dict(line.split(": ", 1) for line in output.splitlines())
        assert_equal(
            torch.load(tmp_path / f"validated-{rank}.pt", weights_only=True),
            summary(expected),
            1e-8,
        )
        assert float(said["temperature"]) == pytest.approx(
            expected.likelihood.temperature, rel=1e-9
        )
        for name in ("given", "order", "share"):
            assert "The ranks have different validation rows" in said[name]
        assert "too few to choose" in said["few"]
        assert said["alone"] == str(60 - rank)
    assert expected.likelihood.temperature > 2
    assert "another rank failed. rank 1: ValueError: validation= has 5 rows" in outputs[0]


# --- clients -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_an_executor_gives_the_posterior_of_all_shards(name):
    with ThreadPoolExecutor(2) as pool:
        assert_equal(on_client(name, pool), ssla_summary(name))


def on_client(name, client, shards=None, **options):
    from support.distributed_cases import model, shards_of, summary

    settings = CASES[name]
    post = ssla.distributed.fit(
        model(name), shards or shards_of(name), client=client, **settings, **options
    )
    return summary(post)


def kill_once(flag, x, y):
    """A shard whose first reader dies without a word."""
    if not os.path.exists(flag):
        Path(flag).write_text("died")
        os._exit(1)
    return x, y


@pytest.fixture(scope="module")
def dask_client():
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("distributed")
    environment = {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), "OMP_NUM_THREADS": "1"}
    with (
        dask.config.set(
            {
                "distributed.nanny.environ": environment,
                "distributed.logging.distributed": "critical",
            }
        ),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=60
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore:Sending large graph"
)
@pytest.mark.parametrize("name", CASES)
def test_a_dask_cluster_gives_the_posterior_of_all_shards(name, dask_client):
    dask_client.wait_for_workers(2, timeout=60)  # one may have been killed by another test
    assert_equal(on_client(name, dask_client), ssla_summary(name))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_dask_reads_functions_futures_and_delayed_values(dask_client):
    import dask

    from support.distributed_cases import shards_of

    one, two, three = shards_of("polished")
    shards = [partial(tuple, one), dask_client.submit(tuple, two), dask.delayed(tuple)(three)]
    assert_equal(on_client("polished", dask_client, shards), ssla_summary("polished"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_killed_worker_is_retried_and_nothing_changes(dask_client, tmp_path):
    from support.distributed_cases import shards_of

    flag = tmp_path / "flag"
    parts = shards_of("counts")
    shards = [parts[0], parts[1], partial(kill_once, str(flag), *parts[2])]
    found = on_client("counts", dask_client, shards)
    assert flag.read_text() == "died"
    assert_equal(found, ssla_summary("counts"))


@pytest.mark.filterwarnings("ignore")
def test_a_ray_cluster_gives_the_posterior_of_all_shards():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(HERE)}},
    )
    try:
        assert_equal(on_client("counts", ray), ssla_summary("counts"))
    finally:
        ray.shutdown()


def test_workers_read_the_network_as_it_was_when_the_fit_began():
    """Training the module further between two passes changes no sum."""
    from support.distributed_cases import model, shards_of, summary

    net, shards = model("counts"), shards_of("counts")

    def meddle(x, y):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1.1)
        return x, y

    with ThreadPoolExecutor(1) as pool:
        work = [shards[0], *(partial(meddle, *shard) for shard in shards[1:])]
        post = ssla.distributed.fit(net, work, client=pool, **CASES["counts"])
    assert_equal(summary(post), ssla_summary("counts"))


# --- mistakes ------------------------------------------------------------------------------


def test_mistakes_are_named():
    x, y = rows(20)
    net = whole("polished").network.frozen.module
    with ThreadPoolExecutor(1) as pool:
        good = {
            "client": pool,
            "likelihood": L.Gaussian(noise=0.3),
            "prior": ssla.priors.Gaussian(),
        }
        with pytest.raises(ValueError, match="shards is empty"):
            ssla.distributed.fit(net, [], **good)
        with pytest.raises(
            TypeError,
            match=r"client must be a dask.distributed.Client, the module ray, .* is a str",
        ):
            ssla.distributed.fit(net, [(x, y)], **good | {"client": "tcp://here"})
        with pytest.raises(ValueError, match="The data are empty"):
            ssla.distributed.fit(net, [(x[:0], y[:0])], **good)
        with pytest.raises(ValueError, match="x must be finite"):
            ssla.distributed.fit(net, [(x, y), (x * float("nan"), y)], **good)
        with pytest.raises(ValueError, match=r"needs .* more than the memory budget"):
            ssla.distributed.fit(net, [(x, y)], **good, memory_budget=100)


def test_shards_without_rows_are_passed_over():
    x, y = rows(90)
    with ThreadPoolExecutor(2) as pool:
        for structure in ("kfac", "diag", LowRank(rank=3)):
            options = {
                "likelihood": LIKELIHOODS["gaussian"],
                "prior": ssla.priors.Gaussian(),
                "structure": structure,
                "mode": "tilt",
            }
            net = whole("polished").network.frozen.module
            post = ssla.distributed.fit(
                net, [(x[:0], y[:0]), (x[:50], y[:50]), (x[50:], y[50:])], client=pool, **options
            )
            alone = ssla.fit(net, (x, y), **options)
            assert post.report.n == 90
            assert torch.allclose(
                post.marginal(x).covariance, alone.marginal(x).covariance, rtol=1e-10
            )
