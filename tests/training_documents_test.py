import json

import pytest

from mixprec.training import text
from mixprec.training.documents import SIDES, Documents


def lines_of(path, texts):
    path.write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    return path


def texts(documents, side, file=0, offset=0):
    return [d.text for d in documents.of_side(side, file, offset)]


def test_files_are_documents_split_by_a_hash_of_their_paths(tmp_path):
    names = [f"{n % 3}/{n}.txt" for n in range(20)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    (tmp_path / "0/empty.txt").write_text("")
    documents = Documents((str(tmp_path),), 0.3)
    for side, is_below in (("train", False), ("validation", True)):
        expected = [n for n in sorted(names) if (text.share(n) < 0.3) == is_below]
        assert texts(documents, side) == [f"text of {name}" for name in expected]
        assert expected
    assert documents.size == sum(len(f"text of {name}") for name in names)
    # The same files, named otherwise.
    globs = tuple(str(tmp_path / f"{n}" / "*.txt") for n in (2, 0, 1))
    again = Documents(globs, 0.3)
    assert again.fingerprint == documents.fingerprint
    assert texts(again, "train") == texts(documents, "train")


def test_a_single_text_is_cut(tmp_path):
    (tmp_path / "a.txt").write_text("größer" * 10)
    documents = Documents((str(tmp_path / "a.txt"),), 0.25)
    (train,), (validation,) = (texts(documents, side) for side in SIDES)
    assert train + validation == "größer" * 10
    assert len(validation) == 15


def test_lines_of_json_are_documents_of_either_side_and_can_be_entered_anywhere(
    tmp_path,
):
    expected = [f"line {n}\nof größer" for n in range(200)]
    documents = Documents((str(lines_of(tmp_path / "a.jsonl", expected)),), 0.2)
    sides = {side: list(documents.of_side(side, 0, 0)) for side in SIDES}
    both = sorted(
        (d.offset, d.text) for side_documents in sides.values() for d in side_documents
    )
    assert [content for _, content in both] == expected
    # A binomial's 4 standard deviations: 23.
    assert 17 <= len(sides["validation"]) <= 63
    for document in sides["train"]:
        assert text.share(f"a.jsonl:{document.offset}") >= 0.2
    assert sum(d.size for ds in sides.values() for d in ds) == documents.size
    place = sides["train"][70]
    assert list(documents.of_side("train", 0, place.offset)) == sides["train"][70:]


def test_empty_lines_and_halves_of_surrogate_pairs_are_dealt_with(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"text": "a\\ud800b"}\n  \n{"text": "c"}')
    documents = Documents((str(path),), 1e-9)
    assert texts(documents, "train") == ["a?b", "c"]


@pytest.mark.parametrize("line", ["no json", '{"txt": "a"}', "[1]", '{"text": 1}', "3"])
def test_a_line_that_is_no_document_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' + line + "\n")
    with pytest.raises(ValueError, match='a.jsonl\' must .*"text".* at byte 14'):
        texts(Documents((str(path),), 1e-9), "train")


def test_the_fingerprint_knows_contents_and_names(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    first = Documents((str(path),), 0.1).fingerprint
    path.write_text("two")
    second = Documents((str(path),), 0.1).fingerprint
    path.rename(tmp_path / "b.txt")
    third = Documents((str(tmp_path / "b.txt"),), 0.1).fingerprint
    assert len({first, second, third}) == 3
