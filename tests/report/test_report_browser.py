"""The page in a real browser: drawn, sorted; on a phone, in the dark, bare."""

import shutil

import pytest
from playwright.sync_api import sync_playwright
from report_cases import COMMON, make_record, write_results

from coulomb.report.page import write_report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
LOCAL = ("file:", "data:", "blob:")
WIDE, PHONE = (1400, 900), (390, 844)


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed; looked for {', '.join(NAMES)}")
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def visit(browser):
    """Open a page of its own; complaints of the browser end up in `complaints`."""
    contexts = []

    def opened(path, size=WIDE, **settings):
        context = browser.new_context(
            viewport=dict(zip(("width", "height"), size, strict=True)), **settings
        )
        contexts.append(context)
        tab = context.new_page()
        tab.complaints = []
        tab.on("console", lambda message: tab.complaints.append(message.text))
        tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.on("dialog", lambda dialog: tab.complaints.append(dialog.message))
        tab.on("request", lambda request: _note(tab, request.url))
        tab.goto(path.as_uri())
        return tab

    yield opened
    for context in contexts:
        context.close()


def _note(tab, address):
    if not address.startswith(LOCAL):
        tab.complaints.append(address)


@pytest.fixture(scope="module")
def tab(page, visit):
    """The page on a wide screen, all figures drawn, shared by tests of its parts."""
    opened = visit(page)
    look_at_everything(opened)
    return opened


def look_at_everything(tab):
    """Scroll to each figure, as a reader would: they are drawn when they come near."""
    for figure in tab.locator("[data-chart] > .plot").all():
        figure.evaluate("e => e.scrollIntoView({behavior: 'instant'})")
        figure.locator(".main-svg").first.wait_for(state="attached")


def column(tab, table, number):
    return tab.locator(f"#table-{table} tbody tr").evaluate_all(
        f"rows => rows.map(row => row.cells[{number}].textContent.trim())"
    )


def test_every_figure_is_drawn_without_complaint(tab):
    drawn = tab.evaluate(
        "[...document.querySelectorAll('[data-chart] > .plot')].map(e => e.data.length)"
    )
    assert len(drawn) > 15
    assert min(drawn) > 0
    assert tab.complaints == []


def test_nothing_is_wider_than_a_phone(page, visit):
    tab = visit(page, PHONE)
    look_at_everything(tab)
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE[0]
    assert tab.complaints == []


def test_charts_follow_a_window_that_is_resized_after_loading(page, visit):
    tab = visit(page)
    look_at_everything(tab)
    widths = """() => [...document.querySelectorAll('[data-chart] > .plot')].map(
        e => [e.querySelector('.main-svg').clientWidth, e.clientWidth])"""
    wide = tab.evaluate(widths)
    for size in (PHONE, WIDE):
        tab.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
        tab.wait_for_function(
            f"() => ({widths})().every(([a, b]) => a === b && b < {size[0]})"
        )
        assert tab.evaluate("document.documentElement.scrollWidth") == size[0]
        shown = "document.querySelector('#figure-%s > .plot').layout.xaxis.dtick"
        ticks = tab.evaluate(shown % "noise-paper-expected")
        assert ticks == (2 if size == PHONE else 1)
    assert tab.evaluate(widths) == wide
    assert tab.complaints == []


def test_the_navigation_is_of_use_on_a_phone(page, visit):
    tab = visit(page, PHONE)
    last = tab.locator("nav a").last
    last.click()
    top = "document.querySelector('#settings').getBoundingClientRect().top"
    tab.wait_for_function(f"() => 0 <= {top} && {top} < {PHONE[1]}")
    box = last.bounding_box()
    assert 0 <= box["x"] < box["x"] + box["width"] <= PHONE[0]


def test_the_toolbar_of_a_chart_is_there_on_hover_only(page, visit):
    tab = visit(page)
    figure = tab.locator("#figure-runtime-ours > .plot")
    figure.scroll_into_view_if_needed()
    bar = figure.locator(".modebar--hover .modebar-group").first
    bar.wait_for(state="attached")
    opacity = "e => getComputedStyle(e).opacity"
    assert bar.evaluate(opacity) == "0"
    figure.hover()
    tab.wait_for_timeout(600)
    assert bar.evaluate(opacity) == "1"
    phone = visit(page, PHONE, has_touch=True, is_mobile=True)
    look_at_everything(phone)
    assert phone.locator(".modebar-btn").count() == 0


def test_methods_are_switched_by_mouse_and_keyboard_in_all_charts_of_a_group(tab):
    group = tab.locator("#noise .group").first
    shown = """() => ['expected', 'f1'].map(name =>
        document.querySelector(`#figure-noise-paper-${name} > .plot`).data
        .filter(t => t.visible === false).map(t => t.meta.method))"""
    button = group.get_by_role("button", name="RBF SVM, γ = 0.5")
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    for hidden in tab.evaluate(shown):
        assert set(hidden) == {"RBF SVM, γ = 0.5"}
    button.press("Enter")
    assert tab.evaluate(shown) == [[], []]
    group.get_by_role("button", name="hide all").click()
    assert all(len(set(hidden)) >= 2 for hidden in tab.evaluate(shown))
    group.get_by_role("button", name="show all").click()
    assert tab.evaluate(shown) == [[], []]


