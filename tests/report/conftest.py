"""A folder of invented results, and the page made of it."""

import pytest
from report_cases import (
    make_deviations,
    make_meanfield,
    make_noise,
    make_runtime,
    make_text,
    write_results,
)

from coulomb._support.archive import write_json
from coulomb.report.page import write_report


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Every kind of section that has charts."""
    folder = tmp_path_factory.mktemp("results")
    write_results(folder, noise=make_noise(), runtime=make_runtime(), text=make_text())
    write_json(folder / "meanfield" / "meanfield.json", make_meanfield())
    write_json(folder / "deviations" / "deviations.json", make_deviations())
    return folder


@pytest.fixture(scope="session")
def page(results):
    return write_report(results)
