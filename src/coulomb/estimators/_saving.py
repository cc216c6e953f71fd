"""Fitted estimators as one safetensors file: arrays, and JSON for everything else."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from coulomb._support.archive import read_archive, write_archive
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.domains import AbstractDomain, Ball, Box, Space, Sphere
from coulomb.features import AbstractFeatureMap, feature_maps
from coulomb.interactions import AbstractInteraction, Riesz

FORMAT = "coulomb-estimator-1"
Estimator = TypeVar("Estimator")

# Settings that are objects; nothing else in a file becomes one.
_CLASSES: dict[str, type] = {
    kind.__name__: kind for kind in (Ball, Box, Space, Sphere, Riesz)
}
_CLASSES |= {
    type(member).__name__: type(member)
    for member in (feature_maps.build(name) for name in feature_maps)
}
_OBJECTS = (AbstractDomain, AbstractInteraction, AbstractFeatureMap)


def save_estimator(estimator: Any, path: str | Path) -> None:
    """Write settings and learned attributes, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    learned: dict[str, Any] = {}
    for name, value in vars(estimator).items():
        if name == "_varying" or (name.endswith("_") and not name.startswith("_")):
            _store(name, value, arrays, learned)
    about = {
        "format": FORMAT,
        "class": type(estimator).__name__,
        "settings": {
            name: _encode(name, value)
            for name, value in estimator.get_params(deep=False).items()
        },
        "learned": learned,
    }
    write_archive(path, arrays, about)


def load_estimator(kind: type[Estimator], path: str | Path) -> Estimator:
    """Read an estimator that `save_estimator` wrote."""
    arrays, about = read_archive(
        path, complaint="is not a saved estimator", form=FORMAT, framework="np"
    )
    if about.get("class") != kind.__name__:
        raise FileFormatError(
            f"{path} holds a {about.get('class')!r}, not a {kind.__name__!r}; load it "
            "with that class."
        )
    try:
        settings = {name: _decode(value) for name, value in about["settings"].items()}
        estimator = kind(**settings)
        _restore(estimator, about["learned"], arrays)
        _check_shapes(arrays)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FileFormatError(f"{path} is damaged: {error}.") from error
    return estimator


def _store(
    name: str, value: Any, arrays: dict[str, np.ndarray], learned: dict[str, Any]
) -> None:
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
        arrays[name] = value
    elif isinstance(value, np.ndarray):
        learned[name] = {"names": value.tolist()}
    elif isinstance(value, dict):
        for key, column in value.items():
            arrays[f"{name}.{key}"] = column
        learned[name] = {"columns": list(value)}
    else:
        learned[name] = value


def _restore(
    estimator: Any, learned: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    for name, value in learned.items():
        if not (name.endswith("_") and name.isidentifier()) or name.startswith("_"):
            raise ValueError(f"{name!r} is not a learned attribute")
        if isinstance(value, dict) and "names" in value:
            value = np.array(value["names"], dtype=object)
        elif isinstance(value, dict) and "columns" in value:
            value = {key: arrays[f"{name}.{key}"] for key in value["columns"]}
        setattr(estimator, name, value)
    for name, array in arrays.items():
        if "." not in name and (name == "_varying" or name.endswith("_")):
            setattr(estimator, name, array)


def _check_shapes(arrays: dict[str, np.ndarray]) -> None:
    weights, offset = arrays["random_weights_"], arrays["random_offset_"]
    expected = {
        "feature_scale_": offset.shape,
        "mean_": weights.shape[:1],
        "scale_": weights.shape[:1],
    }
    if weights.ndim != 2 or weights.shape[1:] != offset.shape:
        raise ValueError(
            f"random_weights_ has shape {weights.shape} beside {offset.shape[0]} phases"
        )
    for name, shape in expected.items():
        if arrays[name].shape != shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, not {shape}")


def _encode(name: str, value: Any) -> Any:
    if name == "random_state" and not isinstance(value, int | None):
        return None  # a generator has moved on since; the features are in the file
    if isinstance(value, _OBJECTS) and type(value).__name__ in _CLASSES:
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}  # type: ignore[arg-type]
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, str | int | float | bool | tuple | list):
        return value
    raise ParameterError(
        f"`{name}` must be a name, a number or an object of this library to be saved; "
        f"got {value!r}. Use pickle for your own functions."
    )


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("class") not in _CLASSES:
        raise ValueError(f"unknown class {value.get('class')!r}")
    return _CLASSES[value["class"]](**value["fields"])
