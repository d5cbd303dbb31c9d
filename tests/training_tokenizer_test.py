import hashlib
import sys

import hugging_face
import numpy as np
import pytest

from mixprec.training import tokenizer


def test_bytes_are_tokens():
    found = tokenizer.load("")
    assert (found.vocab_size, found.identity) == (256, "bytes")
    encoded = found.encode(["aä", ""])
    assert [each.tolist() for each in encoded] == [[97, 195, 164], []]
    assert found.decode([97, 195, 164, 300, 98]) == "aä\ufffdb"
    assert found.find_separator("") == 0
    with pytest.raises(ValueError, match="`separator` must be empty without a token"):
        found.find_separator("</s>")


TEXTS = ["the first of many steps on the way", "größer 🙂\n\n", ""]


def test_a_file_gives_its_tokens_back(tmp_path):
    path = hugging_face.save(tmp_path / "tokenizer.json")
    found = tokenizer.load(str(path))
    encoded = found.encode(TEXTS)
    assert [found.decode(each.tolist()) for each in encoded] == TEXTS
    assert len(encoded[0]) < len(TEXTS[0])  # and not cut off after 5
    assert len(encoded[2]) == 0  # and not padded
    assert max(int(each.max()) for each in encoded[:2]) < found.vocab_size
    assert encoded[0].dtype == np.uint32
    assert found.identity == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_separator_is_found_by_its_usual_names_or_its_own(tmp_path):
    path = hugging_face.save(tmp_path / "a.json", special=("<pad>", "</s>", "<x>"))
    found = tokenizer.load(str(path))
    assert found.find_separator("") == 1
    assert found.find_separator("<x>") == 2
    with pytest.raises(ValueError, match=r"a token of .*a.json', got '<y>'"):
        found.find_separator("<y>")
    path = hugging_face.save(tmp_path / "b.json", special=())
    with pytest.raises(ValueError, match=r"got none of <\|endoftext\|>, .*--separator"):
        tokenizer.load(str(path)).find_separator("")


def test_a_text_that_spells_the_separator_does_not_end_a_document(tmp_path):
    found = tokenizer.load(str(hugging_face.save(tmp_path / "a.json")))
    (encoded,) = found.encode(["a<|endoftext|>b"])
    assert found.find_separator("") not in encoded
    assert found.decode(encoded.tolist()) == "a<|endoftext|>b"


@pytest.mark.parametrize("content", [b"{}", b"no json", b"\xff\xfe", b""])
def test_what_is_no_tokenizer_is_named(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match="`tokenizer` must be a JSON file .*a.json'"):
        tokenizer.load(str(tmp_path / "a.json"))


def test_a_file_that_does_not_exist_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(FileNotFoundError, match="`tokenizer` must be .*none.json"):
        tokenizer.load(str(tmp_path / "none.json"))


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match='pip install "mixprec.train."'):
        tokenizer.load(str(tmp_path / "a.json"))
