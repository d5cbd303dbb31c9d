import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mixprec.training import checkpoint
from mixprec.training.state import TrainState

CONFIG = checkpoint.CheckpointConfig(every=1, keep_last=2, keep_best=1)
RUN = {"seed": 0, "model": {"width": 8, "shape": (1, 2)}}


def make_state(step=0, dtype=jnp.float32, width=3, names=("kernel", "bias")):
    key = jax.random.fold_in(jax.random.key(0), step)
    params = {name: jax.random.normal(key, (2, width), dtype) for name in names}
    optimizer_state = optax.adamw(1e-3).init(params)
    return TrainState(
        step=jnp.int32(step), params=params, optimizer_state=optimizer_state
    )


def make_data():
    return iter(grain.MapDataset.range(1000).seed(1).shuffle().repeat().batch(4))


def save(workdir, state, data=None, run=RUN, val_loss=None, config=CONFIG):
    checkpointer = checkpoint.Checkpointer(workdir, config)
    checkpointer.save(state, data or make_data(), run, val_loss=val_loss)
    checkpointer.close()


def steps_kept(workdir):
    folder = workdir / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def test_restores_every_bit_and_the_place_in_the_data(tmp_path):
    saved = make_state(7)
    # Payloads that a pass through floating point would change.
    odd = np.array([[0x7F800001, 0x80000001, 0x3F800001]] * 2, np.uint32)
    saved = saved.replace(params=saved.params | {"bias": odd.view(np.float32)})
    data = make_data()
    for _ in range(3):
        next(data)
    save(tmp_path, saved, data)
    expected_batches = [next(data) for _ in range(3)]

    fresh_data = make_data()
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    assert checkpointer.latest_step() == 7
    restored = checkpointer.restore(7, make_state(0), fresh_data)
    checkpointer.close()
    assert jax.tree.structure(restored) == jax.tree.structure(saved)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    np.testing.assert_array_equal(
        [next(fresh_data) for _ in range(3)], expected_batches
    )


def test_a_state_donated_right_after_saving_is_saved_as_it_was(tmp_path):
    state = make_state(1)
    expected = jax.tree.map(np.array, state)
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    overwrite = jax.jit(
        lambda tree: jax.tree.map(jnp.zeros_like, tree), donate_argnums=0
    )
    checkpointer.save(state, make_data(), RUN, val_loss=None)
    jax.block_until_ready(overwrite(state))
    checkpointer.close()
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    restored = checkpointer.restore(1, make_state(0), make_data())
    checkpointer.close()
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_keeps_the_last_and_the_best(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    data = make_data()
    for step, val_loss in [(1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 5.0), (6, 4.0)]:
        checkpointer.save(make_state(step), data, RUN, val_loss=val_loss)
    checkpointer.close()
    assert steps_kept(tmp_path) == [2, 5, 6]


def test_no_checkpoint_yet(tmp_path):
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    assert checkpointer.latest_step() is None
    checkpointer.close()


def test_an_unfinished_save_is_cleared_away(tmp_path):
    save(tmp_path, make_state(1))
    leftover = tmp_path / "checkpoints" / "2.orbax-checkpoint-tmp"
    leftover.mkdir()
    save(tmp_path, make_state(2))
    assert not leftover.exists()
    assert steps_kept(tmp_path) == [1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"dtype": jnp.bfloat16},
            r"params/bias` must be bfloat16\[2, 3\], got float32",
        ),
        ({"width": 4}, r"must be float32\[2, 4\], got float32\[2, 3\]"),
        ({"names": ("kernel", "bias", "new")}, "new` must be float32.*, got nothing"),
        ({"names": ("kernel",)}, "must hold what the model has, got .*bias"),
    ],
)
def test_a_state_of_another_kind_is_refused(tmp_path, changes, message):
    save(tmp_path, make_state(1))
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    with pytest.raises(ValueError, match=message):
        checkpointer.restore(1, make_state(0, **changes), make_data())
    checkpointer.close()


def test_another_run_is_refused_by_name_and_value(tmp_path):
    save(tmp_path, make_state(1))
    checkpointer = checkpoint.Checkpointer(tmp_path, CONFIG)
    saved = checkpointer.restore_run(1)
    checkpointer.close()

    def compare(current, *fixed):
        return checkpoint.compare_runs(saved, current, 1, fixed=fixed)

    assert compare(RUN, "seed", "model") == []
    changed = {"seed": 0, "model": {"width": 9, "shape": (1, 2)}}
    change = "model.width was 8 and is 9"
    assert compare(changed, "seed") == [change]
    assert compare(changed, "mod", "model.widt") == [change]
    for fixed in ("model", "model.width"):
        with pytest.raises(ValueError, match=f"checkpoint 1, but {change}"):
            compare(changed, fixed)
    with pytest.raises(ValueError, match="seed was 0 and is None"):
        compare({"model": RUN["model"]}, "seed")


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("every", 0, 1), ("keep_last", 0, 1), ("keep_best", -1, 0)],
)
def test_bad_options_are_refused(name, value, least):
    options = {"every": 1, "keep_last": 1, "keep_best": 0} | {name: value}
    with pytest.raises(ValueError, match=f"`{name}` must be at least {least}, got"):
        checkpoint.CheckpointConfig(**options)
