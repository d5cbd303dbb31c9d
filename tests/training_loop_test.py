import dataclasses
import io
import json

import layouts
import numpy as np
import pytest
import rich.console

import mixprec
import models
from mixprec.training import checkpoint, data, loop, sample, state

MODEL = models.TransformerConfig(
    vocab_size=256, num_layers=2, width=16, num_heads=2, num_kv_heads=1, mlp_width=24
)
POLICY = mixprec.Policy(
    params=(mixprec.Rule(".*", "stochastic"),),
    activations=(mixprec.Rule("layers/mlp", "stochastic"),),
)
OPTIMIZER = state.OptimizerConfig(
    learning_rate=1e-2,
    warmup_steps=3,
    final_fraction=0.1,
    b1=0.9,
    b2=0.95,
    epsilon=1e-8,
    weight_decay=0.1,
    clip_norm=1.0,
)


@pytest.fixture
def corpus(tmp_path):
    """Two files of English words in an order that depends on nothing."""
    folder = tmp_path / "text"
    folder.mkdir()
    words = "it is the first of many small steps to take on the way".split()
    generator = np.random.default_rng(0)
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text(" ".join(generator.choice(words, 1000)))
    return folder


def make_config(corpus, *, steps=12, layout=None, options=None, **train):
    loop_options = dict(
        steps=steps,
        microbatches=2,
        log_every=1,
        validate_every=5,
        validation_batches=2,
    )
    return loop.RunConfig(
        seed=1,
        dataset=data.load(
            data.DataConfig(
                path=str(corpus),
                sequence_length=16,
                batch_size=4,
                validation_fraction=0.5,
                **options or {},
            ),
            seed=1,
        ),
        optimizer=OPTIMIZER,
        train=loop.LoopConfig(**loop_options | train),
        layout=layout or layouts.make(),
        checkpoint=checkpoint.CheckpointConfig(every=4, keep_last=2, keep_best=1),
        sample=sample.SampleConfig(prompt="the", length=5, temperature=1.0),
        resolved={"model": {"width": 16}, "data": {"path": str(corpus)}, "seed": 1},
    )


def run(config, workdir, *, model=None):
    """Trains; gives the results, the printed text and the metrics."""
    console = rich.console.Console(file=io.StringIO(), width=120)
    if model is None:
        model = mixprec.wrap(models.build(MODEL), POLICY)
    results = loop.train(model, config, workdir, console)
    return results, console.file.getvalue(), read_metrics(workdir)


