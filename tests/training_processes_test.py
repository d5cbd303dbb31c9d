"""Several processes on one machine: two of four CPU devices each."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from mixprec.training import processes

ROOT = pathlib.Path(__file__).resolve().parents[1]
OPTIONS = {
    "data.sequence_length": 16,
    "data.batch_size": 16,
    "model.num_layers": 1,
    "model.width": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.mlp_width": 24,
    "mesh.data": 2,
    "mesh.fsdp": 4,
    "train.steps": 150,
    "train.log_every": 1,
    "train.validate_every": 50,
    "train.validation_batches": 2,
    "checkpoint.every": 20,
    "sample.length": 5,
}


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(corpus, workdir, *, number=2, **changes):
    """Starts the processes of a run; together they have eight devices."""
    options = OPTIONS | {"data.path": corpus} | changes
    flags = f"--xla_force_host_platform_device_count={8 // number}"
    command = [sys.executable, str(ROOT / "train.py"), "--config", "configs/small.py"]
    command += ["--workdir", str(workdir)]
    command += [f"--config.{key}={value}" for key, value in options.items()]
    if number > 1:
        command += [f"--coordinator=localhost:{free_port()}"]
        command += [f"--num_processes={number}"]
    return [
        subprocess.Popen(
            command + [f"--process_id={place}"] * (number > 1),
            cwd=workdir.parent,
            env=os.environ | {"XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in range(number)
    ]


def finish(started):
    """Waits for all; gives what each has printed."""
    ended = [process.communicate(timeout=600) for process in started]
    for process, (_, errors) in zip(started, ended, strict=True):
        assert process.returncode == 0, errors
    return [
        "".join(line for line in printed.splitlines(True) if "[Gloo]" not in line)
        for printed, _ in ended
    ]


def entries(workdir):
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    for entry in found:
        entry.pop("tokens_per_second", None)
    return found


@pytest.fixture
def corpus(tmp_path):
    generator = np.random.default_rng(0)
    words = "it is the first of many small steps to take on the way".split()
    path = tmp_path / "text.txt"
    path.write_text(" ".join(generator.choice(words, 6000)))
    return path


def test_two_processes_train_as_one_and_go_on_after_one_is_killed(corpus, tmp_path):
    finish(start(corpus, tmp_path / "one", number=1))
    first, second = finish(start(corpus, tmp_path / "whole"))
    assert "resuming" not in first
    assert "byte frequencies alone" in first
    assert second == ""  # one speaks
    # The same mesh: each device computes what it computes in one process, but sums
    # travel another way; later, weights that differ in their last bit draw anew.
    for found, expected in zip(
        entries(tmp_path / "whole"), entries(tmp_path / "one"), strict=True
    ):
        assert found.keys() == expected.keys()
        if found["step"] == 1:
            np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)

    parts = tmp_path / "parts"
    started = start(corpus, parts)
    while not any(entry["step"] >= 50 for entry in entries(parts)):
        assert all(process.poll() is None for process in started)
        time.sleep(0.005)
    started[1].send_signal(signal.SIGKILL)
    for process in started:  # the other one waits, or gives up
        try:
            process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    assert started[0].returncode != 0
    assert entries(parts)[-1]["step"] < 150
    first, _ = finish(start(corpus, parts))
    assert "resuming after step" in first
    assert entries(parts) == entries(tmp_path / "whole")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("localhost:1", None, None), "must be given together, got localhost:1, None"),
        ((None, 2, 0), "must be given together"),
        (("localhost:1", 2, 2), "from 0 to `num_processes` - 1, got 2 of 2"),
        (("localhost:1", 2, -1), "from 0 to `num_processes` - 1, got -1 of 2"),
    ],
)
def test_flags_that_do_not_fit_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        processes.connect(*given)


def test_no_cluster_is_an_error_that_names_the_flags():
    code = "from mixprec.training import processes; processes.connect(None, None, None)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "ValueError: --distributed must find a cluster that JAX knows" in done.stderr
