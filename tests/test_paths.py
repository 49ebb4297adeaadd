"""Names that a file gives lead to files inside their folder, or nowhere."""

import pytest

from mlm.paths import UPath, inside

BAD = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "a//x",
    "/etc/passwd",
    "a/",
    "C:x",
    "C:\\x",
    "a\\..\\x",
    "gs://b/x",
    "a\0",
    "a\nb",
]


@pytest.mark.parametrize("name", [*BAD, None, 3, ["x"]])
@pytest.mark.parametrize("folder", ["local", "gs://bucket/folder"])
def test_names_that_lead_out_are_refused(tmp_path, folder, name):
    root = UPath(tmp_path if folder == "local" else folder)
    for links in (False, True):
        with pytest.raises(ValueError, match="is not the name of a file inside its folder") as error:
            inside(root, name, links=links)
        assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "name", ["x", "train/dataset-0-1.tfrecord", "a b", "...", "..x", "model-00001-of-00002.safetensors"]
)
def test_other_names_are_inside(tmp_path, name):
    assert str(inside(UPath(tmp_path), name)) == f"{tmp_path}/{name}"
    assert str(inside(UPath("gs://bucket/folder"), name)) == f"gs://bucket/folder/{name}"


def test_links_out_of_the_folder_are_refused_unless_the_cache_of_the_hub_makes_them(tmp_path):
    """Of the file, and of a folder on the way to it; the folder itself may be a link."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("")
    (tmp_path / "real").mkdir()
    root = UPath(tmp_path / "folder")
    root.symlink_to(tmp_path / "real")
    (root / "x").symlink_to("../elsewhere/x")
    (root / "sub").symlink_to(tmp_path / "elsewhere")
    (root / "own").write_text("")
    (root / "to own").symlink_to("own")
    for name in ("x", "sub/x"):
        with pytest.raises(ValueError, match="is a symbolic link that leaves its folder"):
            inside(root, name)
        assert inside(root, name, links=True).is_file()
    assert inside(root, "to own").is_file()
