import json
import struct

import jax.numpy as jnp
import numpy as np
import pytest

from mixprec.training import metrics


def lines(workdir):
    text = (workdir / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def event_values(workdir):
    """Reads (tag, step, value) from the event files, by tensorboardX's protocol."""
    from tensorboardX.proto import event_pb2

    found = []
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        data = path.read_bytes()
        place = 0
        while place < len(data):
            (length,) = struct.unpack("<Q", data[place : place + 8])
            # A record: length, its checksum (4 bytes), data, its checksum (4 bytes).
            event = event_pb2.Event.FromString(data[place + 12 : place + 12 + length])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            place += 16 + length
    return found


def test_each_step_is_one_json_object_and_one_event_a_scalar(tmp_path):
    writer = metrics.MetricsWriter(tmp_path, resume_step=0)
    writer.write(10, {"loss": 1.5, "tokens_per_second": 200.0})
    writer.write(10, {"val_loss": 2.5})
    writer.close()
    assert lines(tmp_path) == [
        {"step": 10, "loss": 1.5, "tokens_per_second": 200.0},
        {"step": 10, "val_loss": 2.5},
    ]
    assert event_values(tmp_path) == [
        ("loss", 10, 1.5),
        ("tokens_per_second", 10, 200.0),
        ("val_loss", 10, 2.5),
    ]


def test_float32_survives_the_file_exactly(tmp_path):
    value = float(np.float32(1) / np.float32(3))
    writer = metrics.MetricsWriter(tmp_path, resume_step=0)
    writer.write(1, {"loss": value})
    writer.close()
    assert np.float32(lines(tmp_path)[0]["loss"]) == np.float32(1) / np.float32(3)


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    first = metrics.MetricsWriter(tmp_path, resume_step=0)
    for step in (10, 20, 30):
        first.write(step, {"loss": float(step)})
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 40, "lo')  # killed in the middle of a line
    second = metrics.MetricsWriter(tmp_path, resume_step=20)
    second.write(30, {"loss": 0.5})
    second.close()
    assert lines(tmp_path) == [
        {"step": 10, "loss": 10.0},
        {"step": 20, "loss": 20.0},
        {"step": 30, "loss": 0.5},
    ]


@pytest.mark.parametrize(
    "rest", [b"\xff\xfe", b"\0\0\0\0\n", b"17\n", b"[1]\n", b'{"loss": 1}\n']
)
def test_whatever_a_crash_left_in_the_file_the_lines_before_it_are_kept(tmp_path, rest):
    whole = b'{"step": 10, "loss": 1.0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(whole + rest)
    metrics.MetricsWriter(tmp_path, resume_step=10).close()
    assert lines(tmp_path) == [{"step": 10, "loss": 1.0}]
    assert [path.name for path in tmp_path.glob("metrics*")] == ["metrics.jsonl"]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    metrics.MetricsWriter(tmp_path, resume_step=0).close()
    assert lines(tmp_path) == []


def test_loss_is_averaged_over_microbatches_and_merges():
    def measure(losses):
        return metrics.StepMetrics.single_from_model_output(
            loss=jnp.float32(losses),
            gradient_norm=jnp.float32(2),
            learning_rate=jnp.float32(0.5),
        )

    values = metrics.to_floats(measure([1, 2, 6]))
    assert values == {"loss": 3.0, "gradient_norm": 2.0, "learning_rate": 0.5}
    assert all(isinstance(value, float) for value in values.values())


def test_validation_loss_is_averaged_over_batches():
    measured = [
        metrics.ValidationMetrics.single_from_model_output(loss=jnp.float32(loss))
        for loss in (1.0, 4.0)
    ]
    assert metrics.to_floats(*measured) == {"val_loss": 2.5}


def test_of_several_processes_only_the_first_writes(tmp_path, monkeypatch):
    for process in (0, 1):
        monkeypatch.setattr(metrics.jax, "process_index", lambda: process)  # noqa: B023
        workdir = tmp_path / str(process)
        workdir.mkdir()
        writer = metrics.make_writer(workdir, resume_step=0)
        writer.write(1, {"loss": 2.0})
        writer.close()
    assert lines(tmp_path / "0") == [{"step": 1, "loss": 2.0}]
    assert not list((tmp_path / "1").iterdir())


def test_is_finite():
    assert metrics.is_finite({"a": 1.0, "b": -3.0})
    assert not metrics.is_finite({"a": 1.0, "b": float("nan")})
    assert not metrics.is_finite({"a": float("-inf")})
