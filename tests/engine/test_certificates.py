"""Certificates of a Dask cluster."""

import ssl
import stat

from mlm.engine import certificates


def test_the_key_is_its_owners_alone_and_belongs_to_the_certificate(tmp_path):
    certificates.make(tmp_path / "new")
    certificates.make(tmp_path / "new")  # again: replaced
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted(certificates.NAMES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new").iterdir()} == {0o600}
    authority, certificate, key = (
        tmp_path / "new" / name for name in ("ca.pem", "cert.pem", "key.pem")
    )
    ssl.create_default_context(cafile=authority).load_cert_chain(certificate, key)
    security = certificates.load_security(tmp_path / "new")
    assert security.require_encryption
    for role in ("client", "scheduler", "worker"):
        assert security.get_tls_config_for_role(role)["key"] == key.read_text()