def test_the_static_figure_stands_beside_the_interactive_one(tab):
    figure = tab.locator("#figure-runtime-ours")
    figure.scroll_into_view_if_needed()
    assert figure.locator(".plot").is_visible()
    assert not figure.locator("img").is_visible()
    figure.get_by_role("button", name="Static").click()
    assert not figure.locator(".plot").is_visible()
    assert figure.locator("img").evaluate("e => e.naturalWidth") > 300
    with tab.expect_download() as saved:
        figure.get_by_role("link", name="SVG").click()
    content = saved.value.path().read_bytes()
    assert saved.value.suggested_filename == "runtime-ours.svg"
    assert b"<svg" in content


def test_tables_are_sorted_and_saved(tab):
    table = tab.locator("#table-noise-accuracy")
    header = table.get_by_role("columnheader", name="σ = 0.1")
    header.get_by_role("button").click()
    assert header.get_attribute("aria-sort") == "descending"
    means = [float(text.split()[0]) for text in column(tab, "noise-accuracy", 2)]
    assert means == sorted(means, reverse=True)
    header.get_by_role("button").press("Enter")
    assert header.get_attribute("aria-sort") == "ascending"
    means = [float(text.split()[0]) for text in column(tab, "noise-accuracy", 2)]
    assert means == sorted(means)
    first = table.get_by_role("columnheader", name="method")
    first.get_by_role("button").click()
    assert header.get_attribute("aria-sort") is None
    names = column(tab, "noise-accuracy", 0)
    assert names == sorted(names, key=str.casefold)
    with tab.expect_download() as saved:
        table.get_by_role("link", name="CSV").click()
    lines = saved.value.path().read_text().splitlines()
    assert lines[0].startswith("method,constants,")


def test_what_is_missing_is_sorted_last(tab):
    table = tab.locator("#table-text-rotten-tomatoes")
    header = table.get_by_role("columnheader", name="accuracy published")
    for _ in range(2):
        header.get_by_role("button").click()
        values = column(tab, "text-rotten-tomatoes", 3)
        assert values[-1] == "–"
        assert values[0] != "–"


def test_claims_are_filtered(tab):
    claims, rest = tab.locator(".claim:visible"), tab.locator(".untested-claims li")
    everything = claims.count()
    assert not rest.first.is_visible()
    filters = tab.locator(".filters")
    filters.get_by_role("button", name="Holds", exact=True).click()
    assert 0 < claims.count() < everything
    filters.get_by_role("button", name="Not tested here").click()
    assert rest.first.is_visible()
    filters.get_by_role("button", name="All claims").click()
    assert claims.count() == everything


def test_light_and_dark(page, visit):
    tab = visit(page, color_scheme="dark")
    figure = tab.locator("#figure-runtime-ours")
    figure.scroll_into_view_if_needed()
    figure.locator(".main-svg").first.wait_for(state="attached")
    brightness = """() => {
        const light = c => Math.max(...c.match(/\\d+/g).slice(0, 3).map(Number));
        const line = document.querySelector('#figure-runtime-ours > .plot').data.at(-1);
        const body = getComputedStyle(document.body);
        return [light(body.backgroundColor), light(body.color), line.line.color];
    }"""
    page_dark, text_dark, line_dark = tab.evaluate(brightness)
    assert page_dark < 40 < 200 < text_dark
    tab.locator("#theme").click()
    page_light, text_light, line_light = tab.evaluate(brightness)
    assert text_light < 60 < 200 < page_light
    assert line_light != line_dark
    again = tab.context.new_page()
    again.goto(page.as_uri(), wait_until="commit")
    assert again.locator("html[data-theme=light]").count() == 1
    assert tab.complaints == []


def test_without_scripts_tables_and_figures_are_there(page, visit):
    tab = visit(page, java_script_enabled=False)
    figures = tab.locator("img.still")
    assert figures.count() > 15
    for figure in figures.all():
        assert figure.is_visible()
    assert tab.locator("#table-noise-accuracy tbody tr").count() == 7
    assert tab.locator(".claim").first.is_visible()
    assert tab.locator(".needs-script:visible").count() == 0
    with tab.expect_download() as saved:
        tab.locator("#table-noise-accuracy .download").click()
    assert saved.value.path().read_text().startswith("method,")


def test_the_keyboard_reaches_the_results_first(page, visit):
    tab = visit(page, java_script_enabled=False)
    tab.keyboard.press("Tab")
    assert tab.locator(".skip:focus").count() == 1
    tab.keyboard.press("Enter")
    assert tab.locator("#main:focus").count() == 1


def test_records_cannot_run_scripts(tmp_path, visit):
    evil = "<img src=x onerror='window.owned=1'><a href='javascript:owned=1'>x</a>"
    job = COMMON | {"method": evil, "constants": "paper", "noise": 1.0, "trial": 0}
    other = job | {"method": "</script><script>window.owned=1</script>"}
    records = [
        make_record("noise", each, {"expected_accuracy": 0.5}) for each in (job, other)
    ]
    tab = visit(write_report(write_results(tmp_path, noise=records)))
    look_at_everything(tab)
    tab.locator(".legend button").first.click()
    assert tab.evaluate("window.owned") is None
    assert tab.locator(".plot a, .plot img").count() == 0
    assert tab.complaints == []
