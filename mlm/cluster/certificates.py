"""Certificates that admit to a Dask cluster; `python -m mlm.cluster.certificates FOLDER` makes them by hand."""

import datetime
import sys
from pathlib import Path

from mlm.errors import InputError, StopError
from mlm.paths import UPath, make_folder, refusing, write_secret
from mlm.text import prepare_streams

NAMES = ("ca.pem", "cert.pem", "key.pem")
AUTHORITY = "mlm engine authority"
LIFE = datetime.timedelta(days=365)
SKEW = datetime.timedelta(days=1)  # by which the clock of a host may be behind


def make(folder: UPath | Path) -> None:
    """Writes an authority's certificate, one that it signed, and the key of that one alone. Raises InputError."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def certificate(name: str, public_key: ec.EllipticCurvePublicKey, *, authority: bool) -> str:
        subject, issuer = (x509.Name.from_rfc4514_string(f"CN={common_name}") for common_name in (name, AUTHORITY))
        number = x509.random_serial_number()
        built = x509.CertificateBuilder(issuer, subject, public_key, number, now - SKEW, now + LIFE)
        built = built.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return built.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()

    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    contents = (
        certificate(AUTHORITY, authority_key.public_key(), authority=True),
        certificate("mlm engine", key.public_key(), authority=False),
        key.private_bytes(*private).decode(),
    )
    with refusing(f"{folder}: can't be written", "choose another folder"):
        make_folder(folder)
        for name, content in zip(NAMES, contents, strict=True):
            write_secret(folder / name, content)


def read(folder: UPath | Path) -> dict[str, str]:
    """Returns {name: content} of the certificates in a folder; raises InputError."""
    contents, fix = {}, "--engine-certificates=DIR names the folder of ca.pem, cert.pem and key.pem, which "
    for name in NAMES:
        with refusing(f"{folder / name}: can't be read", f"{fix}`python -m mlm.cluster.certificates DIR` makes"):
            contents[name] = (folder / name).read_text(encoding="utf-8")
    return contents


def main(arguments: list[str]) -> int:
    """Makes the certificates in the folder that is the only argument; returns the exit code."""
    prepare_streams()
    try:
        if len(arguments) != 1:
            raise InputError("usage: python -m mlm.cluster.certificates FOLDER")
        make(UPath(arguments[0]))
    except StopError as error:
        print(f"mlm: {error}", file=sys.stderr)
        return error.code
    print(f"{arguments[0]}: {', '.join(NAMES)}; give this folder to the hosts of the cluster, and to nobody else")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