def read_metrics(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(metrics):
    return [
        (entry["step"], name, entry[name])
        for entry in metrics
        for name in ("loss", "gradient_norm", "val_loss")
        if name in entry
    ]


class InterruptionError(Exception):
    pass


def interrupt_at(monkeypatch, step):
    """Makes the run fail when it wants the batch of this step."""
    original = data.Dataset.train_iterator

    def train_iterator(self, *arguments, **options):
        iterator = original(self, *arguments, **options)
        batches = type(iterator).__next__

        class Failing(type(iterator)):
            def __next__(self):
                self.taken = getattr(self, "taken", 0) + 1
                if self.taken == step:
                    raise InterruptionError
                return batches(self)

        iterator.__class__ = Failing
        return iterator

    monkeypatch.setattr(data.Dataset, "train_iterator", train_iterator)


def test_training_learns_and_leaves_what_it_promises(corpus, tmp_path):
    workdir = tmp_path / "run"
    config = make_config(corpus, steps=200, log_every=50, validate_every=100)
    results, printed, metrics = run(config, workdir)

    assert results["val_loss"] < 0.9 * results["baseline_loss"]
    training = [entry for entry in metrics if "loss" in entry]
    assert [entry["step"] for entry in training] == [50, 100, 150, 200]
    for entry in training:
        assert entry["tokens_per_second"] > 0
        assert entry.keys() >= {"gradient_norm", "learning_rate"}
    validation = [entry for entry in metrics if "val_loss" in entry]
    assert [entry["step"] for entry in validation] == [100, 200]
    assert validation[-1]["val_loss"] == results["val_loss"]

    assert json.loads((workdir / "config.json").read_text()) == config.resolved
    assert list(workdir.glob("events.out.tfevents.*"))
    assert (workdir / "checkpoints" / "200").is_dir()
    assert f"validation loss {results['val_loss']:.4f}" in printed
    assert f"byte frequencies alone {results['baseline_loss']:.4f}" in printed
    assert "Total:" in printed  # the parameter table
    assert "\nthe" in printed  # the sample


def test_an_interrupted_and_resumed_run_gives_the_same_bits(
    corpus, tmp_path, monkeypatch
):
    config = make_config(corpus)
    _, _, expected = run(config, tmp_path / "whole")

    with monkeypatch.context() as patch:
        interrupt_at(patch, step=11)
        with pytest.raises(InterruptionError):
            run(config, tmp_path / "parts")
    assert max(entry["step"] for entry in read_metrics(tmp_path / "parts")) == 10
    results, printed, resumed = run(config, tmp_path / "parts")
    assert "resuming after step 8 of 12" in printed
    assert losses(resumed) == losses(expected)
    assert [entry["step"] for entry in resumed if "loss" in entry] == [*range(1, 13)]
    assert results["val_loss"] == expected[-1]["val_loss"]


def test_a_finished_run_is_measured_again_and_a_raised_number_of_steps_resumes(
    corpus, tmp_path
):
    first, _, _ = run(make_config(corpus, steps=4), tmp_path / "run")
    again, _, metrics = run(make_config(corpus, steps=4), tmp_path / "run")
    assert again == first
    assert [entry["step"] for entry in metrics if "loss" in entry] == [1, 2, 3, 4]
    _, printed, metrics = run(make_config(corpus, steps=6), tmp_path / "run")
    assert "resuming after step 4 of 6" in printed
    assert [entry["step"] for entry in metrics if "loss" in entry] == [*range(1, 7)]


def test_a_mixture_of_tokens_and_masked_documents_resumes_with_the_same_bits(
    corpus, tmp_path, monkeypatch
):
    shards = []
    for name in ("a", "b"):
        text = np.frombuffer((corpus / f"{name}.txt").read_bytes(), np.uint8)
        shards.append(tmp_path / f"{name}.bin")
        np.where(text == ord(" "), 7, text).astype("<u2").tofile(shards[-1])
    path = f"{shards[0]}=2, {shards[1]}=1"
    options = dict(document_mask=True, separator=7)
    config = make_config(path, options=options)
    _, printed, expected = run(config, tmp_path / "whole")
    assert "no sample: config.data.tokenizer is not set" in printed
    assert "nats a token; token frequencies alone" in printed
    _, _, unmasked = run(make_config(path), tmp_path / "unmasked")
    assert losses(unmasked)[0] != losses(expected)[0]
    with monkeypatch.context() as patch:
        interrupt_at(patch, step=11)
        with pytest.raises(InterruptionError):
            run(config, tmp_path / "parts")
    _, _, resumed = run(config, tmp_path / "parts")
    assert losses(resumed) == losses(expected)
    np.arange(200, dtype="<u2").tofile(shards[1])
    with pytest.raises(ValueError, match="data_fingerprint was"):
        run(make_config(path, options=options), tmp_path / "parts")


def test_fewer_steps_than_the_checkpoint_has_are_refused(corpus, tmp_path):
    run(make_config(corpus, steps=4), tmp_path / "run")
    with pytest.raises(ValueError, match=r"`steps` must be at least 4.*got 3"):
        run(make_config(corpus, steps=3), tmp_path / "run")


def test_another_model_or_other_data_are_refused(corpus, tmp_path):
    config = make_config(corpus, steps=4)
    run(config, tmp_path / "run")
    changed = dataclasses.replace(
        config, resolved=config.resolved | {"model": {"width": 32}}
    )
    with pytest.raises(ValueError, match="model.width was 16 and is 32"):
        run(changed, tmp_path / "run")
    with (corpus / "a.txt").open("a") as file:
        file.write(" more")
    with pytest.raises(ValueError, match="data_fingerprint was"):
        run(make_config(corpus, steps=4), tmp_path / "run")


def test_another_policy_is_allowed_and_told(corpus, tmp_path):
    config = make_config(corpus, steps=4)
    run(config, tmp_path / "run")
    changed = dataclasses.replace(
        make_config(corpus, steps=6), resolved=config.resolved | {"policy": "new"}
    )
    _, printed, _ = run(changed, tmp_path / "run")
    assert "changed since then: config.policy was None and is 'new'" in printed


def test_a_loss_that_is_not_finite_stops_the_run(corpus, tmp_path):
    config = make_config(corpus)
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(FloatingPointError, match="must be finite, got .* at step"):
        run(dataclasses.replace(config, optimizer=optimizer), tmp_path / "run")


def test_a_module_that_is_not_wrapped_trains_too(corpus, tmp_path):
    plain = models.build(MODEL)
    _, _, metrics = run(make_config(corpus, steps=2), tmp_path / "plain", model=plain)
    _, _, rounded = run(make_config(corpus, steps=2), tmp_path / "rounded")
    assert len(losses(metrics)) == len(losses(rounded))
    assert losses(metrics) != losses(rounded)


def test_no_checkpoint_is_saved_of_a_state_that_is_not_finite(corpus, tmp_path):
    config = make_config(corpus, log_every=12, validate_every=12)  # checkpoints each 4
    optimizer = dataclasses.replace(OPTIMIZER, learning_rate=1e30, warmup_steps=0)
    with pytest.raises(FloatingPointError, match="at step 4"):
        run(dataclasses.replace(config, optimizer=optimizer), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_a_workdir_that_is_a_file_is_named(corpus, tmp_path):
    (tmp_path / "run").write_text("")
    for workdir in (tmp_path / "run", tmp_path / "run" / "below"):
        with pytest.raises(OSError, match=rf"`workdir` must be a folder.*{workdir}"):
            run(make_config(corpus), workdir)


def test_options_out_of_range_are_refused(corpus):
    with pytest.raises(ValueError, match="`log_every` must be positive, got 0"):
        make_config(corpus, log_every=0)
    with pytest.raises(ValueError, match="`microbatches` must divide the batch, got 3"):
        make_config(corpus, microbatches=3)
    for seed in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"`seed` must be .*, got {seed}"):
            dataclasses.replace(make_config(corpus), seed=seed)
