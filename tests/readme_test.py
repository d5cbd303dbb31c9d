"""The README's snippets run, and print what it says they print."""

import contextlib
import io
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text()


def words(text):
    """Lines as words: spaces and rules depend on the width of the terminal."""
    lines = [line.split() for line in text.splitlines()]
    return [line for line in lines if line and "─" not in line[0]]


def test_the_snippets_print_the_table():
    printed = io.StringIO()
    names = {}
    with contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(code, names)
    (table,) = re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)
    assert words(printed.getvalue()) == words(table)
    assert (names["down"] <= names["up"]).all()
    assert names["w"].dtype == "bfloat16"


def test_it_is_short_and_its_links_lead_somewhere():
    assert len(TEXT.splitlines()) <= 120
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
