"""What the processes of test_distributed.py fit; run as a script it is one rank of a gloo group."""

import contextlib
import sys
import time
from pathlib import Path

import torch

# before there is a group: its default arguments would keep the group, and its threads, until the
# end
import torch.distributed.nn
from torch import nn

import ssla
from ssla import likelihoods as L
from ssla import priors
from ssla.curvature import Kfac, LowRank

LIKELIHOODS = {
    "gaussian": L.Gaussian(noise=0.3),
    "poisson": L.Poisson(),
    "estimate": L.Gaussian(noise="estimate"),
}

LAPLACE = {"prior": priors.Gaussian(), "gaussian": "laplace"}
CASES = {
    "polished": {"likelihood": L.Gaussian(noise="estimate"), **LAPLACE},
    "counts": {
        "likelihood": L.Poisson(),
        "structure": "diag",
        **LAPLACE,
    },  # polish: a pass for each Newton step
    "kfac": {"likelihood": L.Gaussian(noise=0.3), "weights": "all", "structure": "kfac", **LAPLACE},
    "low_rank": {
        "likelihood": L.Gaussian(noise=0.3),
        "weights": "all",
        "structure": LowRank(tail=0.1, columns=2),
        **LAPLACE,
    },
    "rows": {"likelihood": L.Gaussian(noise="estimate"), "weights": "all", **LAPLACE},
    "classes": {
        "likelihood": L.Categorical(),
        "weights": "all",
        "structure": "dense",
        **LAPLACE,
        "prior": priors.Gaussian(0.5),
    },
    "averages": {"likelihood": L.Poisson(), "prior": priors.Gaussian()},
    "chosen prior": {"likelihood": L.Poisson()},
    "averages of classes": {
        "likelihood": L.Categorical(),
        "structure": "kfac",
        "prior": priors.Gaussian(),
    },
    "random classes": {"likelihood": L.Categorical()},  # the fit chooses mode="polish"
    "trained classes": {"likelihood": L.Categorical()},  # "tilt"
}


def rows(n, name="polished"):
    x = torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = x[:, 0].sin() + 0.3 * torch.randn(
        n, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    likelihood = CASES[name]["likelihood"]
    if isinstance(likelihood, L.Poisson):
        y = y.exp().round()
    return x, (y > 0).long() if isinstance(likelihood, L.Categorical) else y


def model(name):
    torch.manual_seed(0)
    outputs, width = (3, 5) if "classes" in name else (1, 40 if name == "rows" else 6)
    net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, outputs)).double().eval()
    return trained(net, name) if name == "trained classes" else net


def trained(net, name):
    x, y = rows(90, name)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    for _ in range(50):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


def shards_of(name, count=3):
    x, y = rows(90, name)
    cuts = [0, 20, 55, 90] if count == 3 else [0, 35, 90]
    return [(x[a:b], y[a:b]) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]


def whole(name):
    return ssla.fit(model(name), rows(90, name), **CASES[name])


def unseen():
    """Validation rows, of labels that do not depend on x: the network is too sure of itself."""
    x = torch.randn(60, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return x, torch.randint(3, (60,), generator=torch.Generator().manual_seed(3))


def validated(data, validation, **options):
    settings = {
        "likelihood": L.Categorical(temperature=2.0),
        "structure": "kfac",
        "mode": "tilt",
        **options,
    }
    return ssla.fit(model("trained classes"), data, validation=validation, **settings)


def summary(post):
    """Numbers in which two posteriors would differ."""
    x = rows(7)[0]
    f, K = post.outputs_at(x)
    numbers = [post.report.n, post.report.weight, post.log_evidence(), post.report.residual]
    return {
        "theta": post.theta,
        "f": f,
        "K": K,
        "numbers": torch.tensor(numbers, dtype=torch.float64),
    }


def attempt(work, name=""):
    try:
        work()
    except (ValueError, RuntimeError, TypeError) as error:
        print(name + str(error))


def with_norm(shift=0.0):
    """A network whose buffers matter."""
    net = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
        .double()
        .eval()
    )
    for i, p in enumerate(net.parameters()):
        p.data = torch.linspace(-1, 1, p.numel(), dtype=torch.float64).reshape(p.shape) + 0.1 * i
    net[1].running_mean += shift
    return net


def other_body(rank):
    net = model("polished")
    net[0].bias.data += 1e-12 * rank
    return net


