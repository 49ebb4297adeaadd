"""Certificates that admit to a Dask cluster; `python -m mlm.engine.certificates FOLDER` makes them by hand."""

import argparse
from pathlib import Path
from typing import Any

from mlm.paths import UPath, make_folder, refusing, write_secret
from mlm.text import prepare_streams

NAMES = ("ca.pem", "cert.pem", "key.pem")


def make(folder: UPath | Path) -> None:
    """Writes a certificate, which is its own authority, and its key. Raises InputError."""
    from distributed.security import Security

    security = Security.temporary()
    contents = (security.tls_ca_file, security.tls_client_cert, security.tls_client_key)
    with refusing(f"{folder}: can't be written", "choose another folder"):
        make_folder(folder)
        for name, content in zip(NAMES, contents, strict=True):
            write_secret(folder / name, content)


def load_security(folder: UPath | Path) -> Any:
    """Returns Dask's mutual TLS with the certificates in a folder; raises InputError."""
    from distributed.security import Security

    fix = (
        "--engine-certificates=DIR names the folder of ca.pem, cert.pem and key.pem, which "
        "`python -m mlm.engine.certificates DIR` makes"
    )
    contents = []
    for name in NAMES:
        with refusing(f"{folder / name}: can't be read", fix):
            contents.append((folder / name).read_text(encoding="utf-8"))
    authority, certificate, key = contents
    return Security(
        require_encryption=True,
        tls_ca_file=authority,
        tls_client_cert=certificate,
        tls_client_key=key,
        tls_scheduler_cert=certificate,
        tls_scheduler_key=key,
        tls_worker_cert=certificate,
        tls_worker_key=key,
    )


def main() -> None:
    """Makes the certificates in the folder that is the only argument."""
    prepare_streams()
    parser = argparse.ArgumentParser(prog="python -m mlm.engine.certificates", description=__doc__)
    parser.add_argument("folder", type=UPath)
    folder = parser.parse_args().folder
    make(folder)
    print(f"{folder}: {', '.join(NAMES)}; give it to the hosts of the cluster, and to nobody else")


if __name__ == "__main__":
    main()
