import pytest

from mixprec.training import mixture


def parsed(text):
    return [(part.path, part.weight) for part in mixture.parse(text)]


@pytest.mark.parametrize(
    "path",
    [
        "stdlib",
        "a/b.bin",
        "a,b.txt",
        "run=3/x.txt",
        "a=b,c=d",
        "*.bin",
        "~/x y.txt",
        "",
    ],
)
def test_a_path_alone_is_no_mixture(path):
    assert parsed(path) == [(path, 1.0)]


def test_weights_become_shares():
    assert parsed("a.bin=3, b/*.bin=1") == [("a.bin", 0.75), ("b/*.bin", 0.25)]
    assert parsed(" a = 0.5 ,b=0.5") == [("a", 0.5), ("b", 0.5)]
    assert parsed("run=3/x=2,stdlib=2e0") == [("run=3/x", 0.5), ("stdlib", 0.5)]
    assert parsed("a=0.2") == [("a", 1.0)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=0.5, b", "each part of a mixture as path=weight, got 'b'"),
        ("a=heavy, b=1", "as path=weight, got 'a=heavy'"),
        ("a=0.5, =1", "as path=weight, got '=1'"),
        ("a=0.5,", "as path=weight, got ''"),
        ("a=0, b=1", "positive, finite weight, got 0 for 'a'"),
        ("a=-1, b=1", "positive, finite weight, got -1 for 'a'"),
        ("a=nan, b=1", "positive, finite weight, got nan for 'a'"),
        ("a=1, b=inf", "positive, finite weight, got inf for 'b'"),
        ("a=1, a=2", "once, got 'a' twice"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        mixture.parse(text)
