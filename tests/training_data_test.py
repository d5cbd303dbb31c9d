import io
import os
import pathlib
import struct
import subprocess
import sys

import grain
import hugging_face
import numpy as np
import orbax.checkpoint as ocp
import pytest
import rich.console

from mixprec.training import data, prepare
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


# Tokens


def write_bin(path, tokens):
    header = struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + np.asarray(tokens, "<u2").tobytes())
    return path


def load_tokens(path, seed=0, vocab_size=50257, **changes):
    config = data.DataConfig(path=str(path), **OPTIONS | changes)
    return data.load(config, seed=seed, vocab_size=vocab_size)


@pytest.fixture
def two(tmp_path):
    """Two files of numbers: below 10,000 and from there on."""
    write_bin(tmp_path / "a.bin", np.arange(2000))
    write_bin(tmp_path / "b.bin", np.arange(10_000, 11_000))
    return f"{tmp_path}/a.bin=3, {tmp_path}/b.bin=1"


def take(iterator, number):
    return [next(iterator) for _ in range(number)]


def test_the_order_of_windows_is_that_of_grain_over_them(folder):
    dataset = load(folder, seed=7)
    source = [np.frombuffer(w, np.uint8) for w in windows(contents(dataset)[0])]
    order = grain.MapDataset.source(source).seed(7).shuffle().repeat()
    expected = iter(order.batch(4, drop_remainder=True))
    np.testing.assert_array_equal(
        take(dataset.train_iterator(), 40), take(expected, 40)
    )


def test_shards_give_every_window_once_a_pass(tmp_path):
    for number in range(3):
        start = 1000 * number
        write_bin(tmp_path / f"t{number}.bin", np.arange(start, start + 85))
    write_bin(tmp_path / "val.bin", np.arange(10_000, 10_100))
    dataset = load_tokens(tmp_path)
    batches = np.concatenate(take(dataset.train_iterator(), 15))  # two passes
    expected = [1000 * n + start for n in range(3) for start in range(0, 73, 8)]
    assert sorted(batches[:30, 0]) == sorted(batches[30:, 0]) == expected
    np.testing.assert_array_equal(batches, batches[:, :1] + np.arange(9))
    assert batches.dtype == np.int32


@pytest.mark.parametrize("kind", ["one", "two"])
def test_processes_read_parts_of_the_same_batches_and_have_the_same_state(two, kind):
    path = two if kind == "two" else two.partition("=")[0]
    whole = load_tokens(path).train_iterator()
    parts = [slice(0, 1), slice(1, 4)]
    iterators = [load_tokens(path).train_iterator(rows) for rows in parts]
    for _ in range(20):
        read = [next(iterator) for iterator in iterators]
        np.testing.assert_array_equal(next(whole), np.concatenate(read))
    states = [iterator.get_state() for iterator in (whole, *iterators)]
    assert states[0] == states[1] == states[2]
    dataset = load_tokens(path)
    for all_rows, last in zip(
        dataset.validation_batches(3),
        dataset.validation_batches(3, slice(2, None)),
        strict=True,
    ):
        np.testing.assert_array_equal(all_rows[2:], last)


def test_a_mixture_keeps_its_weights_and_walks_through_each_part(two):
    dataset = load_tokens(two)
    assert dataset.weights == (0.75, 0.25)
    drawn = np.concatenate(take(dataset.train_iterator(), 200))[:, 0]
    from_first = drawn < 10_000
    # Every prefix keeps to the weights but for one row.
    counts = np.cumsum(from_first)
    assert np.abs(counts - 0.75 * np.arange(1, 801)).max() <= 1
    for part, first, number in ((True, 0, 174), (False, 10_000, 87)):
        one_pass = drawn[from_first == part][:number]
        assert sorted(one_pass) == list(range(first, first + 8 * number, 8))
        assert list(one_pass) != sorted(one_pass)
    validation = np.concatenate(dataset.validation_batches(4))[:, 0]
    assert (validation < 10_000).sum() == 12
    assert "data, 75.0%: " in dataset.description


def test_equally_long_parts_are_not_walked_through_alike(tmp_path):
    write_bin(tmp_path / "a.bin", np.arange(2000))
    write_bin(tmp_path / "b.bin", np.arange(10_000, 12_000))
    dataset = load_tokens(f"{tmp_path}/a.bin=1, {tmp_path}/b.bin=1")
    drawn = np.concatenate(take(dataset.train_iterator(), 40))[:, 0]
    first = drawn[drawn < 10_000]
    second = drawn[drawn >= 10_000] - 10_000
    assert (first[:70] != second[:70]).sum() > 60


