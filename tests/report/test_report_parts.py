"""Parts of the page: charts, colours, tables, the verb."""

import math
import re

import matplotlib
import numpy as np
import plotly.graph_objects as go
import pytest
import typer
from matplotlib.figure import Figure
from report_cases import (
    COMMON,
    make_deviations,
    make_meanfield,
    make_record,
    make_runtime,
    write_results,
)
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from coulomb.cli.experiments import report
from coulomb.experiments import Record
from coulomb.report.chart import (
    DARK,
    LIGHT,
    TONES,
    Axis,
    Chart,
    Curve,
    Dots,
    Field,
    Histogram,
    Ink,
    chart_numbers,
)
from coulomb.report.chart import drawable as keep
from coulomb.report.interactive import interactive
from coulomb.report.page import draw
from coulomb.report.print import PRINT_STYLE, _draw, legend_below, printed
from coulomb.report.rows import Row, averaged, by_row, estimate, row_inks, tick
from coulomb.report.sections.text import phase_a_section
from coulomb.report.sections.theory import theory_charts
from coulomb.report.tables import Column, mark_best, tabulate

X, Y = Axis("x"), Axis("y")


def luminance(colour):
    """Relative luminance, as the Web Content Accessibility Guidelines define it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first, second):
    low, high = sorted([luminance(first), luminance(second)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_is_readable(theme):
    tones = {name: pair[theme] for name, pair in TONES.items()}
    for ground in ("page", "surface", "raised"):
        for word in ("text", "muted", "accent"):
            assert contrast(tones[word], tones[ground]) >= 4.5, (word, ground)
    for word in ("good", "bad", "open", "accent"):
        assert contrast(tones[word], tones[f"{word}-soft"]) >= 4.5, word
        assert contrast(tones[word], tones["surface"]) >= 4.5, word


def test_lines_can_be_seen():
    """Thin lines stand out at 2 to 1 at least; dash and marker tell them apart too."""
    assert min(contrast(colour, "#ffffff") for colour in LIGHT) > 2
    assert min(contrast(colour, TONES["surface"][1]) for colour in DARK) > 3


def test_no_two_rows_look_the_same():
    rows = [
        Row("langevin", "paper", control, (("strength", str(strength)),))
        for strength in range(6)
        for control in ("", "norm-matched", "noise-only")
    ]
    rows += [Row(f"method {i}", "paper", "", ()) for i in range(14)]
    looks = {(ink.slot, ink.dash) for ink in row_inks(rows).values()}
    assert len(looks) == len(rows) == 32
    assert row_inks([Row("langevin", "default", "", ())]).popitem()[1].slot == 1


def test_what_an_axis_cannot_show_is_left_out():
    curve = Curve(
        "a",
        (0.0, 1.0, 2.0, 3.0),
        (1.0, 2.0, math.nan, 4.0),
        (0.5, -1.0, 0.0, 3.0),
        (1.5, 5.0, 9.0, 5.0),
        ("p", "q", "r", "s"),
    )
    chart = Chart("k", "t", Axis("x", log=True), Axis("y", log=True), (curve,))
    (kept,) = keep(chart).layers
    assert (kept.x, kept.y, kept.notes) == ((1.0, 3.0), (2.0, 4.0), ("q", "s"))
    assert kept.low == (0.2, 3.0)  # a tenth of the value, where the band reaches zero
    empty = Curve("b", (0.0,), (1.0,))
    assert keep(Chart("k", "t", Axis("x", log=True), Y, (empty,))).layers == ()


def test_both_drawings_show_the_same_numbers():
    curve = Curve("a", (1.0, 2.0), (3.0, 5.0), (2.0, 4.0), (4.0, 6.0), ink=Ink(2, 1))
    chart = Chart("k", "t", X, Y, (curve,), "c")
    figure = interactive(chart)
    go.Figure(figure)  # refuses what plotly does not know
    band, line = figure["data"]
    assert line["x"] == [1.0, 2.0]
    assert line["y"] == [3.0, 5.0]
    assert band["y"] == [4.0, 6.0, 4.0, 2.0]
    assert line["line"]["color"] == LIGHT[2]
    picture = draw(chart, own_legend=True)
    assert picture.csv.splitlines()[1:] == ["a,1.0,3.0,2.0,4.0", "a,2.0,5.0,4.0,6.0"]
    assert picture.svg.startswith(b"<?xml")
    assert picture.png.startswith(b"\x89PNG")
    assert "a: 3 at 1, 5 at 2." in picture.alt


@pytest.mark.parametrize(
    "layer",
    [
        Histogram("h", (0.0, 1.0, 2.0), (1.0, 2.0)),
        Field("f", (0.0, 1.0), (0.0, 1.0), ((1.0, 2.0), (3.0, math.nan))),
        Dots("d", (0.5, math.nan), (0.0, 1.0), (0.1, math.nan)),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_every_kind_of_layer_is_drawn(layer):
    names = ("one", "=two") if isinstance(layer, Dots) else ()
    chart = keep(Chart("k", "t", X, Axis("y", names=names), (layer,), square=True))
    figure = interactive(chart)
    assert len(figure["data"]) == 1
    go.Figure(figure)  # refuses what plotly does not know
    svg, png = printed(chart)
    assert svg.startswith(b"<?xml")
    assert png.startswith(b"\x89PNG")
    assert chart_numbers(chart).count("\n") >= 2
    assert chart.alt


def written(low, high):
    """The words of a print whose vertical axis is logarithmic."""
    curve = Curve("a", (0.0, 1.0), (low, high))
    svg, _ = printed(Chart("k", "t", X, Axis("y", log=True), (curve,)))
    return re.findall(r"<!-- (.*?) -->", svg.decode())


def test_powers_are_written_without_formulas():
    words = written(1e-4, 1e3)
    assert {"10\u207b\u2074", "0.1", "10\u00b3"} <= set(words)
    assert not any("$" in word for word in words)
    assert {"0.2", "0.5", "2", "5"} <= set(written(0.2, 5.0))  # less than two decades


def test_the_best_is_marked_with_its_ties():
    columns = ("a", Column("up", better=1), Column("down"))
    values = [(0.5, 1.0), (0.9, 2.0), (0.90001, 3.0), (None, 4.0)]
    table = mark_best(tabulate("k", "c", columns, [("r", *pair) for pair in values]))
    assert [row[1].best for row in table.rows] == [False, True, True, False]
    assert not any(row[2].best for row in table.rows)


def test_one_trial_has_no_error():
    record = make_record("noise", COMMON | {"method": "svm"}, {"accuracy": 0.5})
    (part,) = by_row([record], COMMON).values()
    assert part == [record]
    cell = averaged(estimate([record], "accuracy"))
    assert (cell.text, cell.detail) == ("0.500", "")
    assert averaged(None).text == "–"
    assert tick(0.0) == "0"


def test_density_in_the_plane():
    data = make_meanfield()
    axis = np.linspace(-1, 1, 5)
    points = np.array([(x, y) for y in axis for x in axis if x * x + y * y <= 1])
    data["points"] = points.tolist()
    data["gap"] |= {
        "density": points[:, 0].tolist(),
        "positions": [[[[0.1, 0.2], [0.3, 0.4]]]],
        "first_exponent": None,
    }
    density, energy, gap = theory_charts("meanfield", "k", data)
    field, cloud = density.layers
    assert field.z[2] == pytest.approx(axis)  # the row y = 0 is whole
    assert math.isnan(field.z[0][0])
    assert cloud.x == (0.1, 0.3)
    assert energy.layers[0].y == pytest.approx([1.0, 0.5, 0.1])
    assert len(gap.layers) == 2


def test_deviations_show_measurement_and_prediction():
    rarity, partition = theory_charts("deviations", "k", make_deviations())
    measured, predicted = rarity.layers
    assert measured.y == pytest.approx([-1.2, -2.4, -4.8])
    assert measured.high[0] - measured.y[0] == pytest.approx(0.2)  # two errors of 0.1
    assert predicted.y == pytest.approx([-1.0, -2.0, -4.0])
    assert "0.260 ± 0.010" in rarity.caption
    assert partition.layers[-1].y == (-0.42, -0.42)


def test_the_verb(tmp_path):
    app = typer.Typer()
    app.command()(report)
    write_results(tmp_path, other=make_runtime())
    out = tmp_path / "pages" / "page.html"
    done = CliRunner().invoke(app, [str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert done.output == f"Page: {out}\n"
    assert out.read_text().startswith("<!doctype html>")


def test_unnamed_methods_have_colours_of_their_own():
    """A control keeps the colour of its row, and no other row has it."""
    rows = [
        Row("kernel-elu", "default", "", ()),
        Row("kernel-elu", "default", "norm-matched", ()),
        Row("vanilla-elu", "default", "", ()),
    ]
    kernel, control, vanilla = row_inks(rows).values()
    assert kernel.slot == control.slot != vanilla.slot
    assert (kernel.dash, control.dash, vanilla.dash) == (0, 1, 0)


def arm(method, control, budget, seed, score):
    job = {
        "task": "tags",
        "method": method,
        "control": control,
        "n_components": budget,
        "seed": seed,
        "trial": seed,
        "constants": "default",
    }
    metrics = {"score": score, "validation_score": score}
    return Record("phase-a", job, "", "test", metrics, {}, {}, "1")


def test_the_proof_of_phase_a_is_shown():
    gains = (0.04, 0.05, 0.06)
    records = [arm("softmax", None, None, i, 0.8) for i in range(3)]
    records += [arm("vanilla", None, 32, i, 0.6) for i in range(3)]
    records += [arm("learned", None, 32, i, 0.6 + gain) for i, gain in enumerate(gains)]
    broken = arm("learned", None, "many", 0, 0.9)
    section = phase_a_section([*records, broken, arm("vanilla", None, 8, 0, "x")])
    differences, scores = section.tables
    words = [[cell.text for cell in row] for row in differences.rows]
    assert [row[3] for row in words] == ["vanilla", "softmax"]
    assert differences.rows[0][4].value == pytest.approx(0.05)
    expected = ttest_rel([0.64, 0.65, 0.66], [0.6] * 3).pvalue
    assert differences.rows[0][5].value == pytest.approx(expected)
    assert [row[0].text for row in scores.rows] == ["learned", "vanilla", "softmax"]
    (chart,) = section.groups[0].charts
    assert chart.layers[0].values == pytest.approx((0.65, 0.6, 0.8))
    assert phase_a_section([broken]).tables == ()


def test_the_key_of_measured_points_is_no_point_of_the_data():
    """It has a bar, and stands outside of the axes."""
    with matplotlib.rc_context(PRINT_STYLE):
        figure = Figure(layout="constrained")
        axis = figure.subplots()
        curve = Curve("a", (1.0, 2.0), (3.0, 4.0), (2.0, 3.5), (4.0, 4.5), line=False)
        key = _draw(axis, curve)
        assert key.has_yerr
        assert [path.vertices[:, 1].tolist() for path in key[2][0].get_paths()] == [
            [2.0, 4.0],
            [3.5, 4.5],
        ]
        legend_below(figure, [(key, "a")])
        figure.canvas.draw()
        assert figure.legends[0].get_window_extent().y1 <= axis.get_tightbbox().y0
