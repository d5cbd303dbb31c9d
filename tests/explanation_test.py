import io

import flax.linen as nn
import markdown_it
import pytest
import rich.console
from zoo import X

from mixprec import Policy, Rule, explain, wrap


class Named(nn.Module):
    """Has a site that rich takes for an emoji, and paths that are Markdown."""

    def setup(self):
        self._part_ = nn.Dense(4)

    def train(self, x):
        return self._part_(x)

    def __call__(self, x):
        return self.train(x)


PATTERNS = [
    "[a-z_]+/kernel",
    "[/_a-z]*",
    "[a-z_]*(.*)[a-z]*",
    ".*/.*",
    "_part_/(kernel|bias)",
    "<b>|.*",
    "&lt;|.*",
]


def cells(explanation):
    """Gives the cells of the table in Markdown, as a reader of Markdown has them."""
    markdown = markdown_it.MarkdownIt("commonmark").enable("table")
    tokens = markdown.parse(explanation.to_markdown())
    return [token for token in tokens if token.type == "inline"]


@pytest.mark.parametrize("pattern", [*PATTERNS, "\n|.*", "\x1b|.*"])
def test_patterns_and_paths_are_shown_as_they_are(pattern):
    policy = Policy(
        params=(Rule(pattern, "toward_zero"),),
        activations=(Rule("", "toward_zero", at="out", method="train"),),
    )
    explanation = explain(wrap(Named(), policy), X)
    shown = pattern.replace("\n", r"\n").replace("\x1b", r"\x1b")
    console = rich.console.Console(file=io.StringIO(), width=400, force_terminal=True)
    console.print(explanation)
    for text in (str(explanation), console.file.getvalue()):
        assert shown in text
        assert ":train:out" in text
    found = cells(explanation)
    for cell in found:
        assert {child.type for child in cell.children or ()} <= {"text"}
    texts = ["".join(child.content for child in cell.children or ()) for cell in found]
    assert shown in texts
    assert "_part_/kernel" in texts
