import flax.linen as nn
import hugging_face
import jax
import jax.numpy as jnp
import pytest

from mixprec.training import sample, tokenizer


class Successor(nn.Module):
    """Gives byte + 1 the highest logit, and byte + 2 one lower by 1."""

    @nn.compact
    def __call__(self, tokens):
        scale = self.param("scale", nn.initializers.ones_init(), ())
        one = jax.nn.one_hot(tokens + 1, 256)
        two = jax.nn.one_hot(tokens + 2, 256)
        return scale * (101 * one + 100 * two)


PARAMS = {"scale": jnp.float32(1)}


def test_temperature_0_takes_the_likeliest_byte_each_time():
    config = sample.SampleConfig(prompt="xab", length=4, temperature=0.0)
    assert sample.generate(Successor(), PARAMS, config, seed=0) == "xabcdef"


def test_draws_depend_on_the_seed_alone_and_follow_the_logits():
    config = sample.SampleConfig(prompt="\x00", length=50, temperature=1.0)
    texts = [sample.generate(Successor(), PARAMS, config, seed=s) for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    moves = [ord(b) - ord(a) for a, b in zip(texts[0], texts[0][1:], strict=False)]
    assert set(moves) == {1, 2}
    # P(1) = e / (1 + e) = 0.731; 13.4 expected of moves by 2, 4 sigma = 12.5.
    assert abs(moves.count(2) - 13.4) < 12.5


def test_low_temperature_sharpens():
    config = sample.SampleConfig(prompt="\x00", length=50, temperature=0.01)
    text = sample.generate(Successor(), PARAMS, config, seed=0)
    assert text == "".join(map(chr, range(51)))


def test_bytes_that_are_not_utf8_are_replaced():
    config = sample.SampleConfig(prompt="\x7f", length=1, temperature=0.0)
    assert sample.generate(Successor(), PARAMS, config, seed=0) == "\x7f\ufffd"


def test_tokens_are_decoded(tmp_path):
    path = hugging_face.save(tmp_path / "tokenizer.json")
    found = tokenizer.load(str(path))
    config = sample.SampleConfig(prompt="the first of", length=3, temperature=0.0)
    text = sample.generate(Last(), PARAMS, config, seed=0, tokenizer=found)
    assert text == "the first of" + 3 * " of"


class Last(nn.Module):
    """Gives the token itself the highest logit."""

    @nn.compact
    def __call__(self, tokens):
        scale = self.param("scale", nn.initializers.ones_init(), ())
        return scale * jax.nn.one_hot(tokens, 320)


class NothingTokenizer(tokenizer.ByteTokenizer):
    def encode(self, texts):
        return super().encode([""] * len(texts))


def test_a_prompt_without_tokens_is_named():
    config = sample.SampleConfig(prompt=" ", length=3, temperature=0.0)
    with pytest.raises(ValueError, match="`prompt` must give at least one token, got"):
        sample.generate(
            Successor(), PARAMS, config, seed=0, tokenizer=NothingTokenizer()
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": ""}, "`prompt` must not be empty"),
        ({"length": -1}, "`length` must be at least 0, got -1"),
        ({"temperature": -0.5}, "`temperature` must be at least 0, got -0.5"),
    ],
)
def test_bad_options_are_refused(changes, message):
    options = {"prompt": "a", "length": 1, "temperature": 1.0} | changes
    with pytest.raises(ValueError, match=message):
        sample.SampleConfig(**options)
