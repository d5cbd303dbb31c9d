import hashlib

import pytest

from mixprec.training import fingerprint


def of(path, content):
    path.write_bytes(content)
    return fingerprint.of_file(path)


def test_a_small_file_is_hashed_whole(tmp_path):
    path = tmp_path / "a"
    content = bytes(range(256)) * 100
    size = len(content).to_bytes(8, "little")
    assert of(path, content) == hashlib.sha256(size + content).hexdigest()
    assert of(path, b"") != of(path, b"\0")


@pytest.mark.parametrize("change", ["first", "last", "size", "page"])
def test_of_a_large_file_ends_size_and_pages_count(tmp_path, change):
    path = tmp_path / "a"
    content = bytearray(3_000_000)
    before = of(path, content)
    if change == "first":
        content[0] = 1
    elif change == "last":
        content[-1] = 1
    elif change == "size":
        content += b"\0"
    else:  # pages are about 47,556 bytes apart
        content[1_000_000:1_050_000] = b"\1" * 50_000
    assert of(path, content) != before


def test_what_misses_the_pages_of_a_large_file_goes_unnoticed(tmp_path):
    path = tmp_path / "a"
    content = bytearray(3_000_000)
    before = of(path, content)
    content[10_000] = 1  # between the first two pages, as the docstring says
    assert of(path, content) == before


def test_parts_are_told_apart():
    assert fingerprint.of_parts(["ab", "c"]) != fingerprint.of_parts(["a", "bc"])
    assert fingerprint.of_parts(["ab"]) == fingerprint.of_parts(["ab"])
    assert fingerprint.of_parts([]) != fingerprint.of_parts([""])
