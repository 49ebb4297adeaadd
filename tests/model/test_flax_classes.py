"""Reading and saving beyond what transformers' Flax classes do: PyTorch's safetensors of every kind, by every class."""

import json
import pathlib

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import unfreeze
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import mlm.model
from mlm.model import weights
from tests.model.models import class_of, inputs, make

CLASSES = ["XLMRobertaForMaskedLM", "ModernBertForMaskedLM"]


def write(name: str, folder: pathlib.Path) -> dict:
    """Writes a small model as PyTorch has it; returns its parameters."""
    model = make(name)
    model.save_pretrained(folder, safe_serialization=True)
    return model.params


@pytest.mark.parametrize("name", CLASSES)
def test_safetensors_in_several_files_are_read_and_none_outside_the_folder(name, tmp_path):
    params = write(name, tmp_path / "a")
    cls = class_of(name)
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    (tmp_path / "a" / "model.safetensors").unlink()
    weight_map = {key: f"model-{number % 3}.safetensors" for number, key in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {key: value for key, value in tensors.items() if weight_map[key] == file}
        save_file(part, tmp_path / "a" / file, {"format": "pt"})
    index = tmp_path / "a" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    model = cls.from_pretrained(tmp_path, subfolder="a")
    jax.tree.map(np.testing.assert_array_equal, model.params, params)
    index.write_text(json.dumps({"weight_map": {"x": "../model.safetensors"}}))
    with pytest.raises(ValueError, match="inside its folder"):
        cls.from_pretrained(tmp_path / "a")


def test_parameters_are_jax_s_arrays_and_numpy_s_can_be_used_in_a_traced_call(tmp_path):
    """Or `to_bf16` would leave them."""
    write("ModernBertForMaskedLM", tmp_path)
    model = mlm.model.FlaxModernBertForMaskedLM.from_pretrained(tmp_path)
    (ids, mask) = inputs()
    assert {leaf.dtype for leaf in jax.tree.leaves(model.to_bf16(model.params))} == {
        jnp.dtype("bfloat16")
    }
    host = jax.device_get(model.params)
    logits = jax.jit(
        lambda ids: [model(ids, mask, params=params).logits for params in (model.params, host)]
    )
    np.testing.assert_array_equal(*logits(ids))


@pytest.mark.parametrize("name", CLASSES)
def test_a_new_head_is_drawn_by_init_weights(name, tmp_path):
    params = write(name, tmp_path)
    cls = class_of(name.replace("MaskedLM", "TokenClassification"))
    model, loaded = cls.from_pretrained(
        tmp_path, _do_init=False, num_labels=3, gradient_checkpointing=True
    )
    assert "classifier" not in loaded and model.module.gradient_checkpointing
    complete = unfreeze(model.init_weights(jax.random.key(0), (1, 1), loaded))
    assert set(flatten_dict(complete)) == model.required_params
    body = "roberta" if name.startswith("XLMRoberta") else "model"
    jax.tree.map(np.testing.assert_array_equal, complete[body], params[body])
    with pytest.raises(TypeError, match="num_label'"):
        cls.from_pretrained(tmp_path, num_label=3)
    with pytest.raises(ValueError, match="ignore_mismatched_sizes"):
        cls.from_pretrained(tmp_path, intermediate_size=8)
    cls.from_pretrained(tmp_path, intermediate_size=8, ignore_mismatched_sizes=True)


@pytest.mark.parametrize("name", CLASSES)
def test_safetensors_are_saved_as_pytorch_has_them(name, tmp_path):
    """Those that PyTorch has transposed not as they lie; what is read is written, and other parameters if given."""
    params = write(name, tmp_path)
    model = class_of(name).from_pretrained(tmp_path)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    model.save_pretrained(tmp_path / "read", safe_serialization=True)
    model.save_pretrained(tmp_path / "given", params=doubled, safe_serialization=True)
    for folder, wanted in (("", params), ("read", params), ("given", doubled)):
        with safe_open(tmp_path / folder / "model.safetensors", framework="np") as file:
            assert file.metadata() == {"format": "pt"}
            for key, value in weights.to_torch(jax.device_get(wanted)).items():
                np.testing.assert_array_equal(file.get_tensor(key), value)
    with pytest.raises(ValueError, match="push_to_hub"):
        model.save_pretrained(tmp_path, push_to_hub=True, safe_serialization=True)


def test_what_a_flax_class_has_saved_beside_pytorch_s_weights_is_read(tmp_path):
    write("ModernBertForMaskedLM", tmp_path)
    model = mlm.model.FlaxModernBertForMaskedLM.from_pretrained(tmp_path)
    model.params = jax.tree.map(lambda leaf: 2 * leaf, model.params)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, config=tmp_path, local_rope_theta=9.0)
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    assert again.config.local_rope_theta == 9


def test_a_pickle_is_no_modernbert(tmp_path):
    write("ModernBertForMaskedLM", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    for kwargs in ({}, {"from_pt": True}):
        with pytest.raises(OSError, match=r"neither flax_model\.msgpack nor model\.safetensors"):
            mlm.model.FlaxModernBertForMaskedLM.from_pretrained(tmp_path, **kwargs)


# Another architecture ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["msgpack", "safetensors"])
def test_weights_of_another_architecture_are_refused_by_name(kind, tmp_path):
    """Relative positions in the attention, instead of the table, and another part."""
    model = make("RobertaForMaskedLM")
    params = flatten_dict(jax.device_get(model.params), sep="/")
    removed = "roberta/embeddings/position_embeddings/embedding"
    added = "roberta/encoder/layer/0/attention/self/relative/kernel"
    del params[removed]
    params |= {added: np.ones((5, 4)), "generator/kernel": np.ones((32, 32))}
    params = unflatten_dict(params, sep="/")
    model.config.save_pretrained(tmp_path)
    if kind == "msgpack":
        (tmp_path / "flax_model.msgpack").write_bytes(flax.serialization.msgpack_serialize(params))
    else:
        save_file(weights.to_torch(params), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"of another architecture.*strict=False") as error:
        type(model).from_pretrained(tmp_path)
    assert all(name in str(error.value) for name in (removed, added, "generator/kernel"))
    loaded = type(model).from_pretrained(tmp_path, strict=False)
    assert jax.tree.map(np.shape, loaded.params) == jax.tree.map(np.shape, model.params)
    np.testing.assert_array_equal(loaded.params["lm_head"]["bias"], model.params["lm_head"]["bias"])


def test_a_model_without_a_head_or_with_another_one_is_of_the_same_architecture(tmp_path):
    """BERT's pooler and its head for next sentences too, and a head of which the classes are others."""
    model = make("BertForMaskedLM")
    params = jax.device_get(model.params)
    extras = {"seq_relationship": {"bias": np.zeros(2, np.float32)}}
    for body in (
        params["bert"],
        {"bert": params["bert"], "cls": extras},
        params | {"cls": params["cls"] | extras},
    ):
        model.save_pretrained(tmp_path, params=body)
        loaded = class_of("BertForSequenceClassification").from_pretrained(tmp_path, num_labels=5)
        jax.tree.map(
            np.testing.assert_array_equal,
            loaded.params["bert"]["encoder"],
            params["bert"]["encoder"],
        )
        loaded.save_pretrained(tmp_path)
        class_of("BertForTokenClassification").from_pretrained(tmp_path, num_labels=5)
