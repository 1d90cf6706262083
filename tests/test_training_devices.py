"""Train on several CPU devices that share each row: the curve is that of one device."""

import contextlib
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import few
from flax import nnx
from model_cases import TINY, write_novel

from models import generate, train
from models.data import ListOps, Refused
from models.devices import lay_out, on_devices
from models.train import Settings

pytestmark = [pytest.mark.once, pytest.mark.eight_devices]

RUN = TINY | {
    "context": 48,
    "batch": 2,
    "steps": 10,
    "warmup": 2,
    "eval_every": 10,
    "eval_batches": 1,
    "save_every": 5,
    "out": "run",
}
ONE = {"devices": 1}
FOUR = {"devices": 4}  # in zigzag, by default
LAYOUTS = ("contiguous", "zigzag", "striped")


@pytest.fixture(scope="module")
def novel(tmp_path_factory) -> str:
    return write_novel(tmp_path_factory.mktemp("novel"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, novel):
    """Return a function that trains in a new folder, or goes on in a copy of a folder."""

    def run_in_folder(start: Path | None = None, **changed) -> Path:
        folder = tmp_path_factory.mktemp("training")
        if start is not None:
            shutil.copytree(start, folder, dirs_exist_ok=True)
        with contextlib.chdir(folder):
            assert train.train(Settings(**RUN | {"text": (novel,)} | changed))
        return folder

    return run_in_folder


@pytest.fixture(scope="module")
def run_once(run):
    """Return a function that trains in a new folder, once for the same settings."""
    return functools.cache(run)


def read_metrics(folder: Path) -> dict[str, list[float]]:
    """Return the losses, the gradients' norms and the losses of evaluations, in order."""
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    names = ("loss", "gradient_norm", "eval_loss")
    return {name: [x[name] for x in records if name in x] for name in names}


def assert_same_curve(folder: Path, expected: Path):
    found = read_metrics(folder)
    assert [len(values) for values in found.values()] == [10, 10, 1]
    for name, values in read_metrics(expected).items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=0, err_msg=name)


# ---- training


CURVES = [(4, "zigzag"), *((2, layout) for layout in LAYOUTS), (4, "contiguous"), (4, "striped")]


@pytest.mark.parametrize("devices, layout", few(CURVES, [(2, "zigzag")]))
def test_same_curve_as_on_one_device(devices, layout, run_once):
    settings = {"devices": devices}
    if layout != "zigzag":  # the default over several devices
        settings["layout"] = layout
    assert_same_curve(run_once(**settings), run_once(**ONE))


@pytest.mark.slow
def test_same_curve_with_other_options(run_once):
    """Rows of ListOps hold several documents, whose positions start again."""
    options = {
        "task": "listops",
        "text": (),
        "remat": True,
        "window": 9,
        "accumulate": 2,
        "scan_layers": False,
        "feed_forward_chunk": 8,
    }
    folder = run_once(**options, **FOUR)
    expected = run_once(**options, **ONE)
    assert_same_curve(folder, expected)


@pytest.mark.slow
def test_checkpoints_do_not_know_how_many_devices_there_were(run_once, run):
    """Go on from step 5 of each run with the other's number of devices."""
    for first, then in ((ONE, FOUR), (FOUR, ONE)):
        start = run_once(**first)
        halfway = run(start=halved(start), **then)
        assert_same_curve(halfway, run_once(**ONE))
        assert set(train.saved_steps(str(halfway / "run"))) == {5, 10}


def halved(folder: Path) -> Path:
    """Return a copy of a run without its checkpoint of step 10, as a crash would leave it."""
    copy = folder.with_name(folder.name + "-halved")
    shutil.copytree(folder, copy)
    shutil.rmtree(copy / "run/checkpoints/10")
    return copy


@pytest.mark.slow
def test_a_model_of_several_devices_generates_on_one(run_once):
    graphdef, params = generate.load(str(run_once(**FOUR) / "run"))
    assert {x.sharding.num_devices for x in jax.tree.leaves(params)} == {1}
    tokens = jnp.zeros((1, 7), jnp.int32)
    logits = jax.eval_shape(lambda params: nnx.merge(graphdef, params)(tokens), params)
    assert logits.shape == (1, 7, 256)
    assert len(generate.write(graphdef, params, prompt="a", length=3, temperature=1.0)) <= 3


# ---- rows


def test_rows_in_the_order_of_devices():
    batch = ListOps(48, 2).train_batch(0, 0)
    expected = lay_out(Settings(**RUN), batch)
    assert expected.segment_ids.max() > 1
    shared_by_layout = {
        "contiguous": range(12, 24),
        "zigzag": [*range(6, 12), *range(36, 42)],
        "striped": range(1, 48, 4),
    }
    for layout, places in shared_by_layout.items():
        settings = Settings(**RUN | FOUR, layout=layout)
        with on_devices(settings):
            rows = lay_out(settings, batch)
        for x, y in zip(rows, expected, strict=True):
            y = np.asarray(y)
            second = x.addressable_shards[1].data
            np.testing.assert_array_equal(second, y[:, list(places)])
            assert x.dtype == y.dtype
            order = settings.token_order(48)
            np.testing.assert_array_equal(np.asarray(x), y[:, order])


def test_several_devices_need_positions():
    settings = Settings(**RUN | FOUR)
    model = jax.eval_shape(lambda: train.Transformer(settings, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="Over 4 devices, give the position of each"):
        model(jnp.zeros((1, 8), jnp.int32))


def test_too_few_devices_are_told_with_a_cure(tmp_path, monkeypatch, novel):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        train.main(["--devices", "16", "--text", novel, "--out", "run"])
    assert str(exit.value) == (
        "models.train: --devices 16: this machine has 8 (cpu). Give fewer. For a trial on a CPU, "
        "set XLA_FLAGS=--xla_force_host_platform_device_count=16."
    )
    with pytest.raises(Refused):
        on_devices(Settings(**RUN | {"devices": 16, "context": 64}))
    assert not Path("run").exists()
