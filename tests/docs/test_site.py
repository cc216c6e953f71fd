"""The site: it builds without a warning, and a browser finds its way on it."""

import functools
import http.server
import importlib
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from playwright.sync_api import sync_playwright

import coulomb
from coulomb import __version__

ROOT = Path(__file__).parents[2]
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Built from a copy, with one example run; `make docs` runs them all."""
    folder = tmp_path_factory.mktemp("site")
    ignored = shutil.ignore_patterns("api", "gallery", "__pycache__")
    for part in ("docs", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for name in ("CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / name, folder)
    # A version that was built before lies beside: it has a first page, and one more.
    older = folder / "site" / "0.0.9"
    icon = f'<link rel="icon" href="../{__version__}/_static/favicon.svg">'
    older.mkdir(parents=True)
    for name in ("index.html", "roadmap.html", "objects.inv"):
        (older / name).write_text(f"<!doctype html><title>older</title>{icon}", "utf-8")
    command = [sys.executable, "-m", "sphinx", "-qW", "--keep-going", "docs"]
    subprocess.run(
        [*command, f"site/{__version__}"],
        cwd=folder,
        check=True,
        env=os.environ | {"COULOMB_GALLERY": "phase_portrait", "OMP_NUM_THREADS": "1"},
    )
    return folder / "site"


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_links_of_the_site_lead_somewhere(site):
    """To a file of the site, and to a place in it."""
    pages = {page: page.read_text("utf-8") for page in site.rglob("*.html")}
    places = {
        page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in pages.items()
    }
    broken = []
    for page, text in pages.items():
        for link in re.findall(
            r'<(?:a|img|script|link)\b[^>]*?(?:href|src)="([^"]*)"', text
        ):
            if re.match(r"[a-z]+:|//", link):
                assert not re.search(
                    r"<(?:script|link|img)[^>]*" + re.escape(link), text
                )
                continue
            name, _, place = unquote(link.split("?")[0]).partition("#")
            target = (page.parent / name).resolve() if name else page
            if target.is_dir():
                target /= "index.html"
            there = target.exists() and (
                not place or place in places.get(target, place)
            )
            if not there:
                broken.append(f"{page.relative_to(site)}: {link}")
    assert not broken, "\n".join(broken)
    assert len(pages) > 40


def test_every_exported_name_has_an_entry(site):
    pages = (site / __version__).glob("api/*.html")
    text = "".join(page.read_text("utf-8") for page in pages)
    entries = re.findall(r'<dt[^>]*\bid="coulomb\.([^"]+)"', text)
    known = {each.rpartition(".")[2] for each in entries}
    parts = [part.name for part in pkgutil.iter_modules(coulomb.__path__)]
    modules = ["coulomb", *(f"coulomb.{part}" for part in parts if part[0] != "_")]
    missing = [
        f"{module}.{name}"
        for module in modules
        for name in getattr(importlib.import_module(module), "__all__", ())
        if name not in known and not name.startswith("_")
    ]
    assert not missing, "\n".join(missing)


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


@pytest.fixture
def open_tab(browser, address):
    """Open the first page; what the browser complains of fails the test."""
    complaints, tabs = [], []

    def note(request):
        if not request.url.startswith((address, "data:")):
            complaints.append(request.url)

    def opened(width):
        tab = browser.new_page(viewport={"width": width, "height": 844})
        tabs.append(tab)
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", note)
        # 304: the browser has it already.
        tab.on(
            "response",
            lambda x: x.status < 400 or complaints.append(f"{x.status} {x.url}"),
        )
        tab.goto(f"{address}/index.html")
        tab.wait_for_url(f"**/{__version__}/index.html")  # the newest version
        return tab

    yield opened
    for tab in tabs:
        tab.close()
    assert not complaints, "\n".join(complaints)


def show_sidebar(tab, width):
    if width < 1000:
        tab.locator("header label[for='__navigation']").click()


@pytest.mark.parametrize("width", [1400, 390])
def test_a_browser_finds_the_sampler(open_tab, address, width):
    tab = open_tab(width)
    show_sidebar(tab, width)
    tab.locator("input.sidebar-search").fill("CoulombSampler")
    tab.locator("input.sidebar-search").press("Enter")
    tab.locator("ul.search li a").first.wait_for(timeout=60_000)
    # Summaries of what was found are fetched: leaving earlier aborts that.
    tab.wait_for_load_state("networkidle")
    tab.locator("ul.search a[href*='coulomb.CoulombSampler']").first.click()
    tab.locator("dt[id='coulomb.CoulombSampler']").wait_for()
    for page in ("gallery/draw_phase_portrait", "theory/particles-to-density"):
        tab.goto(f"{address}/{__version__}/{page}.html")
        overflow = "document.documentElement.scrollWidth - window.innerWidth"
        assert tab.evaluate(overflow) <= 1, page
    assert tab.locator("math").count() > 10


@pytest.mark.parametrize("width", [1400, 390])
def test_the_switch_leads_to_the_same_page_of_another_version(open_tab, address, width):
    """Or to its first page, where it has no such page."""
    tab = open_tab(width)
    for page, there in (("roadmap", "roadmap"), ("gallery/index", "index")):
        tab.goto(f"{address}/{__version__}/{page}.html")
        show_sidebar(tab, width)
        switch = tab.get_by_label("Version")
        assert switch.locator("option").all_inner_texts() == [__version__, "0.0.9"]
        assert switch.input_value() == __version__
        switch.select_option("0.0.9")
        tab.wait_for_url(f"{address}/0.0.9/{there}.html")
