"""Sections on the continuum: the mean field and large deviations."""

from collections.abc import Mapping, Sequence
from typing import Any

from coulomb._support.errors import FileFormatError
from coulomb.experiments.records import Record
from coulomb.report.charts import Chart
from coulomb.report.general import metric_tables
from coulomb.report.rows import clean
from coulomb.report.sections import Group, Section
from coulomb.report.theory_charts import deviation_charts, meanfield_charts

_PARTS = (
    (
        "meanfield",
        "flow",
        "From particles to density",
        "Mean field",
        "As N grows the particles follow the McKean-Vlasov equation. Its free energy "
        "falls at every step, and the gap between particles and density closes as a "
        "power of N.",
        meanfield_charts,
    ),
    (
        "deviations",
        "deviations",
        "Large deviations",
        "Deviations",
        "Under the Gibbs law a deviation of the learned kernel becomes exponentially "
        "rare. Measured probabilities against the rate that the theory predicts.",
        deviation_charts,
    ),
)


def theory_sections(
    theory: Mapping[str, Mapping[str, Any]],
    records: Mapping[str, Sequence[Record]],
    problems: list[str],
) -> list[Section]:
    """Chart the numbers of the theory's verbs, and tabulate their records."""
    sections = []
    for key, part, title, link, intro, make in _PARTS:
        groups = []
        for i, (name, data) in enumerate(theory.items()):
            if part not in data:
                continue
            try:
                charts: list[Chart] = make(f"{key}-{i}", data)
            except FileFormatError as error:
                problems.append(f"{name}.json: {error}")
                continue
            words = clean(name) if len(theory) > 2 else ""
            groups.append(Group(words, tuple(charts), shared=False))
        tables = metric_tables(key, records.get(key, []))
        if groups or tables:
            charts_and_tables = (tuple(groups), tuple(tables))
            sections.append(Section(key, title, link, (intro,), *charts_and_tables))
    return sections
