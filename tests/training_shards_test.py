import json
import struct

import numpy as np
import pytest

from mixprec.training import shards

TOKENS = [1, 50256, 7, 3, 65535, 0, 9]


def by_hand(magic, version, tokens, letter, claimed=None):
    """A file of llm.c, byte by byte."""
    claimed = len(tokens) if claimed is None else claimed
    header = struct.pack("<3i", magic, version, claimed).ljust(1024, b"\0")
    return header + struct.pack(f"<{len(tokens)}{letter}", *tokens)


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "tokens.bin"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(
    ("magic", "version", "letter", "tokens"),
    [(20240520, 1, "H", TOKENS), (20240801, 7, "I", [*TOKENS, 128_255, 2**32 - 1])],
)
def test_files_of_llm_c_are_read_and_written(tmp_path, magic, version, letter, tokens):
    content = by_hand(magic, version, tokens, letter)
    path = tmp_path / "a.bin"
    path.write_bytes(content)
    read = shards.read(path)
    assert isinstance(read, np.memmap)  # not in memory
    assert not read.flags.writeable
    assert read.tolist() == tokens
    assert read.dtype == {"H": np.uint16, "I": np.uint32}[letter]
    shards.write(tmp_path / "b.bin", np.asarray(tokens, read.dtype))
    assert (tmp_path / "b.bin").read_bytes() == content
    assert not list(tmp_path.glob("*.tmp"))


def test_files_of_nanogpt_are_read(file):
    path = file(struct.pack("<7H", *TOKENS))
    read = shards.read(path)
    assert isinstance(read, np.memmap)
    assert read.tolist() == TOKENS
    path = file(struct.pack("<3I", 70_000, 2, 3))
    assert shards.read(path, bare_dtype="uint32").tolist() == [70_000, 2, 3]


def test_a_shard_without_tokens_is_empty(file):
    assert shards.read(file(by_hand(20240520, 1, [], "H"))).tolist() == []


GOOD = by_hand(20240520, 1, TOKENS, "H")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], "have 1,038 bytes for the 7 tokens of its header, got 1,037"),
        (GOOD + b"\0\0", "for the 7 tokens of its header, got 1,040"),
        (GOOD[:1000], "a header of 1,024 bytes, got 1,000: it was cut off"),
        (GOOD[:4], "a header of 1,024 bytes, got 4"),
        (by_hand(20240520, 1, TOKENS, "H", claimed=-1), "the -1 tokens of its header"),
        (by_hand(20240520, 1, TOKENS, "H", claimed=2**30), "1,073,741,824 tokens"),
        (by_hand(20240520, 2, TOKENS, "H"), "have version 1.*got 2"),
        (by_hand(20240801, 1, TOKENS, "I"), "have version 7.*got 1"),
        (by_hand(20240326, 3, TOKENS, "H"), "magic number 20240520 or 20240801.*326"),
        (by_hand(20240522, 1, TOKENS, "H"), "got a header with 20240522"),
        (by_hand(12345, 1, TOKENS, "H"), "got a header with 12345"),
        (struct.pack(">3i", 20240520, 1, 7).ljust(1024, b"\0") + b"\1\2", "little-end"),
        (b"", "tokens of 2 bytes .*got 0 bytes"),
        (b"\1", "tokens of 2 bytes .*got 1 bytes"),
        (b"\1\2\3", "config.data.token_dtype"),
        (struct.pack("<20I", *range(1, 21)), "it seems to hold uint32"),
    ],
)
def test_what_is_no_file_of_tokens_is_named(file, content, message):
    with pytest.raises(ValueError, match=f"tokens.bin' must .*{message}"):
        shards.read(file(content))


def test_no_header_that_was_tampered_with_is_believed(file):
    """A header is read as written or refused, whatever happens to its 12 bytes."""
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        content = bytearray(GOOD)
        for place in generator.integers(0, 12, generator.integers(1, 4)):
            content[place] ^= generator.integers(1, 256)
        if generator.random() < 0.3:
            content = content[: generator.integers(4, len(content))]
        if content == GOOD:
            continue
        try:
            read = shards.read(file(bytes(content)))
        except ValueError:
            refused += 1
        else:  # cut so short that no header shows: plain tokens
            assert len(content) < 1024
            np.testing.assert_array_equal(read, np.frombuffer(content, "<u2"))
    assert refused > 200


def test_the_smallest_dtype_is_taken():
    assert shards.dtype_for(256) == shards.dtype_for(2**16) == "uint16"
    assert shards.dtype_for(2**16 + 1) == "uint32"


FIELDS = {
    "tokenizer": "bytes",
    "vocab_size": 256,
    "separator": 0,
    "train": {"shards": [{"file": "train_000000.bin", "tokens": 7}]},
    "validation": {"shards": []},
}


def test_meta_is_read_again_and_checked(tmp_path):
    assert shards.read_meta(tmp_path) is None
    shards.replace(tmp_path / shards.META_FILE, shards.to_json(FIELDS))
    meta = shards.read_meta(tmp_path)
    assert meta == shards.Meta(
        tokenizer="bytes", vocab_size=256, separator=0, tokens={"train_000000.bin": 7}
    )
    shards.check_listed(tmp_path / "train_000000.bin", 7, meta)
    with pytest.raises(ValueError, match="has 6 tokens and is listed with 7 tokens"):
        shards.check_listed(tmp_path / "train_000000.bin", 6, meta)
    with pytest.raises(ValueError, match="is not listed"):
        shards.check_listed(tmp_path / "other.bin", 7, meta)


def test_what_others_wrote_under_its_name_is_left_alone(tmp_path):
    for content in (b"[1]", b"no json", b"\xff", json.dumps(FIELDS).encode()):
        (tmp_path / shards.META_FILE).write_bytes(content)
        assert shards.read_meta(tmp_path) is None


def test_shards_that_are_not_finished_are_refused(tmp_path):
    shards.replace(tmp_path / shards.PROGRESS_FILE, shards.to_json(FIELDS))
    with pytest.raises(ValueError, match="they are not finished. Run the command"):
        shards.read_meta(tmp_path)