def own(width):
    return L.custom(
        lambda y, f: -0.5 * ((y - f[..., 0]) / width) ** 2 - torch.tensor(width).log() - 0.919,
        support="real",
    )


def unlike(rank):
    """Calls of fit that differ between the ranks in one thing."""
    x, y = shards_of("polished", 2)[rank]
    noise = 0.3 + 1e-12 * rank

    def fit(net=None, data=(x, y), likelihood=LIKELIHOODS["gaussian"], **options):
        options = LAPLACE | options
        return ssla.fit(
            model("polished") if net is None else net, data, likelihood=likelihood, **options
        )

    def update():
        with ssla.distributed.alone():
            mine = fit(mode="tilt")
        mine.update((x, y))

    return {
        "body": lambda: fit(other_body(rank)),
        "buffers": lambda: fit(with_norm(1e-12 * rank)),
        "noise": lambda: fit(likelihood=L.Gaussian(noise=noise)),
        "estimate": lambda: fit(likelihood=L.Gaussian(noise=["estimate", 1.0][rank])),
        "tempered": lambda: fit(likelihood=L.Tempered(L.Gaussian(noise=noise), 0.5)),
        "own": lambda: fit(likelihood=own(noise)),
        "prior": lambda: fit(prior=priors.Gaussian(1 + 1e-12 * rank)),
        "mode": lambda: fit(mode=["polish", "tilt"][rank]),
        "default mode": lambda: fit(mode=["polish", None][rank]),
        "structure": lambda: fit(structure=Kfac(sharing=["expand", "reduce"][rank])),
        "free": lambda: fit(weights=["last_layer", ["2.weight"]][rank]),
        "budget": lambda: fit(
            structure="low_rank", weights="all", memory_budget=[None, 1 << 20][rank]
        ),
        "early error": lambda: fit(mode=["tilt", "nonsense"][rank]),
        "no data": lambda: fit(data=(x, y) if rank == 0 else "rows.csv"),
        "update": update,
        "alike": lambda: print("alike:", fit(likelihood=own(0.3)).report.n),
    }


def main(script, folder, rank, count):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count
    )
    gaussian = {"likelihood": LIKELIHOODS["gaussian"], **LAPLACE}
    if script == "all_cases":
        for name, settings in CASES.items():
            post = ssla.fit(model(name), shards_of(name, count)[rank], **settings)
            torch.save(summary(post), f"{folder}/{name}-{rank}.pt")
    elif script == "one_fails":
        x, y = shards_of("polished", count)[rank]
        attempt(
            lambda: ssla.fit(
                model("polished"), (x * (float("nan") if rank else 1.0), y), **gaussian
            )
        )
    elif script == "different":
        net = model("polished")
        net[2].weight.data += rank
        x, y = rows(30)
        attempt(lambda: ssla.fit(net, (x, y), **gaussian))
        if rank == 0:
            with ssla.distributed.alone():
                print("alone:", ssla.fit(net, (x, y), **gaussian).report.n)
        attempt(
            lambda: ssla.fit(
                model("polished"), (x[: 30 * (1 - rank)], y[: 30 * (1 - rank)]), **gaussian
            )
        )
    elif script == "validation":
        data, (x, y) = shards_of("trained classes", count)[rank], unseen()
        post = validated(data, (x, y))
        torch.save(summary(post), f"{folder}/validated-{rank}.pt")
        print("temperature:", post.likelihood.temperature)
        given = {
            "given": (x[rank:], y[rank:]),
            "order": (x.roll(rank, 0), y.roll(rank, 0)),
            "share": 0.3,
        }
        given["few"] = (x[: 60 - 55 * rank], y[: 60 - 55 * rank])
        for name, own in given.items():
            attempt(lambda own=own: validated(data, own), f"{name}: ")
        with ssla.distributed.alone():
            print("alone:", validated(data, (x[rank:], y[rank:])).report.validation.rows)
    elif script == "unlike":
        for name, work in unlike(rank).items():
            attempt(work, f"{name}: ")
    torch.distributed.destroy_process_group()
    deadline = time.monotonic() + 30  # on a busy machine threads take a while to end
    while (left := gloo_threads()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"threads that would abort this rank at its end: {left}"


def gloo_threads():
    """The names of this process's threads of gloo; a thread may end while it is read."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(task.read_text().strip())
    return [name for name in names if "gloo" in name]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
