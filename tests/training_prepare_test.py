import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import hugging_face
import numpy as np
import pytest
import rich.console

from mixprec.training import prepare, shards

ROOT = pathlib.Path(__file__).resolve().parents[1]
FRACTION = 0.3


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    words = hugging_face.WORDS.split()
    generator = np.random.default_rng(0)
    for number in range(12):
        content = " ".join(generator.choice(words, 200))
        (folder / f"{number}.txt").write_text(content)
    lines = [{"text": " ".join(generator.choice(words, 30))} for _ in range(40)]
    (folder / "more.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def run(texts, output, **options):
    console = rich.console.Console(file=io.StringIO(), width=200)
    config = prepare.PrepareConfig(
        inputs=(str(texts),),
        output=output,
        **dict(shard_tokens=1000, validation_fraction=FRACTION) | options,
    )
    prepare.prepare(config, console)
    return console.file.getvalue()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stream(folder, side):
    """All tokens of one side, read by NumPy alone."""
    files = sorted(folder.glob(f"{side}_*.bin"))
    parts = []
    for path in files:
        header = np.fromfile(path, "<i4", 256)
        dtype = {20240520: "<u2", 20240801: "<u4"}[header[0]]
        parts.append(np.fromfile(path, dtype, offset=1024))
        assert len(parts[-1]) == header[2]
    assert {len(part) for part in parts[:-1]} <= {1000}
    return np.concatenate(parts)


def test_bytes_come_back_as_they_were(texts, tmp_path):
    printed = run(texts, tmp_path / "out")
    found = {}
    for side in ("train", "validation"):
        tokens = stream(tmp_path / "out", side)
        documents = bytes(tokens.astype(np.uint8)).split(b"\0")
        assert documents.pop() == b""  # each ends with the separator
        found[side] = documents
    expected = [path.read_bytes() for path in texts.glob("*.txt")]
    lines = (texts / "more.jsonl").read_text().splitlines()
    expected += [json.loads(line)["text"].encode() for line in lines]
    assert sorted(found["train"] + found["validation"]) == sorted(expected)
    meta = json.loads((tmp_path / "out" / "shards.json").read_text())
    for side, documents in found.items():
        assert meta[side]["documents"] == len(documents)
        assert meta[side]["tokens"] == sum(len(d) + 1 for d in documents)
        assert f"{side}: {len(documents)} documents" in printed
    assert not list((tmp_path / "out").glob("*.tmp"))
    assert not (tmp_path / "out" / "progress.json").exists()


def test_tokens_are_those_of_the_tokenizer(texts, tmp_path):
    path = hugging_face.save(tmp_path / "tokenizer.json")
    run(texts, tmp_path / "out", tokenizer=str(path))
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    separator = tokenizer.token_to_id("<|endoftext|>")
    decoded = set()
    for side in ("train", "validation"):
        tokens = stream(tmp_path / "out", side)
        ends = np.flatnonzero(tokens == separator)
        for document in np.split(tokens, ends + 1)[:-1]:
            decoded.add(tokenizer.decode(document[:-1].tolist()))
    assert decoded >= {path.read_text() for path in texts.glob("*.txt")}
    meta = shards.read_meta(tmp_path / "out")
    assert meta.separator == separator
    assert meta.vocab_size == tokenizer.get_vocab_size()


def test_shards_do_not_depend_on_their_size(texts, tmp_path):
    run(texts, tmp_path / "a", shard_tokens=10**6)
    run(texts, tmp_path / "b", shard_tokens=1000)
    whole = shards.read(tmp_path / "a" / "train_000000.bin")
    np.testing.assert_array_equal(whole, stream(tmp_path / "b", "train"))


def test_a_shard_that_ends_with_a_document_is_followed_by_no_empty_one(tmp_path):
    for name, size in (("b", 99), ("c", 99), ("d", 49)):
        (tmp_path / f"{name}.txt").write_text("x" * size)
    output = tmp_path / "out"
    inputs = tuple(str(tmp_path / f"{name}.txt") for name in "bcd")
    config = prepare.PrepareConfig(
        inputs=inputs, output=output, shard_tokens=50, validation_fraction=1e-9
    )
    prepare.prepare(config, rich.console.Console(file=io.StringIO()))
    sizes = [len(shards.read(path)) for path in sorted(output.glob("*.bin"))]
    assert sizes == [50] * 5


class InterruptionError(Exception):
    pass


@pytest.mark.parametrize("size", [1000, 200, 201])
def test_interrupted_at_every_write_and_rerun_it_gives_the_same_bytes(
    texts, tmp_path, monkeypatch, size
):
    run(texts, tmp_path / "whole", shard_tokens=size)
    expected = contents(tmp_path / "whole")
    output = tmp_path / "parts"
    replace = shards.replace
    allowed = writes = 0

    def failing(path, *parts):
        """Fails before the second write of a run, leaving half of it behind."""
        nonlocal writes
        writes += 1
        if writes > allowed:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            raise InterruptionError
        replace(path, *parts)

    monkeypatch.setattr(shards, "replace", failing)
    for _ in range(1000):
        # Progress is written first: so each run adds one shard, or its progress.
        allowed, writes = (2, 0) if allowed != 2 else (3, 0)
        try:
            run(texts, output, shard_tokens=size)
        except InterruptionError:
            continue
        break
    assert contents(output) == expected


def command(texts, output):
    return [
        *(sys.executable, "-m", "mixprec.training.prepare", "--input", str(texts)),
        *("--output", str(output), "--shard_tokens", "300"),
        *("--validation_fraction", str(FRACTION)),
    ]


def test_killed_and_rerun_it_gives_the_same_bytes(texts, tmp_path):
    options = dict(cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    environment = os.environ | {"PYTHONHASHSEED": "1"}
    subprocess.run(command(texts, whole), env=environment, check=True, **options)
    expected = contents(whole)
    generator = np.random.default_rng()
    most = len(expected)
    for wanted in sorted(generator.integers(0, most, 4).tolist()):
        process = subprocess.Popen(command(texts, parts), **options)
        while process.poll() is None and (
            not parts.exists() or len(list(parts.glob("*.bin"))) < wanted
        ):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    subprocess.run(command(texts, parts), check=True, **options)
    assert contents(parts) == expected


def test_what_is_complete_is_not_written_again(texts, tmp_path, monkeypatch):
    run(texts, tmp_path / "out")
    monkeypatch.setattr(shards, "replace", None)
    assert "out is complete" in run(texts, tmp_path / "out")


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_a_damaged_shard_is_written_again(texts, tmp_path, damage):
    output = tmp_path / "out"
    run(texts, output)
    expected = contents(output)
    path = output / "train_000001.bin"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"\1")
    run(texts, output)
    assert contents(output) == expected


def test_another_input_tokenizer_or_option_is_refused(texts, tmp_path):
    output = tmp_path / "out"
    run(texts, output)
    before = contents(output)
    with pytest.raises(ValueError, match="begun with the same.*another shard_tokens"):
        run(texts, output, shard_tokens=999)
    path = hugging_face.save(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="another tokenizer, another vocab_size"):
        run(texts, output, tokenizer=str(path))
    (texts / "0.txt").write_text("other")
    with pytest.raises(ValueError, match="another input. Choose another --output"):
        run(texts, output)
    assert contents(output) == before


def test_a_folder_with_other_files_is_refused(texts, tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="`output` must be empty.*thesis.tex"):
        run(texts, tmp_path)
    with pytest.raises(ValueError, match="`output` must lie outside the input"):
        run(texts, texts / "out")


def test_a_side_without_documents_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="must give validation at least one document"):
        run(tmp_path / "a.jsonl", tmp_path / "out", validation_fraction=1e-9)


@pytest.mark.parametrize(
    ("option", "value"),
    [("shard_tokens", 0), ("shard_tokens", 2**31), ("validation_fraction", 1.0)],
)
def test_bad_options_are_refused(tmp_path, option, value):
    with pytest.raises(ValueError, match=f"`{option}` must .*Correct --{option}"):
        run(tmp_path, tmp_path / "out", **{option: value})


def test_the_command_line_names_what_is_wrong_in_one_line(tmp_path):
    with pytest.raises(SystemExit, match="prepare: .*nothing' must be a text file"):
        prepare.main(["--input", f"{tmp_path}/nothing", "--output", f"{tmp_path}/out"])
    with pytest.raises(SystemExit):
        prepare.main(["--input"])
    config = prepare.parse_arguments(["--input", "a", "b", "--output", "c"])
    assert config == prepare.PrepareConfig(inputs=("a", "b"), output=pathlib.Path("c"))
