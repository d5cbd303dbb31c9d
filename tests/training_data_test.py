import os
import pathlib
import subprocess
import sys

import grain
import numpy as np
import orbax.checkpoint as ocp
import pytest

from mixprec.training import data
from mixprec.training import text as text_lib

OPTIONS = dict(sequence_length=8, batch_size=4, validation_fraction=0.3)


def load(path, seed=0, **changes):
    config = data.DataConfig(path=str(path), **OPTIONS | changes)
    return data.load(config, seed=seed)


def text(n, seed=0):
    """Letters at random: every window is its own, so contents tell places."""
    generator = np.random.default_rng(seed)
    return bytes(generator.integers(97, 123, n, dtype=np.uint8))


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "texts"
    (path / "deep").mkdir(parents=True)
    for number in range(12):
        name = f"deep/{number}.txt" if number % 2 else f"{number}.md"
        (path / name).write_bytes(text(200, seed=number))
    return path


def contents(dataset):
    """All bytes of training and of validation, of one corpus of text."""
    (corpus,) = dataset.corpora
    (train,), (validation,) = corpus.train, corpus.validation
    return bytes(train.array), bytes(validation.array)


def windows(part, length=8):
    """All windows of a part, sliced plainly."""
    part = bytes(part)
    count = (len(part) - 1) // length
    return [part[i * length : i * length + length + 1] for i in range(count)]


def rows(batches):
    return [bytes(row.astype(np.uint8)) for batch in batches for row in batch]


# The standard library


def standard_library():
    return data.load(
        data.DataConfig(
            path="stdlib", sequence_length=128, batch_size=16, validation_fraction=0.05
        ),
        seed=0,
    )


def test_the_standard_library_is_split_as_promised():
    dataset = standard_library()
    train, validation = contents(dataset)
    total = len(train) + len(validation)
    assert 9e6 < total < 20e6
    assert 0.02 < len(validation) / total < 0.2
    # Well-known lines: of no test, and each on one side only.
    both = train, validation
    assert sum(b"class OrderedDict(dict):" in part for part in both) == 1
    assert not any(b"class TestCase_for_nothing" in part for part in both)
    assert not any(b"build_time_vars = {" in part for part in both)
    assert "standard library of Python" in dataset.description
    # English letters and code in bytes: between 2.5 and 3.5 nats.
    assert 2.5 < dataset.baseline_loss < 3.5


def test_the_batches_are_the_same_in_another_process():
    script = (
        "from training_data_test import standard_library\n"
        "d = standard_library()\n"
        "print(d.fingerprint, next(d.train_iterator()).sum(), d.baseline_loss)\n"
    )
    here = pathlib.Path(__file__).resolve().parent
    outputs = set()
    for hash_seed in ("1", "2"):
        environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{here}:{here.parent}",
            "PYTHONHASHSEED": hash_seed,
            "LC_ALL": "C",
            "JAX_PLATFORMS": "cpu",
        }
        result = subprocess.run(
            [sys.executable, "-c", script],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(result.stdout)
    dataset = standard_library()
    first = next(dataset.train_iterator()).sum()
    assert outputs == {f"{dataset.fingerprint} {first} {dataset.baseline_loss}\n"}


def test_what_users_install_does_not_change_it(tmp_path, monkeypatch):
    library = tmp_path / "lib"
    for name in ("a", "b", "package/c", "package/d"):
        path = library / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text(300, seed=len(name)))
    monkeypatch.setattr(
        text_lib.sysconfig, "get_paths", lambda: {"stdlib": str(library)}
    )
    before = load("stdlib").fingerprint
    for name in (
        "site-packages/numpy/x.py",
        "dist-packages/x.py",
        "test/test_x.py",
        "package/tests/x.py",
        "_sysconfigdata__linux_x86_64-linux-gnu.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "package/__pycache__/c.cpython-311.pyc",
        ".hidden/x.py",
    ):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text(100))
    assert load("stdlib").fingerprint == before


# Files of the user's


