"""The page: whole, self-contained, honest about gaps, and deaf to what records say."""

import base64
import csv
import hashlib
import html.parser
import io
import json
import re

import pytest
from report_cases import (
    COMMON,
    LEARNED,
    make_noise,
    make_record,
    make_runtime,
    make_text,
    write_results,
)

from coulomb._support.archive import write_json
from coulomb._support.errors import ParameterError
from coulomb.experiments.records import FILE
from coulomb.report.page import arrange, read_results, write_report

VOID = {"meta", "link", "img", "input"}
EVIL = '</script><script>window.owned=1</script><img src=x onerror="window.owned=1">'


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and whether tags are balanced."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.words.append(data.strip())

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


@pytest.fixture(scope="module")
def parsed(page):
    return Page(page.read_text())


def table_of(section, key):
    return next(table for table in section.tables if table.key == key)


def section_of(results, key):
    contents = arrange(read_results(results))
    return next(each for each in contents.sections if each.key == key)


def test_tags_are_balanced_and_names_unique(parsed):
    assert parsed.open == []
    names = [attrs["id"] for _, attrs in parsed.elements if "id" in attrs]
    assert len(names) == len(set(names))


def test_nothing_is_fetched(parsed):
    for tag, attrs in parsed.elements:
        for name in ("src", "href", "srcset", "action"):
            assert attrs.get(name, "#").startswith(("#", "data:")), (tag, attrs)
    policy = next(a["content"] for a in parsed.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    assert "http:" not in policy
    assert "unsafe-eval" not in policy


def test_the_policy_allows_these_scripts_and_no_others(page, parsed):
    policy = next(a["content"] for a in parsed.all("meta") if "http-equiv" in a)
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    scripts = re.findall(r"<script>(.*?)</script>", page.read_text(), re.DOTALL)
    digests = {
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for script in scripts
    }
    assert digests == allowed


def test_links_lead_to_sections(parsed):
    names = {attrs.get("id") for _, attrs in parsed.elements}
    links = [a["href"][1:] for a in parsed.all("a") if a["href"].startswith("#")]
    assert set(links) <= names
    assert {"noise", "runtime", "text", "claims"} <= set(links)
    assert {"meanfield", "deviations", "settings"} <= set(links)


def test_tables_and_pictures_are_accessible(parsed):
    assert len(parsed.all("caption")) == len(parsed.all("table")) > 5
    for attrs in parsed.all("th"):
        assert attrs["scope"] in ("col", "row")
    for attrs in parsed.all("img"):
        assert len(attrs["alt"]) > 20
    for tag, attrs in parsed.elements:
        if attrs.get("role") in ("img", "group", "region"):
            assert attrs.get("aria-label") or attrs.get("aria-labelledby"), (tag, attrs)


def test_every_figure_is_there_in_all_its_forms(page, parsed):
    charts = {a["data-chart"] for a in parsed.all("figure") if "data-chart" in a}
    data = re.search(r'id="charts-data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert set(json.loads(data[1])) == charts
    saved = {a["download"] for a in parsed.all("a") if "download" in a}
    for name in charts:
        assert {f"{name}.svg", f"{name}.png"} <= saved
    assert len(parsed.all("img")) == len(charts)


def test_csv_of_a_table_has_full_precision(parsed):
    link = next(a for a in parsed.all("a") if a.get("download") == "noise-accuracy.csv")
    content = base64.b64decode(link["href"].split(",")[1]).decode()
    rows = list(csv.DictReader(io.StringIO(content)))
    learned = next(row for row in rows if row["method"] == "learned particles")
    assert float(learned["σ = 0.1"]) == pytest.approx(0.701, abs=1e-12)


def test_means_best_and_differences(results):
    section = section_of(results, "noise")
    table = table_of(section, "noise-accuracy")
    best = [row[0].text for row in table.rows if row[2].best]
    assert best == ["learned particles"]
    assert table.rows[-1][0].text.startswith("Bayes")
    gaps = table_of(section, "noise-differences")
    found = {row[2].text: row[3].value for row in gaps.rows}
    assert found == pytest.approx(
        {
            "norm-matched control": 0.02,
            "noise-only control": 0.02,
            "random Fourier features": 0.1,
        }
    )


def test_runtime_has_the_power_law_and_the_published_one(results):
    section = section_of(results, "runtime")
    (row,) = table_of(section, "runtime-fits").rows
    assert row[2].value == pytest.approx(0.5)
    assert row[3].value == 1.477  # tab:powerlaw-summary
    seconds = table_of(section, "runtime-seconds").rows
    assert [row[2].text for row in seconds] == ["here", "published"]
    assert [cell.value for cell in seconds[1][3:]] == [0.00231, 0.140, 1.98]


def test_text_has_published_values_and_paired_gains(results):
    section = section_of(results, "text")
    (table,) = section.tables
    headers = [column.header for column in table.columns]
    row = next(row for row in table.rows if row[0].text == "softmax")
    assert row[headers.index("accuracy published")].value == 0.6801
    gains = section.groups[0].charts[1]
    values = {layer.name: layer.values for layer in gains.layers}
    assert values["minus Vanilla"] == pytest.approx([0.01])
    assert values["minus norm-matched control"] == pytest.approx([0.0])


def test_what_was_not_run_is_said(parsed):
    words = " ".join(parsed.words)
    assert "strength: has not been run" in words
    assert "noise: has not been run" not in words


def test_settings_and_environment(parsed):
    words = " ".join(parsed.words)
    assert "n_samples: 400" in words
    assert "numpy" in words


def test_the_same_records_give_the_same_page(tmp_path):
    folder = write_results(tmp_path / "results", runtime=make_runtime())
    first = write_report(folder).read_bytes()
    twin = write_report(folder, tmp_path / "elsewhere" / "twin.html")
    assert twin.read_bytes() == first
    assert [path.name for path in twin.parent.iterdir()] == ["twin.html"]


def test_records_cannot_write_into_the_page(tmp_path):
    job = COMMON | {"method": EVIL, "constants": EVIL, "noise": 1.0, "trial": 0}
    evil = make_record(
        "noise", job, {"expected_accuracy": 0.5}, environment={EVIL: EVIL}
    )
    other = make_record(EVIL, {"method": "=HYPERLINK()", EVIL: EVIL}, {EVIL: 1.0})
    folder = write_results(tmp_path, noise=[evil], other=[other])
    write_json(folder / "noise" / "frames.json", {"runs": EVIL})  # of versions before
    text = write_report(folder).read_text()
    parsed = Page(text)
    assert parsed.open == []
    assert "window.owned=1</script>" not in text
    assert not any("onerror" in attrs for _, attrs in parsed.elements)
    assert len(parsed.all("script")) == 4  # one of data, three that run
    for attrs in parsed.all("a"):
        if attrs.get("download", "").endswith(".csv"):
            content = base64.b64decode(attrs["href"].split(",")[1]).decode()
            assert not re.search(r"(^|,|\n)=", content)


def test_any_name_can_be_drawn(tmp_path):
    names = ["$x", "5$ & 6$", "_hidden", "名前", "a\x00\nb", "%{x}", "x" * 300, ""]
    job = COMMON | {"constants": "paper", "noise": 1.0, "trial": 0}
    records = [
        make_record("noise", job | {"method": name}, {"expected_accuracy": 0.5})
        for name in names
    ]
    text = write_report(write_results(tmp_path, noise=records)).read_text()
    for shown in ("$x", "5$ &amp; 6$", "_hidden", "名前", "a b", "%{x}"):
        assert f"<span>{shown}</span>" in text


def test_a_broken_line_is_named_and_the_rest_shown(tmp_path):
    write_results(tmp_path, noise=make_noise(), runtime=make_runtime())
    path = tmp_path / "noise" / FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "{broken\n", *lines[2:]]))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / FILE).write_text("")
    contents = arrange(read_results(tmp_path))
    assert [section.key for section in contents.sections] == ["runtime"]
    assert "noise/records.jsonl, line 3: not a record" in contents.problems[0]
    assert contents.problems[1] == "text/records.jsonl: holds no finished record."
    assert str(tmp_path) not in " ".join(contents.problems)


