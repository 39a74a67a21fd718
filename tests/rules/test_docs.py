"""What the documents point at exists."""

import re

import pytest

from tests.rules.sources import PACKAGE, ROOT

PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/*.md")),
)
PATH = re.compile(r"`?((?:tercel|tests|docs|tools|benchmarks|training|checkpoints)/[\w./-]*\w)")
INSIDE = re.compile(
    r"`((?:core|contract|blocks|targets|weights|parallel|runtime|server|cli)/[\w./-]*\w\.py)"
)


@pytest.mark.parametrize("page", PAGES)
def test_paths_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    missing = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    missing |= {path for path in INSIDE.findall(text) if not (PACKAGE / path).exists()}
    assert missing == set()


def test_readme_shows_the_recipe_as_it_is():
    """Lines of the README's Python blocks that quote the recipe stand there."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    recipe = (PACKAGE / "targets/recipes/kimi.py").read_text(encoding="utf-8")
    block = next(b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "layers" in b)
    lines = {line.strip() for line in recipe.splitlines()}
    quoted = [line.strip() for line in block.splitlines() if line.strip() and "..." not in line]
    assert [line for line in quoted if line not in lines] == []