def test_a_folder_gives_whole_files_to_either_side(folder):
    dataset = load(folder)
    files = {path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    parts = [part.split(b"\0") for part in contents(dataset)]
    assert set(parts[0]) | set(parts[1]) == files
    assert len(parts[0]) + len(parts[1]) == len(files)
    assert 1 <= len(parts[1]) < len(parts[0])
    assert "12 files" in dataset.description


def test_a_file_stays_on_its_side_when_others_come(folder):
    before = set(contents(load(folder))[1].split(b"\0"))
    (folder / "new.txt").write_bytes(text(200, seed=99))
    after = set(contents(load(folder))[1].split(b"\0"))
    assert before <= after


def test_a_glob_takes_what_it_matches(folder):
    dataset = load(folder / "**" / "*.txt")
    assert "6 files" in dataset.description
    dataset = load(folder / "*.md")
    assert "6 files" in dataset.description


def test_a_single_file_is_split_by_bytes(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(text(1000))
    dataset = load(path)
    assert contents(dataset) == (text(1000)[:700], text(1000)[700:])


def test_home_is_expanded(tmp_path, monkeypatch):
    (tmp_path / "one.txt").write_bytes(text(1000))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(contents(load("~/one.txt"))[0]) == 700


# Batches


def test_each_pass_has_every_window_once_in_another_order(folder):
    dataset = load(folder)
    expected = windows(contents(dataset)[0])
    iterator = dataset.train_iterator()
    # Four passes, so that whole batches come out even.
    drawn = rows(next(iterator) for _ in range(len(expected)))
    passes = [drawn[i * len(expected) : (i + 1) * len(expected)] for i in range(4)]
    for one_pass in passes:
        assert sorted(one_pass) == sorted(expected)
        assert one_pass != expected
    assert passes[0] != passes[1] != passes[2]


def test_batches_have_the_documented_form_and_depend_on_the_seed(folder):
    first = next(load(folder, seed=1).train_iterator())
    assert first.shape == (4, 9)
    assert first.dtype == np.int32
    np.testing.assert_array_equal(first, next(load(folder, seed=1).train_iterator()))
    assert (first != next(load(folder, seed=2).train_iterator())).any()


def test_the_iterator_resumes_exactly_through_orbax(folder, tmp_path):
    dataset = load(folder)
    iterator = dataset.train_iterator()
    for _ in range(5):
        next(iterator)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        save = grain.checkpoint.CheckpointSave(iterator)
        manager.save(5, args=ocp.args.Composite(data=save))
        expected = [
            next(iterator) for _ in range(2 * len(windows(contents(dataset)[0])) // 4)
        ]
        manager.wait_until_finished()
        fresh = load(folder).train_iterator()
        restore = grain.checkpoint.CheckpointRestore(fresh)
        manager.restore(5, args=ocp.args.Composite(data=restore))
    for batch in expected:
        np.testing.assert_array_equal(next(fresh), batch)


def test_validation_batches_are_fixed_and_spread(folder):
    dataset = load(folder)
    all_windows = windows(contents(dataset)[1])
    batches = dataset.validation_batches(2)
    assert len(batches) == 2
    assert batches[0].shape == (4, 9)
    assert batches[0].dtype == np.int32
    places = [all_windows.index(row) for row in rows(batches)]
    assert places == sorted(set(places))
    assert places[0] == 0
    assert places[-1] == len(all_windows) - 1
    again = load(folder, seed=5).validation_batches(2)
    np.testing.assert_array_equal(batches, again)
    assert len(dataset.validation_batches(10**6)) == len(all_windows) // 4


def test_baseline_by_hand(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(b"a" * 60 + b"b" * 40)
    dataset = load(path, sequence_length=2, batch_size=1)
    # Training: 60 a, 10 b, and one of each of 256 bytes; validation: 30 b.
    expected = -np.log((10 + 1) / (70 + 256))
    assert abs(dataset.baseline_loss - expected) < 1e-12


# Errors


def test_a_path_that_does_not_exist_is_named(tmp_path):
    missing = tmp_path / "nothing.txt"
    with pytest.raises(FileNotFoundError, match="nothing.txt' must be a text file"):
        load(missing)
    with pytest.raises(FileNotFoundError, match=r"\*.rst' must match a text file"):
        load(tmp_path / "*.rst")


def test_a_path_that_is_no_file_is_named(tmp_path):
    (tmp_path / "pipe").mkdir()
    with pytest.raises(FileNotFoundError, match="/dev/null' must be a text file"):
        load("/dev/null")
    with pytest.raises(FileNotFoundError, match="got something else there"):
        load(tmp_path / "pip?")
    with pytest.raises(ValueError, match="`path` must be 'stdlib'"):
        load("")


def test_an_empty_folder_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty' must hold text files"):
        load(tmp_path / "empty")


def test_a_binary_file_is_named(folder):
    (folder / "image.png").write_bytes(b"\x89PNG\x00\xff")
    with pytest.raises(
        ValueError, match="image.png' must be UTF-8 text, got byte 0x89"
    ):
        load(folder)


def test_a_file_that_cannot_be_read_is_named(folder, monkeypatch):
    read_bytes = pathlib.Path.read_bytes

    def refuse(path):
        if path.name == "4.md":
            raise PermissionError(13, "Permission denied", str(path))
        return read_bytes(path)

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    with pytest.raises(PermissionError, match="4.md"):
        load(folder)


@pytest.mark.parametrize("length", [0, 5, 60])
def test_too_short_a_text_is_named_with_what_is_needed(tmp_path, length):
    path = tmp_path / "short.txt"
    path.write_bytes(text(length))
    with pytest.raises(
        ValueError, match=r"short.txt' must give \w+ at least 33 bytes, one batch of 4"
    ):
        load(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sequence_length", 0),
        ("batch_size", 0),
        ("validation_fraction", 0.0),
        ("validation_fraction", 1.0),
    ],
)
def test_bad_options_are_refused(name, value):
    with pytest.raises(ValueError, match=f"`{name}` must .*, got {value}"):
        data.DataConfig(path="stdlib", **OPTIONS | {name: value})
