"""The site: `make docs` builds it into build/site/VERSION, without network."""

import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
from pathlib import Path

import latex2mathml.converter
import matplotlib
from docutils.nodes import SkipNode

import coulomb

matplotlib.use("agg")
HERE = Path(__file__).parent

project, author, release = "coulomb", "The coulomb developers", coulomb.__version__
version, copyright = release, author
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_gallery.gen_gallery",
    "sphinx_copybutton",
]
exclude_patterns = ["results/records", "results/paper", "gallery/*.ipynb"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
# Blocks of other tools, and code that highlighters know by no name.
suppress_warnings = ["config.cache", "misc.highlighting_failure"]
default_role = "literal"

html_theme = "furo"
html_title = f"coulomb {release}"
html_favicon = "images/favicon.svg"
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        *("sidebar/brand.html", "sidebar/search.html", "versions.html"),
        *("sidebar/scroll-start.html", "sidebar/navigation.html"),
        "sidebar/scroll-end.html",
    ]
}
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_math_renderer = "mathml"
copybutton_exclude = ".linenos, .gp, .go"

# A page for each package, with all that is public in it.
PAGES = {
    "coulomb": ["coulomb", "coulomb.estimators"],
    "particles": [
        *("coulomb.features", "coulomb.interactions", "coulomb.domains"),
        *("coulomb.energy", "coulomb.objectives", "coulomb.dynamics"),
        "coulomb.kernels",
    ],
    "attention": ["coulomb.attention"],
    "linearise": ["coulomb.linearise"],
    "text": ["coulomb.text"],
    "theory": ["coulomb.theory"],
    "experiments": ["coulomb.experiments", "coulomb.datasets"],
}
numpydoc_show_class_members = False
numpydoc_class_members_toctree = False
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# What scikit-learn gives every estimator refers to pages of its own.
_ROUTING = [f"set_{x}_request" for x in ("fit", "partial_fit", "predict", "score")]
_ROUTING += ["set_transform_request", "set_inverse_transform_request"]
autodoc_default_options = {
    "members": True,
    "exclude-members": ",".join([*_ROUTING, "get_metadata_routing"]),
}
nitpicky = True
# Types of other libraries, whose inventories would need a network.
nitpick_ignore_regex = [("py:.*", r"(?!coulomb\b).*")]

sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    # A test builds the site with one example run, and the others as text.
    "filename_pattern": os.environ.get("COULOMB_GALLERY", ""),
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("matplotlib",),
    "reset_modules": ("matplotlib",),
    "write_computation_times": False,
    "abort_on_example_error": True,
}


def public_names(module_name):
    """Give what a module shows, with the modules below it if it is a package."""
    module = importlib.import_module(module_name)
    if hasattr(module, "__all__"):
        return [(name, getattr(module, name)) for name in module.__all__]
    parts = [module]
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not info.name.startswith("_"):
            parts.append(importlib.import_module(f"{module_name}.{info.name}"))
    return [
        (name, thing)
        for part in parts
        for name, thing in vars(part).items()
        if name[0] != "_" and getattr(thing, "__module__", "") == part.__name__
    ]


def tell_data(full, thing):
    """Say what is in a public constant: its names, or the whole of it."""
    module, _, name = full.rpartition(".")
    if name[0] == "_" or name not in getattr(sys.modules[module], "__all__", ()):
        return []
    held = thing if hasattr(thing, "__iter__") else [thing]
    told = f"{type(thing).__name__}: {', '.join(f'`{each}`' for each in held)}"
    return [name, "-" * len(name), "", f".. py:data:: {full}", "", f"   {told}", ""]


