"""Certificates of a Dask cluster."""

import pathlib
import ssl
import stat
import subprocess
import sys

import pytest

from mlm.engine import certificates
from mlm.errors import InputError
from tests import ROOT


def test_the_key_is_its_owners_alone_and_belongs_to_the_certificate(tmp_path: pathlib.Path) -> None:
    certificates.make(tmp_path / "new")
    certificates.make(tmp_path / "new")  # again: replaced
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(certificates.NAMES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}
    authority, certificate, key = (tmp_path / "new" / name for name in ("ca.pem", "cert.pem", "key.pem"))
    ssl.create_default_context(cafile=authority).load_cert_chain(certificate, key)
    security = certificates.read(tmp_path / "new")
    assert security.require_encryption
    for role in ("client", "scheduler", "worker"):
        assert security.get_tls_config_for_role(role)["key"] == key.read_text()


def test_folders_that_cannot_be_used(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="can't be written"):
        certificates.make(tmp_path / "file" / "folder")
    with pytest.raises(InputError, match=r"ca\.pem: can't be read .* --engine-certificates=DIR"):
        certificates.read(tmp_path)


@pytest.mark.standard
def test_the_command_line(tmp_path: pathlib.Path) -> None:
    line = [sys.executable, "-m", "mlm.engine.certificates", str(tmp_path / "made")]
    made = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0 and "ca.pem, cert.pem, key.pem" in made.stdout and made.stderr == ""
    assert certificates.read(tmp_path / "made").tls_ca_file.startswith("-----BEGIN CERTIFICATE-----")
