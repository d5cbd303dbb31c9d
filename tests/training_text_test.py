import hashlib
import sys

import pytest

from mixprec.training import text


def test_the_share_of_a_name_is_its_hash():
    digest = hashlib.sha256(b"deep/1.txt").hexdigest()
    assert text.share("deep/1.txt") == int(digest[:16], 16) / 16**16
    shares = [text.share(str(number)) for number in range(1000)]
    # Uniform: 4 standard deviations of a mean of 1000 are 0.037.
    assert abs(sum(shares) / 1000 - 0.5) < 0.037


def test_names_are_split_by_their_shares_and_one_at_least_is_for_validation():
    names = [str(number) for number in range(100)]
    train, validation = text.split_names(names, 0.2)
    assert validation == [name for name in names if text.share(name) < 0.2]
    assert train == [name for name in names if text.share(name) >= 0.2]
    train, validation = text.split_names(names, 1e-9)
    assert validation == [min(names, key=text.share)]
    assert len(train) == 99


def test_files_are_found_in_a_fixed_order_without_hidden_ones(tmp_path):
    for name in ("b.txt", "a/z.txt", "B.txt", ".git/x", "a/.y"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    root, files = text.find(str(tmp_path))
    assert root == tmp_path
    names = [file.relative_to(root).as_posix() for file in files]
    assert names == ["B.txt", "a/z.txt", "b.txt"]
    root, files = text.find(str(tmp_path / "*" / "*.txt"))
    assert [file.relative_to(root).as_posix() for file in files] == ["a/z.txt"]
    with pytest.raises(FileNotFoundError, match="must match a text file"):
        text.find(str(tmp_path / "*.nothing"))


def test_text_that_is_not_utf8_is_named_with_its_place(tmp_path):
    (tmp_path / "a").write_bytes("größer".encode("latin-1"))
    with pytest.raises(ValueError, match="a' must be UTF-8 text, got byte 0xf6 at 2"):
        text.read(tmp_path / "a")


def test_descriptions():
    assert text.describe("a/b") == "a/b"
    version = ".".join(map(str, sys.version_info[:3]))
    assert version in text.describe("stdlib")
