"""Records to figures and pages; the only user of matplotlib."""

from importlib.resources import files


def asset(name: str) -> str:
    """Read a file of the page: a script, a style, its words or its colours."""
    return (files("coulomb.report") / "assets" / name).read_text(encoding="utf-8")