def test_a_mixture_resumes_exactly_through_orbax(two, tmp_path):
    iterator = load_tokens(two).train_iterator()
    take(iterator, 37)
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        save = grain.checkpoint.CheckpointSave(iterator)
        manager.save(37, args=ocp.args.Composite(data=save))
        expected = take(iterator, 150)
        manager.wait_until_finished()
        fresh = load_tokens(two).train_iterator(slice(1, 3))
        restore = grain.checkpoint.CheckpointRestore(fresh)
        manager.restore(37, args=ocp.args.Composite(data=restore))
    np.testing.assert_array_equal(take(fresh, 150), np.asarray(expected)[:, 1:3])


def test_the_fingerprint_of_a_mixture_knows_each_part(two, tmp_path):
    before = load_tokens(two).fingerprint
    assert load_tokens(two).fingerprint == before
    write_bin(tmp_path / "b.bin", np.arange(10_000, 11_001))
    assert load_tokens(two).fingerprint != before


def test_the_baseline_of_a_mixture_by_hand(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a" * 60 + b"b" * 40)
    (tmp_path / "b.txt").write_bytes(b"b" * 100)
    path = f"{tmp_path}/a.txt=1, {tmp_path}/b.txt=3"
    dataset = load(path, sequence_length=2, batch_size=1)
    # Validation is of b only: 11 of 70 and 71 of 70 in training, of 256 one more each.
    frequency = 0.25 * 11 / 326 + 0.75 * 71 / 326
    assert abs(dataset.baseline_loss + np.log(frequency)) < 1e-12


def test_tokens_above_the_vocabulary_stop_a_run_with_their_place(tmp_path):
    tokens = np.full(100_000, 7)
    tokens[54_321] = 300
    path = write_bin(tmp_path / "a.bin", tokens)
    dataset = load_tokens(path, vocab_size=256)  # no window that is probed has it
    iterator = dataset.train_iterator()
    message = "a.bin' must hold tokens below .* 256, got 300 at token 54,321"
    with pytest.raises(ValueError, match=message):
        take(iterator, 3000)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_dtype": "int16"}, "`token_dtype` must be one of uint16, uint32, got"),
        ({"separator": -2}, "`separator` must be a token, or -1.*got -2"),
        ({"document_mask": True}, "`separator` must be given for `document_mask`"),
        ({"document_mask": True, "separator": 256}, "must be below `vocab_size` = 256"),
    ],
)
def test_bad_options_of_tokens_are_refused(tmp_path, changes, message):
    path = write_bin(tmp_path / "a.bin", [1] * 1000)
    with pytest.raises(ValueError, match=message):
        load_tokens(path, vocab_size=256, **changes)


def test_the_separator_is_that_of_the_data_unless_given(folder, tmp_path):
    assert load(folder).mask_separator is None
    assert load(folder, document_mask=True).mask_separator == 0
    path = write_bin(tmp_path / "a.bin", [1] * 1000)
    dataset = load_tokens(path, document_mask=True, separator=50256)
    assert dataset.mask_separator == 50256


def test_a_tokenizer_must_fit_data_and_model(folder, tmp_path):
    assert load(folder).tokenizer.identity == "bytes"
    path = write_bin(tmp_path / "a.bin", [1] * 1000)
    assert load_tokens(path).tokenizer is None
    assert load_tokens(path).vocab_size == 50257
    assert load_tokens(path).unit == "token"
    tokenizer = str(hugging_face.save(tmp_path / "tokenizer.json"))
    dataset = load_tokens(path, tokenizer=tokenizer)
    assert dataset.tokenizer.vocab_size < 300
    with pytest.raises(ValueError, match=r"at least 2\d\d, that of .*tokenizer.json"):
        load_tokens(path, tokenizer=tokenizer, vocab_size=256)
    with pytest.raises(ValueError, match="is bytes, got .*mixprec.training.prepare"):
        load_tokens(folder, tokenizer=tokenizer)


def test_what_different_tokenizers_made_is_not_mixed(folder, tmp_path):
    tokenizer = str(hugging_face.save(tmp_path / "tokenizer.json"))
    config = prepare.PrepareConfig(
        inputs=(str(folder),),
        output=tmp_path / "shards",
        tokenizer=tokenizer,
        validation_fraction=0.3,
    )
    prepare.prepare(config, rich.console.Console(file=io.StringIO()))
    dataset = load_tokens(config.output, tokenizer=tokenizer, document_mask=True)
    assert dataset.vocab_size == dataset.tokenizer.vocab_size
    assert dataset.mask_separator == dataset.tokenizer.find_separator("")
    with pytest.raises(ValueError, match=r"`vocab_size` must be at least .*shards'"):
        load_tokens(config.output, vocab_size=256)
    with pytest.raises(ValueError, match="one tokenizer made, got different ones"):
        load_tokens(f"{config.output}=1, {folder}=1")
    other = str(hugging_face.save(tmp_path / "other.json", vocab_size=270))
    with pytest.raises(ValueError, match="another tokenizer's tokens, got .*other.jso"):
        load_tokens(config.output, tokenizer=other)
