"""How columns become numbers: decided once on the training table, applied to every later one, and reported."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ssla.tables.reading import BOOLEAN, NUMBER, TEXT, Column, Table, TableError

MOST_LEVELS = 50
FREE_TEXT = 0.1  # of the rows: a text column with more different values, and more than twenty, is no category
FEW_LEVELS = 20
LARGEST_FILL = 1e300


@dataclass(frozen=True)
class Feature:
    """One column: numbers and booleans with gaps filled by the mean (and a flag if there were any); categories one by one."""

    name: str
    kind: str
    fill: float = 0.0
    flag: bool = False
    levels: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        return len(self.levels) if self.kind == TEXT else 1 + self.flag

    def encode(self, column: Column) -> tuple[np.ndarray, int]:
        """(n, width), and how many categories were unknown."""
        gaps = column.missing
        if self.kind != TEXT:
            values = np.where(gaps, self.fill, column.values.astype(float))
            return (np.stack([values, gaps.astype(float)], 1) if self.flag else values[:, None]), 0
        places = {level: i for i, level in enumerate(self.levels)}
        block = np.zeros((len(gaps), len(self.levels)))
        unknown = 0
        for row, value in enumerate(column.values):
            at = places.get(value)
            if at is not None:
                block[row, at] = 1.0
            elif value is not None:
                unknown += 1
        return block, unknown


@dataclass(frozen=True)
class Encoded:
    """The numbers (n, d), and what was met on the way."""

    values: np.ndarray
    missing: dict[str, int]
    unknown: dict[str, int]


@dataclass(frozen=True)
class Plan:
    """Features in their order, and the columns that were left out, with the reason."""

    features: tuple[Feature, ...]
    left_out: dict[str, str]

    @property
    def width(self) -> int:
        return sum(feature.width for feature in self.features)

    def encode(self, table: Table) -> Encoded:
        """The columns of the plan; others are ignored. A missing column, or one of another kind, is refused."""
        blocks, missing, unknown = [], {}, {}
        for feature in self.features:
            column = table.column(feature.name)
            if (column.kind == TEXT) != (feature.kind == TEXT):
                if bool(column.missing.all()):  # no value at all: any kind
                    column = Column(feature.name, feature.kind, _nothing(feature.kind, table.rows))
                elif feature.kind == TEXT:  # categories that look like numbers
                    texts = [None if cell is None or str(cell) == "" else str(cell) for cell in table.cells[feature.name]]
                    column = Column(feature.name, TEXT, np.array(texts, dtype=object))
                else:
                    raise TableError(f"Column {feature.name!r} held numbers at training, but holds texts in {table.path}.")
            block, new = feature.encode(column)
            blocks.append(block)
            if gaps := int(column.missing.sum()):
                missing[feature.name] = gaps
            if new:
                unknown[feature.name] = new
        return Encoded(np.concatenate(blocks, 1), missing, unknown)

    def as_json(self) -> dict[str, Any]:
        return {"features": [asdict(f) | {"levels": list(f.levels)} for f in self.features], "left_out": self.left_out}

    @staticmethod
    def from_json(content: dict[str, Any]) -> Plan:
        """The plan of a file, or ValueError for one that `make_plan` could not have made."""
        features = tuple(Feature(**feature | {"levels": tuple(feature["levels"])}) for feature in content["features"])
        left_out = dict(content["left_out"])
        if not all(isinstance(feature["levels"], list) for feature in content["features"]):
            raise ValueError("the categories of a column are not a list")
        names = [feature.name for feature in features] + list(left_out)
        if not features or len(set(names)) < len(names):
            raise ValueError("there is no column, or one is there twice")
        for feature in features:
            texts = (feature.name, feature.kind, *feature.levels)
            if not all(isinstance(text, str) for text in texts) or feature.kind not in (NUMBER, BOOLEAN, TEXT):
                raise ValueError(f"the column {feature.name!r} is of the unknown kind {feature.kind!r}")
            if (feature.kind == TEXT) != bool(feature.levels) or len(set(feature.levels)) < len(feature.levels):
                raise ValueError(f"the categories of the column {feature.name!r} do not fit its kind, or one is there twice")
            if type(feature.flag) is not bool or type(feature.fill) not in (int, float) or not abs(feature.fill) <= LARGEST_FILL:
                raise ValueError(f"the column {feature.name!r} has no usable value for gaps")
        if not all(isinstance(text, str) for pair in left_out.items() for text in pair):
            raise ValueError("the columns that were left out have no reasons")
        return Plan(features, left_out)


def make_plan(table: Table, without: set[str]) -> Plan:
    """Look at every column but those named, and decide."""
    features, left_out = [], {}
    for name in table.names:
        if name in without:
            continue
        column = table.column(name)
        if bool(column.missing.all()):
            raise TableError(f"Column {name!r} is empty in every row. Leave it out with --drop {name!r}.")
        feature = _numeric(column) if column.kind in (NUMBER, BOOLEAN) else _categories(column)
        if isinstance(feature, str):
            left_out[name] = feature
        else:
            features.append(feature)
    if not features:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise TableError(f"{table.path} has no column to learn from{f' ({reasons})' if reasons else ''}.")
    return Plan(tuple(features), left_out)


def _numeric(column: Column) -> Feature | str:
    values = column.values[~column.missing]
    if bool((values == values[0]).all()) and not bool(column.missing.any()):
        return "constant"
    return Feature(column.name, column.kind, float(values.mean()), bool(column.missing.any()))


def _categories(column: Column) -> Feature | str:
    counts = Counter(value for value in column.values if value is not None)
    if len(counts) == 1 and not bool(column.missing.any()):
        return "constant"
    if len(counts) > FEW_LEVELS and len(counts) > FREE_TEXT * len(column.values):
        return f"{len(counts)} different texts in {len(column.values)} rows"
    return Feature(column.name, TEXT, levels=tuple(sorted(level for level, _ in counts.most_common(MOST_LEVELS))))


def _nothing(kind: str, rows: int) -> np.ndarray:
    return np.array([None] * rows, dtype=object) if kind == TEXT else np.full(rows, np.nan)
