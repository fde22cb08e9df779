"""Certificates of servers that packer must not trust, made by `openssl`."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

from tests.live.stand_in import StandIn

UNTRUSTED = {
    "self-signed": ("IP:127.0.0.1", "20990101000000Z", False, "certificate verify failed: self.signed"),
    "wrong host": ("DNS:other.test", "20990101000000Z", True, "certificate is not valid for '127.0.0.1'"),
    "expired": ("IP:127.0.0.1", "20200102000000Z", True, "certificate has expired"),
}
"""For whom a certificate is, until when, whether its issuer is trusted, and packer's words."""
AUTHORITY = """[ca]
default_ca = own
[own]
database = {folder}/index
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = host
[any]
commonName = supplied
[host]
subjectAltName = {name}
"""


def untrusted_server(kind: str, folder: Path) -> tuple[StandIn, dict[str, str]]:
    """A server with such a certificate, and the environment that says which issuers are trusted."""
    name, until, trusted, _ = UNTRUSTED[kind]
    (folder / "index").touch()
    (folder / "ca.cnf").write_text(AUTHORITY.format(folder=folder, name=name))
    key, request, made = (str(folder / each) for each in ("key.pem", "request.pem", "made.pem"))
    new = ["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=stand-in", "-keyout", key, "-out", request]
    sign = ["ca", "-selfsign", "-batch", "-notext", "-config", str(folder / "ca.cnf"), "-keyfile", key]
    sign += ["-in", request, "-startdate", "20200101000000Z", "-enddate", until, "-outdir", str(folder)]
    for words in (new, [*sign, "-out", made]):
        subprocess.run(["openssl", *words], check=True, capture_output=True)
    server = StandIn({"a": "/a"})
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made, key)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    return server, {"SSL_CERT_FILE": made if trusted else "/dev/null"}
