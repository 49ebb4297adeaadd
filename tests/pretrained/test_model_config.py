"""config.json of a folder, whoever wrote it: read as a config of transformers, or refused by key and value."""

import json
import pathlib
import shutil

import pytest

from mlm.errors import InputError
from mlm.paths import UPath
from mlm.pretrained import load

ROPE = {
    kind: {"rope_type": "default", "rope_theta": 9000.0}
    for kind in ("full_attention", "sliding_attention")
}


@pytest.fixture
def roberta(model, tmp_path) -> pathlib.Path:
    model.config.save_pretrained(tmp_path / "roberta")
    return tmp_path / "roberta" / "config.json"


@pytest.fixture
def modernbert(modernbert_folder, tmp_path) -> pathlib.Path:
    (tmp_path / "modernbert").mkdir()
    return pathlib.Path(shutil.copy(f"{modernbert_folder}/config.json", tmp_path / "modernbert"))


def read(file: pathlib.Path, **keys):
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return load.read_config(UPath(file.parent), "a folder")


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"model_type": "\\u001b[2J"}'])
def test_what_is_no_config_is_refused(roberta, data):
    roberta.write_bytes(data)
    with pytest.raises(InputError, match=r"config\.json") as error:
        load.load(str(roberta.parent), head=load.LM_HEAD)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "keys",
    [
        {"model_type": "gpt2"},
        {"hidden_size": "64"},
        {"is_decoder": True},
        {"position_embedding_type": "relative_key"},
        {"model_type": "electra"},
    ],
)
def test_a_roberta_that_we_would_not_compute_is_refused(roberta, keys):
    *_, (key, value) = keys.items()
    assert read(roberta, initializer_range=1.5).initializer_range == 1.5
    with pytest.raises(InputError, match=rf"a folder: .*config\.json .*{key} = '?{value}'?; "):
        read(roberta, **keys)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (
            {"hidden_activation": "tanh"},
            r"hidden_activation = 'tanh'; .*gelu, gelu_new, relu, silu",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
        ({"hidden_size": 30, "num_attention_heads": 6}, r"hidden_size .*odd"),
    ],
)
def test_a_modernbert_that_we_would_not_compute_is_refused(modernbert, keys, match):
    assert read(modernbert).hidden_size == 32
    with pytest.raises(InputError, match=match):
        read(modernbert, **keys)


@pytest.mark.parametrize(
    ("layers", "given", "every"), [(2, 3, 3), (2, None, 2), (7, 3, 3), (7, 9, 3)]
)
def test_layer_types_of_transformers_5(modernbert, layers, given, every):
    types = ["sliding_attention" if index % 3 else "full_attention" for index in range(layers)]
    keys = {"rope_parameters": ROPE, "layer_types": types, "global_attn_every_n_layers": given}
    assert read(modernbert, num_hidden_layers=layers, **keys).global_attn_every_n_layers == every


def test_a_local_rotary_base_of_null_is_the_global_one(modernbert):
    """In either form, of transformers 4 or 5."""
    assert read(modernbert, local_rope_theta=None).local_rope_theta == 9000
    content = json.loads(modernbert.read_text())
    for key in ("global_rope_theta", "local_rope_theta"):
        del content[key]
    modernbert.write_text(json.dumps(content))
    bases = ROPE | {"sliding_attention": {"rope_type": "default", "rope_theta": None}}
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    found = read(modernbert, rope_parameters=bases, layer_types=types, num_hidden_layers=3)
    assert found.local_rope_theta == found.global_rope_theta == 9000
