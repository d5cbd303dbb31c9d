import io
import struct

import numpy as np
import pytest
import rich.console
from array_record.python import array_record_module

from mixprec.training import corpus, prepare


def load(path, *, vocab_size=50257, **options):
    defaults = dict(validation_fraction=0.3, token_dtype="uint16")
    return corpus.load(str(path), vocab_size=vocab_size, **defaults | options)


def write_bin(path, tokens):
    header = struct.pack("<3i", 20240520, 1, len(tokens)).ljust(1024, b"\0")
    path.write_bytes(header + np.asarray(tokens, "<u2").tobytes())
    return path


def write_records(path, rows):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(np.asarray(row, "<u2").tobytes())
    writer.close()
    return path


def contents(rows):
    return [row.sample(10**6).tolist() for row in rows]


def prepared(folder):
    (folder / "texts").mkdir()
    for number in range(9):
        (folder / "texts" / f"{number}.txt").write_text("some text " * 20)
    config = prepare.PrepareConfig(
        inputs=(str(folder / "texts"),),
        output=folder / "shards",
        shard_tokens=300,
        validation_fraction=0.2,
    )
    prepare.prepare(config, rich.console.Console(file=io.StringIO()))
    return folder / "shards"


def test_a_single_file_is_split_at_its_end(tmp_path):
    found = load(write_bin(tmp_path / "a.bin", range(100)))
    assert contents(found.train) == [[*range(70)]]
    assert contents(found.validation) == [[*range(70, 100)]]
    assert (found.unit, found.files) == ("token", 1)
    assert found.tokenizer is found.vocab_size is found.separator is None
    assert "1 files, 70 tokens for training, 30 for validation" in found.description


@pytest.mark.parametrize(
    "names",
    [
        ("train.bin", "val.bin"),
        ("web_train_000001.bin", "web_val_000000.bin"),
        ("train_000000.bin", "validation_000000.bin"),
        ("valley_interval.bin", "VALID-0.bin"),
    ],
)
def test_names_tell_what_is_for_validation(tmp_path, names):
    for number, name in enumerate(names):
        write_bin(tmp_path / name, range(100 * number, 100 * number + 9))
    (tmp_path / "meta.pkl").write_bytes(b"\x80")  # as nanoGPT leaves it there
    found = load(tmp_path)
    assert contents(found.train) == [[*range(9)]]
    assert contents(found.validation) == [[*range(100, 109)]]


def test_without_such_names_files_are_split_by_a_hash(tmp_path):
    for number in range(20):
        write_bin(tmp_path / f"{number}.bin", [number] * 9)
    found = load(tmp_path / "*.bin")
    assert len(found.train) + len(found.validation) == 20
    assert 1 <= len(found.validation) <= 12
    one_less = tmp_path / f"{contents(found.train)[0][0]}.bin"
    one_less.unlink()
    assert contents(load(tmp_path).validation) == contents(found.validation)


def test_array_record_is_read(tmp_path):
    rows = [[number] * 8 for number in range(10)]
    found = load(write_records(tmp_path / "a.array_record", rows))
    assert contents(found.train) == [[n for n in range(7) for _ in range(8)]]
    assert contents(found.validation) == [[n for n in range(7, 10) for _ in range(8)]]


def test_kinds_are_not_mixed(tmp_path):
    write_records(tmp_path / "a.array_record", [[1] * 8])
    write_bin(tmp_path / "b.bin", [1] * 8)
    with pytest.raises(ValueError, match="one kind, got .array_record and .bin"):
        load(tmp_path)


def test_what_prepare_wrote_is_known(tmp_path):
    found = load(prepared(tmp_path))
    assert (found.tokenizer, found.vocab_size, found.separator) == ("bytes", 256, 0)
    assert "named for validation" in found.description


def test_shards_that_are_not_as_listed_are_named(tmp_path):
    folder = prepared(tmp_path)
    (folder / "train_000001.bin").rename(tmp_path / "aside.bin")
    with pytest.raises(ValueError, match="train_000001.bin is absent"):
        load(folder)
    load(folder / "*.bin")
    write_bin(folder / "train_000001.bin", range(5))
    with pytest.raises(ValueError, match="has 5 tokens and is listed with 300"):
        load(folder)
    (tmp_path / "aside.bin").rename(folder / "train_000001.bin")
    write_bin(folder / "other.bin", range(5))
    with pytest.raises(ValueError, match="other.bin' must .* is not listed"):
        load(folder)


def test_several_folders_of_shards_are_refused(tmp_path):
    prepared(tmp_path)
    (tmp_path / "more").mkdir()
    write_bin(tmp_path / "more" / "a.bin", range(5))
    with pytest.raises(ValueError, match="one folder, .* got 2 folders. Mix them"):
        load(tmp_path / "*" / "*.bin")


def test_a_token_above_the_vocabulary_shows_when_windows_are_probed(tmp_path):
    tokens = [5] * 10_000
    tokens[7_000] = 300
    found = load(write_bin(tmp_path / "a.bin", tokens), vocab_size=256)
    corpus.probe(found.train, 8)
    with pytest.raises(ValueError, match="a.bin' must .* 256, got 300 at token 7,000"):
        corpus.probe(found.validation, 3)
    corpus.probe((), 3)


def test_bytes_need_their_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("a" * 100)
    with pytest.raises(ValueError, match="`vocab_size` must be at least 256.*got 255"):
        load(tmp_path / "a.txt", vocab_size=255)


def test_the_fingerprint_knows_tokens_names_and_split(tmp_path):
    path = write_bin(tmp_path / "a.bin", range(100))
    prints = [load(path).fingerprint]
    assert load(path).fingerprint == prints[0]
    prints.append(load(path, validation_fraction=0.4).fingerprint)
    write_bin(path, [*range(99), 0])
    prints.append(load(path).fingerprint)
    path.rename(tmp_path / "b.bin")
    prints.append(load(tmp_path / "b.bin").fingerprint)
    assert len(set(prints)) == 4
