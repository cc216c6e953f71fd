"""Results as plain data, for JSON."""

import enum
import math
from typing import Any


def plain(value: Any) -> Any:
    """Turn arrays, NamedTuples and enumerations into what JSON knows.

    Examples
    --------
    >>> from coulomb._support.stats import Fit
    >>> plain({"fit": Fit(1.0, 0.1, float("nan"), 0.8, 1.2)})
    {'fit': {'slope': 1.0, 'standard_error': 0.1, 'intercept': None, 'low': 0.8,
             'high': 1.2}}
    """
    if hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, enum.Enum):
        return value.name
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