def test_a_line_cut_short_is_left_out(tmp_path):
    write_results(tmp_path, runtime=make_runtime())
    path = tmp_path / "runtime" / FILE
    path.write_bytes(path.read_bytes()[:-30])
    contents = arrange(read_results(tmp_path))
    assert contents.problems == ()
    assert contents.tiles["records, one per job and control"] == "5"


def test_partial_records_are_enough(tmp_path):
    """Metrics that are missing, not numbers or not finite; jobs that lack entries."""
    records = make_noise(noises=(1.0,), trials=1, rows=[LEARNED])
    records += [
        make_record("noise", {"method": "svm"}, {"expected_accuracy": "high"}),
        make_record("noise", {"noise": "much", "trial": None}, {"f1": True}),
        make_record("noise", {}, {}, seconds={"total": None}),
    ]
    folder = write_results(tmp_path, noise=records, runtime=records, text=records)
    contents = arrange(read_results(folder))
    assert {section.key for section in contents.sections} == {
        "noise",
        "runtime",
        "text",
    }


def test_broken_theory_is_named(tmp_path):
    write_json(tmp_path / "meanfield.json", {"flow": {}, "points": [[0.0]]})
    (tmp_path / "other.json").write_text("{")
    problems = arrange(read_results(write_results(tmp_path, text=make_text()))).problems
    assert problems[0].startswith("other.json: not JSON")
    assert problems[1].startswith(
        "meanfield.json: The numbers of `coulomb meanfield` lack a part"
    )


def test_a_folder_without_results_is_refused(tmp_path):
    with pytest.raises(ParameterError, match=r"`DIR` must hold results.*reproduce"):
        write_report(tmp_path)
    with pytest.raises(ParameterError, match="`DIR` must be a folder"):
        write_report(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []
