"""The command line as a user has it: in processes of their own."""

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

ROOT = pathlib.Path(__file__).resolve().parents[1]
TINY = {
    "data.sequence_length": 16,
    "data.batch_size": 4,
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.mlp_width": 24,
    "train.steps": 300,
    "train.microbatches": 2,
    "train.log_every": 1,
    "train.validate_every": 100,
    "train.validation_batches": 2,
    "checkpoint.every": 20,
    "sample.length": 5,
}


def command(*arguments, config="configs/small.py", options=None):
    overrides = [f"--config.{key}={value}" for key, value in (options or {}).items()]
    script = str(ROOT / "train.py")
    return [sys.executable, script, "--config", config, *overrides, *arguments]


def environment(devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {"XLA_FLAGS": flags}


def run(command, cwd, *, devices=1):
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment(devices),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def tiny(corpus, workdir, **changes):
    options = TINY | {"data.path": corpus} | changes
    return command("--workdir", str(workdir), options=options)


def metrics(workdir):
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def without_speed(entries):
    dropped = "tokens_per_second"
    return [{k: v for k, v in entry.items() if k != dropped} for entry in entries]


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(0)
    words = "it is the first of many small steps to take on the way".split()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(generator.choice(words, 2000)))
    return path


def test_killed_and_run_again_from_another_folder_it_gives_the_same_losses(
    corpus, tmp_path
):
    whole = run(tiny(corpus, tmp_path / "whole"), tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert "byte frequencies alone" in whole.stdout
    assert "stochastic" in whole.stdout  # the rounding table

    interrupted = subprocess.Popen(
        tiny(corpus, tmp_path / "parts"),
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # Long after a checkpoint, and between two of them.
    while not (tmp_path / "parts" / "metrics.jsonl").exists() or not any(
        entry["step"] >= 75 for entry in metrics(tmp_path / "parts")
    ):
        assert interrupted.poll() is None
        time.sleep(0.001)
    interrupted.send_signal(signal.SIGKILL)
    interrupted.wait()
    reached = metrics(tmp_path / "parts")[-1]["step"]
    assert reached < 300

    resumed = run(tiny(corpus, tmp_path / "parts"), tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stdout
    assert without_speed(metrics(tmp_path / "parts")) == without_speed(
        metrics(tmp_path / "whole")
    )

    raised = run(tiny(corpus, tmp_path / "parts", **{"train.steps": 305}), tmp_path)
    assert raised.returncode == 0, raised.stderr
    assert "resuming after step 300 of 305" in raised.stdout
    assert "changed since then: config.train.steps was 300 and is 305" in raised.stdout
    assert metrics(tmp_path / "parts")[-1]["step"] == 305

    for option, message in (
        ({"train.steps": 304}, "`steps` must be at least 305"),
        ({"model.width": 32}, "config.model.width was 16 and is 32"),
    ):
        refused = run(tiny(corpus, tmp_path / "parts", **option), tmp_path)
        assert refused.returncode != 0
        # No traceback before it; what Orbax's threads tell at the exit comes after.
        assert refused.stderr.startswith("train.py: ")
        assert message in refused.stderr.splitlines()[0]


def test_on_a_mesh_it_trains_as_on_one_device_and_either_resumes_the_other(
    corpus, tmp_path
):
    plain = {"policy.params": "", "policy.activations": ""}
    one = plain | {"train.steps": 20, "train.microbatches": 1, "model.num_kv_heads": 2}
    mesh = one | {"mesh.fsdp": 2, "mesh.tensor": 2}

    def losses(workdir):
        return [entry["loss"] for entry in metrics(workdir) if "loss" in entry]

    for name, options, devices in (("one", one, 1), ("mesh", mesh, 8)):
        done = run(tiny(corpus, tmp_path / name, **options), tmp_path, devices=devices)
        assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        losses(tmp_path / "mesh"), losses(tmp_path / "one"), rtol=2e-5
    )
    for name, options, devices in (("one", mesh, 8), ("mesh", one, 1)):
        options = options | {"train.steps": 30}
        done = run(tiny(corpus, tmp_path / name, **options), tmp_path, devices=devices)
        assert done.returncode == 0, done.stderr
        assert "resuming after step 20 of 30" in done.stdout
        assert "changed since then: config.mesh.fsdp was" in done.stdout
    np.testing.assert_allclose(
        losses(tmp_path / "mesh"), losses(tmp_path / "one"), rtol=2e-5
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh.data": 3}, "config.mesh must make up the 2 devices that there are"),
        ({"mesh.tensor": 2}, "must divide config.model.num_kv_heads = 1, got 2 parts"),
        ({"data.batch_size": 6}, "config.train.microbatches = 3, got 2 parts for"),
        ({"mesh.rules": "batch=dta"}, "`rules` must name axes of the mesh"),
        ({"mesh.rules": "batch=data"}, "`rules` must have one for 'vocab'"),
    ],
)
def test_bad_meshes_are_refused_before_anything_is_compiled(
    options, message, corpus, tmp_path
):
    refused = run(tiny(corpus, tmp_path / "no", **options), tmp_path, devices=2)
    assert refused.returncode != 0
    assert refused.stderr.startswith("train.py: ")
    assert message in refused.stderr.splitlines()[0]


def test_text_becomes_tokens_that_are_mixed_and_trained_on(corpus, tmp_path):
    tokenizer = hugging_face.save(tmp_path / "tokenizer.json")
    for name in ("a", "b"):
        prepare = [sys.executable, "-m", "mixprec.training.prepare", "--input", corpus]
        options = ["--output", tmp_path / name, "--tokenizer", tokenizer]
        options += ["--shard_tokens", "700", "--validation_fraction", "0.4"]
        prepared = run([*map(str, prepare + options)], ROOT)
        assert prepared.returncode == 0, prepared.stderr
        assert "train: 1 documents" in prepared.stdout
    options = {
        "data.path": f"{tmp_path}/a=0.5, {tmp_path}/b/*.bin=1.5",
        "data.tokenizer": tokenizer,
        "data.document_mask": True,
        "model.vocab_size": 320,
        "train.steps": 40,
    }
    trained = run(
        command("--workdir", str(tmp_path / "run"), options=TINY | options), tmp_path
    )
    assert trained.returncode == 0, trained.stderr
    assert "data, 75.0%: " in trained.stdout
    assert "token frequencies alone" in trained.stdout
    assert "\ndef " in trained.stdout  # the sample
    refused = run(command(options=options | {"model.vocab_size": 256}), tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.startswith("train.py: `vocab_size` must be at least ")


def test_other_errors_keep_their_traceback():
    import train

    def error_of(function):
        try:
            function()
        except Exception as error:
            return error

    import jax.numpy as jnp

    import mixprec

    ours = error_of(lambda: mixprec.Rule("(", None))
    theirs = error_of(lambda: jnp.zeros(3) @ jnp.zeros(4))
    assert train._is_raised_here(ours)
    assert not train._is_raised_here(theirs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.train.stepz=3"], 'Did you mean "steps"'),
        (["--config.trian.steps=3"], 'Did you mean "train"'),
        (["--config.nothing=3"], "no 'nothing' See configs/default.py"),
        (["--config.train.steps=2.5"], "steps"),
        (["more"], "unexpected more. Write --config FILE"),
        (["--config.data.path=/nowhere/at/all"], "'/nowhere/at/all' must be"),
        (["--config.data.path="], "`path` must be"),
        (["--config.data.path=stdlib=1, a"], "as path=weight, got 'a'"),
        (["--config.data.tokenizer=/nowhere"], "`tokenizer` must be"),
        (["--config.data.separator=-3"], "`separator` must be"),
        (["--config.model.num_heads=3"], "`width` must be"),
        (["--config.model.vocab_size=255"], "`vocab_size` must be at least 256"),
        (["--config.seed=-1"], "`seed` must be"),
        (["--config.policy.backend=cuda"], "`backend` must be one of auto, pallas"),
        (["--config.policy.params=layers/.*"], "`params` must be rules such as"),
        (["--config.policy.params=.*=stochastik"], "Did you mean 'stochastic'?"),
        (
            ["--config.policy.params=layers/mlp/upp/kernel=stochastic"],
            "'layers/mlp/up/kernel'",
        ),
    ],
)
def test_bad_input_is_named_in_one_line(arguments, message, tmp_path):
    result = run(command(*arguments, "--workdir", str(tmp_path / "run")), tmp_path)
    assert result.returncode != 0
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


def test_verbosity_shows_where_bad_input_was_found(tmp_path):
    result = run(command("--config.seed=-1", "--verbosity=0"), tmp_path)
    assert result.returncode != 0
    assert "Traceback" in result.stderr
    assert "`seed` must be" in result.stderr


def test_a_config_that_does_not_exist_is_named_and_those_that_do(tmp_path):
    for override in ([], ["--config.train.steps=1"]):
        result = run(command(*override, config="configs/smal.py"), tmp_path)
        assert result.returncode != 0
        assert "configs/smal.py" in result.stderr
        assert "configs/small.py" in result.stderr
        assert "Traceback" not in result.stderr


def test_a_config_without_the_defaults_is_told_what_it_lacks(tmp_path):
    (tmp_path / "own.py").write_text(
        "import ml_collections\n"
        "def get_config(): return ml_collections.ConfigDict({'seed': 0})\n"
    )
    result = run(command(config="own.py"), tmp_path)
    assert result.returncode != 0
    assert "the config has no 'policy'" in result.stderr
    assert "configs/default.py" in result.stderr


def test_the_config_is_required(tmp_path):
    result = run([sys.executable, str(ROOT / "train.py")], tmp_path)
    assert result.returncode != 0
    assert "--config" in result.stderr


def test_results_go_to_runs_beside_train_py_unless_told_otherwise():
    import train

    assert train.HERE == ROOT
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert "runs/" in ignored
