import numpy as np
import pytest
from array_record.python import array_record_module

from mixprec.training import records, tokens


def write(path, rows, dtype="<u2"):
    writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(np.asarray(row, dtype).tobytes())
    writer.close()
    return path


def read(path, dtype="uint16", vocab_size=2**16):
    return records.read(path, dtype=dtype, vocab_size=vocab_size)


def flat(rows):
    return [token for row in rows for token in row]


ROWS = [list(range(100 * i, 100 * i + 10)) for i in range(1, 6)]


@pytest.mark.parametrize(("dtype", "little"), [("uint16", "<u2"), ("uint32", "<u4")])
def test_windows_are_those_of_each_record(tmp_path, dtype, little):
    row = read(write(tmp_path / "a.array_record", ROWS, little), dtype)
    assert len(row) == 50
    windows = tokens.Windows([row], 4)
    expected = [r[i : i + 5] for r in ROWS for i in (0, 4)]
    assert [windows[place].tolist() for place in range(len(windows))] == expected
    assert windows[0].dtype == np.int32
    assert row.sample(1000).tolist() == flat(ROWS)
    assert row.sample(11).tolist() == ROWS[0] + ROWS[-1]


def test_a_split_is_by_records(tmp_path):
    train, validation = read(write(tmp_path / "a.array_record", ROWS)).split(0.3)
    assert train.sample(1000).tolist() == flat(ROWS[:3])
    assert validation.sample(1000).tolist() == flat(ROWS[3:])
    assert validation.window(2, 4).tolist() == ROWS[4][:5]


def test_a_token_above_the_vocabulary_is_named_with_its_place(tmp_path):
    row = read(write(tmp_path / "a.array_record", ROWS), vocab_size=505)
    assert row.window(7, 4).tolist() == ROWS[3][4:9]
    with pytest.raises(ValueError, match="a.array_record' .* got 505 at token 45"):
        row.window(8, 4)


def test_records_of_unequal_length_are_named(tmp_path):
    row = read(write(tmp_path / "a.array_record", [[1] * 10, [2] * 11]))
    with pytest.raises(ValueError, match="20 bytes as the first, got 22 in record 1"):
        row.window(3, 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "got 0 records"),
        ([[]], "got 1 records, 0 bytes in the first"),
    ],
)
def test_files_without_tokens_are_named(tmp_path, rows, message):
    with pytest.raises(ValueError, match=message):
        read(write(tmp_path / "a.array_record", rows))


def test_the_wrong_dtype_is_named(tmp_path):
    path = write(tmp_path / "a.array_record", [range(1, 20)], "<u4")
    with pytest.raises(ValueError, match="it seems to hold uint32"):
        read(path)
    path = write(tmp_path / "b.array_record", [range(1, 20)])
    with pytest.raises(ValueError, match=r"tokens of 4 bytes \(uint32\), got 1 record"):
        read(path, "uint32")


def test_what_is_no_array_record_is_named(tmp_path):
    path = write(tmp_path / "a.array_record", ROWS)
    good = path.read_bytes()
    broken = bytearray(good)
    broken[100] ^= 0xFF
    for content in (b"", b"text", good[: len(good) // 2], good[:-10], bytes(broken)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="a.array_record' must be a.*ArrayRecord"):
            read(path)
