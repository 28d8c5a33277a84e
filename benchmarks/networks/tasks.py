"""The rows and networks of the suite: five tasks of classes and two regressions.

Each task has rows that train the network, validation rows that the network never sees, test rows,
out-of-distribution inputs (OOD) and shifted copies of the test rows. The rows are the same for
every seed: a seed is the initialisation of a network and the order of its batches. No training
stops early, so validation rows take no part in it.

clinc        150 intents as sentence embeddings; 256-512-512-150 with dropout 0.3;
             OOD: out-of-scope requests; shift: noise
fashion      Fashion-MNIST; two convolutions and a linear layer of 512;
             OOD: MNIST; shifts: noise, blur, rotation
cnn          digits 0 to 7 of scikit-learn; two convolutions with batch norm;
             OOD: digits 8 and 9; shifts: noise, blur, rotation
lstm         generated sequences with label noise; an LSTM of 128;
             OOD: unseen tokens; shift: replaced tokens
transformer  the same sequences; two layers with four heads and dropout 0.1
bike         log count of hours with dry weather; three layers of 256;
             OOD and shift: hours with rain or snow; shift: noise
generated    100,000 rows of 20 inputs; three layers of 256;
             OOD and shift: inputs outside the range of training; shift: noise

clinc and fashion are read from the folder that SSLA_NETWORKS names, bike from SSLA_DATA.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional

CLASSES, REGRESSION = "classes", "regression"

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of one task. `shifts`: named pairs (inputs, targets of the test rows)."""

    train: Pair
    validation: Pair
    test: Pair
    ood: Tensor
    shifts: dict[str, Pair]


@dataclass(frozen=True)
class Task:
    """One task: its rows, its network and how the network is trained.

    `network` builds an untrained network of two parts, body and head; the head is its last linear
    layer.
    """

    name: str
    kind: str
    rows: Callable[[], Rows]
    network: Callable[[], nn.Sequential]
    epochs: int
    batch: int = 128
    rate: float = 3e-3
    decay: float = 1e-4
    dropout: bool = field(default=False)


def network_of(body: nn.Module, features: int, outputs: int) -> nn.Sequential:
    """A network whose two parts are the features and the last linear layer."""
    return nn.Sequential(body, nn.Linear(features, outputs))


def noisy(x: Tensor, scale: float, seed: int = 0) -> Tensor:
    """x plus Gaussian noise of the given standard deviation."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed))
    return x + scale * noise


# --- networks -----------------------------------------------------------------------------------


def perceptron(widths: list[int], dropout: float = 0.0) -> nn.Sequential:
    """Linear layers with ReLU, and dropout after each where asked."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def fashion_network() -> nn.Sequential:
    body = nn.Sequential(
        nn.Unflatten(1, (1, 28, 28)),
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 512),
        nn.ReLU(),
    )
    return network_of(body, 512, 10)


def digits_network() -> nn.Sequential:
    body = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 64),
        nn.ReLU(),
    )
    return network_of(body, 64, DIGIT_CLASSES)