def write_reference(app):
    """Write the pages of the reference, before they are read."""
    folder = Path(app.srcdir) / "api"
    folder.mkdir(exist_ok=True)
    seen = set()
    for page, modules in PAGES.items():
        lines = []
        for module in modules:
            lines += [module, "=" * len(module), ""]
            lines += [f".. automodule:: {module}", "   :no-members:", ""]
            for name, thing in sorted(public_names(module), key=lambda x: x[0].lower()):
                kind = "function" if inspect.isfunction(thing) else "class"
                if not (inspect.isfunction(thing) or inspect.isclass(thing)):
                    lines += tell_data(f"{module}.{name}", thing)
                    continue
                if thing in seen:
                    continue
                seen.add(thing)
                home = module if hasattr(sys.modules[module], name) else None
                full = f"{home or thing.__module__}.{name}"
                lines += [name, "-" * len(name), "", f".. auto{kind}:: {full}", ""]
        (folder / f"{page}.rst").write_text("\n".join(lines), encoding="utf-8")
    root = HERE.parent
    readme = (root / "README.md").read_text("utf-8")
    readme = re.sub(r"\[([^\]]+)\]\((?!docs/)[^)]*\)", r"\1", readme)
    readme = readme.replace("(docs/", "(../").replace("# coulomb", "# In one page", 1)
    (folder / "readme.md").write_text(readme, "utf-8")
    changes = (root / "CHANGELOG.md").read_text("utf-8")
    (folder / "changelog.md").write_text(changes, "utf-8")


def set_formulas(app, kind, name, thing, options, lines):
    """Keep indented formulas of the first part of a docstring as they are typed."""
    found, before, inside = [], "", False
    for number, line in enumerate(lines):
        if set(lines[number + 1].strip() if number + 1 < len(lines) else "") == {"-"}:
            found += lines[number:]
            break
        indented = line.startswith("    ") and not before.strip()
        if indented and not inside:
            found += ["::", ""]
        inside = indented or (inside and (line.startswith("    ") or not line))
        found.append(line)
        before = line
    lines[:] = found


TREE = """
```{toctree}
:hidden:
:caption: Guides
:glob:

api/readme
guide-*
extending
gallery/index
```

```{toctree}
:hidden:
:caption: Reference

API
```

```{toctree}
:hidden:
:caption: Results and theory
:glob:

results/*
theory/*
design-*
scale
paper/*
reliability
roadmap
api/changelog
```
""".replace("API", "\n".join(f"api/{page}" for page in PAGES))


def fit_page(app, page, source):
    """Give the first page its tree, and drop links that leave the site."""
    outside = r"\[([^\]]+)\]\((?:\.\./CONTRIBUTING\.md|records)\)"
    text = source[0].replace("(../README.md)", "(api/readme.md)")
    source[0] = re.sub(outside, r"\1", text) + (TREE if page == "index" else "")


def list_versions(app, error):
    """Tell the switch which versions lie side by side, and their pages; lead to one."""
    if error or app.builder.format != "html":
        return
    site = Path(app.outdir).parent
    folders = [path.parent for path in site.glob("*/objects.inv")]
    folders.sort(
        key=lambda x: [int(n) for n in re.findall(r"\d+", x.name)], reverse=True
    )
    pages = {
        folder.name: [x.relative_to(folder).as_posix() for x in folder.rglob("*.html")]
        for folder in folders
    }
    name = folders[0].name
    newest, icon = f"{name}/index.html", f"{name}/_static/favicon.svg"
    files = {
        "versions.js": f"const versions = {json.dumps(pages)};\n",
        "index.html": '<!doctype html><html lang="en"><meta charset="utf-8"><title>'
        f'coulomb</title><link rel="icon" href="{icon}">'
        f'<meta http-equiv="refresh" content="0; url={newest}">'
        f'<a href="{newest}">{newest}</a></html>\n',
    }
    for name, text in files.items():
        (site / name).write_text(text, "utf-8")


def visit_math(self, node):
    """Write a formula as MathML, which browsers draw without a script."""
    block = "block" if node.tagname == "math_block" else "inline"
    self.body.append(latex2mathml.converter.convert(node.astext(), display=block))
    raise SkipNode


def setup(app):
    """Register what is not an extension of its own."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math, None))
    app.connect("builder-inited", write_reference, priority=100)
    app.connect("source-read", fit_page)
    app.connect("build-finished", list_versions)
    app.connect("autodoc-process-docstring", set_formulas, priority=100)
