"""The house keeps its order: who imports whom, which test belongs to which file."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDERS = ("mixprec", "models", "configs")
SOURCES = sorted(
    path.relative_to(ROOT)
    for path in (
        *(p for f in FOLDERS for p in (ROOT / f).rglob("*.py")),
        ROOT / "train.py",
    )
)
MOST_LINES = 400
MOST_FUNCTION_LINES = 60

# Bottom to top: a file may import those before it. The first two are plain data.
WRAPPING = (
    "rules",
    "policy",
    "shards",
    "tensors",
    "trees",
    "classes",
    "scopes",
    "coverage",
    "linen",
    "views",
    "standins",
    "nnx",
    "wrap",
    "explanation",
    "explain",
)
# Room -> what it may import of this project; what it may not of the libraries.
# The first room that a file is in decides.
ROOMS = {
    "configs": (("configs",), ("jax", "flax", "optax")),
    "models": (("models",), ()),
    "mixprec/rounding": (("mixprec.rounding",), ("flax", "optax")),
    **{
        f"mixprec/{noun}.py": (
            ("mixprec.rounding.modes", *(f"mixprec.{n}" for n in WRAPPING[:place])),
            ("jax", "flax", "optax"),
        )
        for place, noun in enumerate(WRAPPING[:2])
    },
    **{
        f"mixprec/{noun}.py": (
            ("mixprec.rounding", *(f"mixprec.{n}" for n in WRAPPING[:place])),
            ("optax",),
        )
        for place, noun in enumerate(WRAPPING)
        if place >= 2
    },
    "mixprec/__init__.py": (("mixprec",), ("optax",)),
    "mixprec/training": (("mixprec",), ("ml_collections", "absl")),
    "train.py": (("mixprec", "models"), ()),
}
# Bottom to top: a file may import those before it.
TRAINING = (
    "processes",
    "program",
    "sharding",
    "state",
    "metrics",
    "step",
    "fingerprint",
    "mixture",
    "text",
    "documents",
    "tokenizer",
    "tokens",
    "shards",
    "records",
    "corpus",
    "data",
    "prepare",
    "checkpoint",
    "sample",
    "loop",
)


def imports(path):
    """Gives the full names of all that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def is_within(name, modules):
    return any(name == module or name.startswith(module + ".") for module in modules)


def room_of(path):
    for room in ROOMS:
        if path == pathlib.Path(room) or pathlib.Path(room) in path.parents:
            return room
    raise AssertionError(f"{path} belongs to no room: add one to ROOMS")


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_go_downward_only(path):
    allowed, forbidden = ROOMS[room_of(path)]
    for name in imports(path):
        assert not is_within(name, forbidden), f"{path} must not import {name}"
        if is_within(name, ("mixprec", "models", "configs", "train")):
            assert is_within(name, allowed), f"{path} must not import {name}"


@pytest.mark.parametrize("noun", TRAINING)
def test_the_trainer_imports_downward_only(noun):
    above = TRAINING[TRAINING.index(noun) + 1 :]
    for name in imports(f"mixprec/training/{noun}.py"):
        assert not is_within(name, [f"mixprec.training.{other}" for other in above])


def test_every_file_of_the_trainer_has_its_place():
    files = {path.stem for path in (ROOT / "mixprec/training").glob("*.py")}
    assert files - {"__init__"} == set(TRAINING)


def test_every_source_file_has_its_test_and_every_test_its_source():
    sources = {
        "_".join(path.with_suffix("").parts).removeprefix("mixprec_")
        for path in SOURCES
        if path.name != "__init__.py" and path.parts[0] != "configs"
    }
    tests = {path.stem.removesuffix("_test") for path in ROOT.glob("tests/*_test.py")}
    others = {"architecture", "configs", "outside", "outside_nnx", "readme"}
    assert tests - others == sources


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_files_and_functions_are_short(path):
    text = (ROOT / path).read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert path.name != "utils.py"
    if path.parts[0] == "configs":
        return  # the function is a list of keys
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            # The docstring is documentation, not code.
            documented = ast.get_docstring(node, clean=False) or ""
            lines = node.end_lineno - node.lineno + 1 - len(documented.splitlines())
            assert lines <= MOST_FUNCTION_LINES, f"{path}: {node.name}"