class LSTMBody(nn.Module):
    """Tokens (N, L) to the mean over time of the outputs of an LSTM (N, 128)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 32)
        self.lstm = nn.LSTM(32, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(self.embedding(x))[0]
        return outputs.mean(1)


class TransformerBody(nn.Module):
    """Tokens (N, L) to the mean over positions of a transformer encoder (N, 64)."""

    def __init__(self, tokens: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, 64)
        self.position = nn.Parameter(0.02 * torch.randn(length, 64))
        layer = nn.TransformerEncoderLayer(64, 4, 128, 0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.encoder(self.embedding(x) + self.position)).mean(1)


# --- classes ------------------------------------------------------------------------------------


def folder(variable: str) -> Path:
    """The folder that an environment variable names."""
    if variable not in os.environ:
        raise SystemExit(
            f"Set {variable} to the folder of the data; see benchmarks/networks/tasks.py."
        )
    return Path(os.environ[variable])


def clinc_rows() -> Rows:
    arrays = np.load(folder("SSLA_NETWORKS") / "clinc150.npz")
    scale = arrays["X_train"].astype(np.float32).std(0)

    def inputs(name: str) -> Tensor:
        return torch.from_numpy(arrays[f"X_{name}"].astype(np.float32) / scale)

    def targets(name: str) -> Tensor:
        return torch.from_numpy(arrays[f"y_{name}"].astype(np.int64))

    test = inputs("test"), targets("test")
    shifts = {f"noise {level}": (noisy(test[0], level), test[1]) for level in (0.3, 0.6)}
    return Rows(
        (inputs("train"), targets("train")),
        (inputs("val"), targets("val")),
        test,
        inputs("oos_test"),
        shifts,
    )


def blurred(x: Tensor, side: int, width: float) -> Tensor:
    """Pictures (N, side²) after a Gaussian filter of standard deviation `width` pixels."""
    reach = math.ceil(2 * width)
    places = torch.arange(-reach, reach + 1).float()
    kernel = torch.exp(-0.5 * (places / width) ** 2)
    kernel = kernel / kernel.sum()
    pictures = x.reshape(-1, 1, side, side)
    pictures = functional.conv2d(pictures, kernel.reshape(1, 1, -1, 1), padding=(reach, 0))
    pictures = functional.conv2d(pictures, kernel.reshape(1, 1, 1, -1), padding=(0, reach))
    return pictures.reshape(len(x), -1)


def rotated(x: Tensor, side: int, degrees: float) -> Tensor:
    """Pictures (N, side²) rotated about their centre, with bilinear interpolation."""
    angle = math.radians(degrees)
    turn = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    grid = functional.affine_grid(turn[None], [1, 1, side, side], align_corners=False)
    pictures = x.reshape(-1, 1, side, side)
    grid = grid.expand(len(pictures), -1, -1, -1)
    return functional.grid_sample(pictures, grid, align_corners=False).reshape(len(x), -1)


def picture_shifts(
    test: Pair, side: int, noise: float, width: float, degrees: float
) -> dict[str, Pair]:
    x, y = test
    return {
        f"noise {noise}": (noisy(x, noise).clamp(0, 1), y),
        f"blur {width}": (blurred(x, side, width), y),
        f"rotation {degrees:.0f}": (rotated(x, side, degrees), y),
    }


def fashion_rows() -> Rows:
    """The first 50,000 pictures train, the next 5,000 validate, the last 10,000 test."""
    data = folder("SSLA_NETWORKS")
    arrays = np.load(data / "fashion.npz")
    x = torch.from_numpy(arrays["X"].astype(np.float32) / 255)
    y = torch.from_numpy(arrays["y"].astype(np.int64))
    ood = torch.from_numpy(np.load(data / "mnist_ood.npz")["X"].astype(np.float32) / 255)
    test = x[-10_000:], y[-10_000:]
    shifts = picture_shifts(test, 28, 0.2, 1.0, 20.0)
    return Rows((x[:50_000], y[:50_000]), (x[50_000:55_000], y[50_000:55_000]), test, ood, shifts)


DIGIT_CLASSES = 8
DIGIT_ROWS = (700, 250)  # train, validation; the rest is the test


def cnn_rows() -> Rows:
    """Digits 0 to 7 in a fixed random order; digits 8 and 9 are out of distribution."""
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.from_numpy(images.astype(np.float32) / 16)
    y = torch.from_numpy(labels.astype(np.int64))
    known = y < DIGIT_CLASSES
    order = torch.randperm(int(known.sum()), generator=torch.Generator().manual_seed(0))
    x_known = x[known][order]
    y_known = y[known][order]
    start = DIGIT_ROWS[0]
    end = sum(DIGIT_ROWS)
    test = x_known[end:], y_known[end:]
    return Rows(
        (x_known[:start], y_known[:start]),
        (x_known[start:end], y_known[start:end]),
        test,
        x[~known],
        picture_shifts(test, 8, 0.3, 0.7, 25.0),
    )


SEQUENCE_CLASSES = 12
SEQUENCE_LENGTH = 24
KNOWN_TOKENS = 16
TOKENS = 24  # 16 to 23 never occur in training
LABEL_NOISE = 0.1
SEQUENCE_ROWS = (6_000, 1_500, 4_000, 2_000)  # train, validation, test, OOD


def sequences(count: int, tokens: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(tokens[0], tokens[1], (count, SEQUENCE_LENGTH), generator=generator)


def sequence_rows() -> Rows:
    """A class is a motif of four tokens that stands at a random place, one of them often replaced.

    10% of the labels are uniform over all classes. Out of distribution: motifs and background of
    which half the tokens are from the part of the alphabet that never occurs in training. Shift:
    10% and 20% of the tokens replaced.
    """
    generator = torch.Generator().manual_seed(0)
    motifs = torch.randint(0, KNOWN_TOKENS, (SEQUENCE_CLASSES, 4), generator=generator)

    def labelled(count: int) -> Pair:
        x = sequences(count, (0, KNOWN_TOKENS), generator)
        true = torch.randint(0, SEQUENCE_CLASSES, (count,), generator=generator)
        places = torch.randint(
            0, SEQUENCE_LENGTH - 3, (count, 1), generator=generator
        ) + torch.arange(4)
        x = x.scatter(1, places, motifs[true])
        # One of four tokens is lost in half of the sequences, so that classes overlap.
        lost = torch.randint(0, 8, (count,), generator=generator)
        rows = torch.nonzero(lost < 4)[:, 0]
        x[rows, places[rows, lost[rows]]] = torch.randint(
            0, KNOWN_TOKENS, (len(rows),), generator=generator
        )
        wrong = torch.rand(count, generator=generator) < LABEL_NOISE
        random_labels = torch.randint(0, SEQUENCE_CLASSES, (count,), generator=generator)
        return x, torch.where(wrong, random_labels, true)

    def replaced(x: Tensor, share: float, tokens: tuple[int, int]) -> Tensor:
        chosen = torch.rand(x.shape, generator=generator) < share
        return torch.where(chosen, sequences(len(x), tokens, generator), x)

    train, validation, test, other = (labelled(count) for count in SEQUENCE_ROWS)
    ood = replaced(other[0], 0.5, (KNOWN_TOKENS, TOKENS))
    shifts = {
        f"replaced {share}": (replaced(test[0], share, (0, KNOWN_TOKENS)), test[1])
        for share in (0.1, 0.2)
    }
    return Rows(train, validation, test, ood, shifts)


# --- regression ---------------------------------------------------------------------------------


def standardised(rows: Rows) -> Rows:
    """Inputs and targets by the mean and standard deviation of the training rows."""
    x, y = rows.train
    x_mean = x.mean(0)
    x_scale = x.std(0).clamp_min(1e-6)
    y_mean = y.mean()
    y_scale = y.std()

    def inputs(values: Tensor) -> Tensor:
        return (values - x_mean) / x_scale

    def pair(values: Pair) -> Pair:
        return inputs(values[0]), (values[1] - y_mean) / y_scale

    test = pair(rows.test)
    shifts = {name: pair(values) for name, values in rows.shifts.items()}
    shifts["noise 0.3"] = noisy(test[0], 0.3), test[1]
    return Rows(pair(rows.train), pair(rows.validation), test, inputs(rows.ood), shifts)


def bike_rows() -> Rows:
    """Log of the count of an hour, from season, calendar, hour and weather.

    Hours with rain, snow or storm (8%) are out of distribution; their targets give a shift.
    """
    table = np.genfromtxt(
        folder("SSLA_DATA") / "bike_sharing_hour.csv", delimiter=",", names=True, dtype=None
    )
    columns = ["season", "yr", "mnth", "holiday", "weekday", "workingday", "weathersit"]
    columns += ["temp", "atemp", "hum", "windspeed"]
    hour = 2 * np.pi * table["hr"] / 24
    angles = [np.sin(hour), np.cos(hour), np.sin(2 * hour), np.cos(2 * hour)]
    x = torch.from_numpy(
        np.stack([table[name].astype(float) for name in columns] + angles, 1)
    ).float()
    y = torch.from_numpy(np.log1p(table["cnt"].astype(float))).float()
    dry = torch.from_numpy(table["weathersit"] <= 2)
    order = torch.randperm(int(dry.sum()), generator=torch.Generator().manual_seed(0))
    x_dry = x[dry][order]
    y_dry = y[dry][order]
    wet = x[~dry], y[~dry]
    return standardised(
        Rows(
            (x_dry[:11_000], y_dry[:11_000]),
            (x_dry[11_000:13_000], y_dry[11_000:13_000]),
            (x_dry[13_000:], y_dry[13_000:]),
            wet[0],
            {"rain": wet},
        )
    )


GENERATED_INPUTS = 20


def generated_rows() -> Rows:
    """A random smooth function of 20 inputs with Student noise of four degrees of freedom.

    Training inputs are uniform in [-1, 1]; out of distribution, the first five inputs are between 1
    and 1.8 in size.
    """
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(GENERATED_INPUTS, 24, generator=generator) / math.sqrt(
        GENERATED_INPUTS / 6
    )
    phases = 2 * math.pi * torch.rand(24, generator=generator)
    heights = torch.randn(24, generator=generator)

    def target(x: Tensor) -> Tensor:
        signal = torch.sin(x @ directions + phases) @ heights
        chi = torch.randn(4, len(x), generator=generator).square().sum(0)
        noise = torch.randn(len(x), generator=generator) * (4 / chi).sqrt()
        return signal + 0.7 * noise

    def inside(count: int) -> Pair:
        x = 2 * torch.rand(count, GENERATED_INPUTS, generator=generator) - 1
        return x, target(x)

    train, validation, test = (inside(count) for count in (100_000, 5_000, 10_000))
    outside = 2 * torch.rand(5_000, GENERATED_INPUTS, generator=generator) - 1
    far = outside[:, :5]
    outside[:, :5] = far.sign() * (1 + 0.8 * far.abs())
    return standardised(
        Rows(train, validation, test, outside, {"outside": (outside, target(outside))})
    )


# --- all tasks ----------------------------------------------------------------------------------


def _clinc_network() -> nn.Sequential:
    return network_of(perceptron([256, 512, 512], 0.3), 512, 150)


def _lstm_network() -> nn.Sequential:
    return network_of(LSTMBody(TOKENS), 128, SEQUENCE_CLASSES)


def _transformer_network() -> nn.Sequential:
    return network_of(TransformerBody(TOKENS, SEQUENCE_LENGTH), 64, SEQUENCE_CLASSES)


def _bike_network() -> nn.Sequential:
    return network_of(perceptron([15, 256, 256, 256]), 256, 1)


def _generated_network() -> nn.Sequential:
    return network_of(perceptron([GENERATED_INPUTS, 256, 256, 256]), 256, 1)


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("clinc", CLASSES, clinc_rows, _clinc_network, epochs=40, dropout=True),
        Task("fashion", CLASSES, fashion_rows, fashion_network, epochs=6),
        Task("cnn", CLASSES, cnn_rows, digits_network, epochs=40, batch=32),
        Task("lstm", CLASSES, sequence_rows, _lstm_network, epochs=8, batch=64),
        Task(
            "transformer",
            CLASSES,
            sequence_rows,
            _transformer_network,
            epochs=12,
            batch=64,
            dropout=True,
        ),
        Task("bike", REGRESSION, bike_rows, _bike_network, epochs=60),
        Task("generated", REGRESSION, generated_rows, _generated_network, epochs=12, batch=256),
    )
}
