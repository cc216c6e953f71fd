"""A feature map is known by name or type in `features.py` and in tables of presets."""

import ast
from pathlib import Path

import coulomb
from coulomb import features
from coulomb.features import AbstractFeatureMap, feature_maps

SOURCES = Path(coulomb.__file__).parent
CLASSES = {
    name
    for name, value in vars(features).items()
    if isinstance(value, type)
    and issubclass(value, AbstractFeatureMap)
    and value in {type(feature_maps.build(each)) for each in feature_maps}
}
# Where maps are chosen by name for the user, and nothing is decided by the name.
PRESETS = {
    "features.py",
    "cli/linearise.py",  # the default of a flag; must not import torch
    "experiments/paper.py",
    "text/settings.py",
}


def names_of_maps(tree: ast.AST) -> list[int]:
    """List the lines on which a class of a map or a registered name stands."""
    lines = []
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str() as value) if value in feature_maps:
                lines.append(node.lineno)
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in CLASSES:
                lines.append(node.lineno)
            case ast.ImportFrom(names=aliases):
                if any(alias.name in CLASSES for alias in aliases):
                    lines.append(node.lineno)
    return lines


def test_maps_are_known_by_what_they_declare():
    assert len(CLASSES) == len(list(feature_maps))
    found = [
        f"{path}:{line}"
        for path in sorted(SOURCES.rglob("*.py"))
        if (relative := path.relative_to(SOURCES).as_posix()) not in PRESETS
        for line in names_of_maps(ast.parse(path.read_text(), relative))
    ]
    assert not found, "ask a capability of the map instead: " + ", ".join(found)


def test_every_preset_file_still_names_a_map():
    for relative in PRESETS:
        assert names_of_maps(ast.parse((SOURCES / relative).read_text())), relative
