"""One module for each part of the page: records in, a section out."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from coulomb.report import asset
from coulomb.report.chart import Chart
from coulomb.report.tables import Table


@dataclass(frozen=True)
class Group:
    """Charts that share a legend; charts without layers are left out."""

    title: str
    charts: Sequence[Chart]
    shared: bool = True

    def __post_init__(self) -> None:
        shown = tuple(chart for chart in self.charts if chart.layers)
        object.__setattr__(self, "charts", shown)


@dataclass(frozen=True)
class Section:
    """One part of the page; empty groups and tables are left out."""

    key: str
    title: str
    link: str
    intro: str = ""
    groups: Sequence[Group] = ()
    tables: Sequence[Table] = ()

    def __post_init__(self) -> None:
        groups = tuple(group for group in self.groups if group.charts)
        tables = tuple(table for table in self.tables if table.rows)
        object.__setattr__(self, "groups", groups)
        object.__setattr__(self, "tables", tables)


SECTIONS: dict[str, dict[str, str]] = tomllib.loads(asset("sections.toml"))
"""Title, link and introduction of the known sections, in the order of the page."""


def named_section(
    key: str, groups: Sequence[Group], tables: Sequence[Table]
) -> Section:
    """Make a section whose words are in `SECTIONS`."""
    return Section(key, groups=groups, tables=tables, **SECTIONS[key])
