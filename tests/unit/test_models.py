"""Shipped shapes become folders that SGLang can load."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpuserve.errors import MachineError, UsageError
from pytest_gpuserve.model.cell import ModelSpec
from pytest_gpuserve.models import shapes
from pytest_gpuserve.models.inside.tensors import tensors_of
from pytest_gpuserve.models.materialise import materialise
from pytest_gpuserve.models.tokenizer import tokenizer_json


def make(tmp_path, spec, **options):
    return materialise(spec, **({"python": sys.executable, "env": {}, "weights": False, "cache": tmp_path} | options))


@pytest.mark.parametrize("shape", shapes.names())
def test_a_shape_becomes_config_and_tokenizer_without_torch(tmp_path, shape):
    folder = make(tmp_path, ModelSpec(name="m", shape=shape))
    config = json.loads((folder / "config.json").read_text())
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(config["vocab_size"]))
    assert not list(folder.glob("*.safetensors"))


@pytest.mark.parametrize("shape", shapes.names())
def test_a_shape_has_weights_for_every_layer_and_no_name_twice(shape):
    tensors = tensors_of(shapes.config_of(shape))
    names = [tensor.name for tensor in tensors]
    assert len(set(names)) == len(names)
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    assert layers == {str(layer) for layer in range(shapes.SHAPES[shape].layers)}


@given(st.integers(min_value=259, max_value=70_000))
def test_every_token_id_has_its_own_text(size):
    vocabulary = tokenizer_json(size)["model"]["vocab"]
    assert len(vocabulary) == size


def test_the_folder_is_made_once_and_changes_with_the_config(tmp_path):
    one = make(tmp_path, ModelSpec(name="a", shape="llama-3"))
    assert make(tmp_path, ModelSpec(name="b", shape="llama-3")) == one
    assert make(tmp_path, ModelSpec(name="a", shape="llama-3", layers=2)) != one


def test_what_a_killed_maker_left_is_removed_by_the_next(tmp_path):
    folder = make(tmp_path, ModelSpec(name="a", shape="tiny-llama"))
    folder.rename(tmp_path / f".{folder.name}.kill3d_9")
    other = make(tmp_path, ModelSpec(name="a", shape="tiny-llama", layers=1))
    other.rename(tmp_path / f".{other.name}.bu5y_now")
    assert make(tmp_path, ModelSpec(name="a", shape="tiny-llama")) == folder
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {folder.name, f".{other.name}.bu5y_now"}


def test_many_at_once_make_it_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: make(tmp_path, ModelSpec(name="a", shape="tiny-llama")), range(8)))
    assert len(folders) == 1
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == [folders.pop().name]


def test_weights_that_cannot_be_made_say_what_ran_and_leave_nothing(tmp_path):
    with pytest.raises(MachineError, match=r"(?s)failed with exit 1: .*torch.*--gpu-server-python"):
        make(
            tmp_path,
            ModelSpec(name="a", shape="tiny-llama"),
            weights=True,
            env={"PYTHONPATH": _without_torch(tmp_path)},
        )
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and "tiny-llama" in path.name]


def _without_torch(tmp_path):
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")")
    return str(shadow)


def test_a_path_must_be_local_since_nothing_is_downloaded(tmp_path):
    with pytest.raises(UsageError, match=r"moonshotai/Kimi-K2.5 is not a local folder"):
        make(tmp_path, ModelSpec(name="k", path="moonshotai/Kimi-K2.5"))
    assert make(tmp_path, ModelSpec(name="k", path=str(tmp_path))) == tmp_path.resolve()


def test_a_quantization_the_shape_is_not_made_in_names_those_it_is():
    with pytest.raises(UsageError, match=r"tiny-llama cannot be made with quantization nvfp4.*made in none"):
        shapes.config_of("tiny-llama", quantization="nvfp4")


def test_too_few_layers_for_an_moe_layer():
    with pytest.raises(UsageError, match="at least 2 layers"):
        shapes.config_of("deepseek-v3", layers=1)
