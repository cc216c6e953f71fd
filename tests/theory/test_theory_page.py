"""The code on the page runs, and prints what the page says."""

import doctest
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "theory" / "particles-to-density.md"


@pytest.mark.slow
def test_from_particles_to_density():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(blocks) > 10
    examples = doctest.DocTestParser().get_doctest(
        "\n".join(blocks), {}, PAGE.name, str(PAGE), 0
    )
    report: list[str] = []
    runner = doctest.DocTestRunner(
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    runner.run(examples, out=report.append)
    assert runner.failures == 0, "".join(report)
