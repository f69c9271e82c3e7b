"""``certificate_of_a_run``: create the key and certificate that encrypt the channel of one run."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import subprocess

from lagom.wire.server import anonymous_file

_DAYS = 90
_OPENSSL = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=lagom -keyout - -out -"
_TIMEOUT_S = 20.0


class NoCertificate(RuntimeError):
    """No means to create a certificate were found."""


def certificate_of_a_run() -> tuple[ssl.SSLContext, str]:
    """Return the TLS context of the driver's end, and the certificate (PEM), the only one that its ranks trust.

    Raises:
        NoCertificate: if there is neither Python's cryptography nor an openssl program.
    """
    pem = _by_package() or _by_program()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # no client resumes a session
    fd = anonymous_file("key")  # ssl reads only files, and the key must not be on a disk
    try:
        os.write(fd, pem.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return context, pem[begin : pem.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"


def _by_package() -> str:
    """Return key and certificate (PEM); "" if the package is missing."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        return ""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "lagom")])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    text: bytes = key.private_bytes(pem, pkcs8, serialization.NoEncryption()) + made.public_bytes(pem)
    return text.decode()


def _by_program() -> str:
    program = shutil.which("openssl")
    if program is None:
        raise NoCertificate("found neither the Python package cryptography nor an openssl program")
    command = [program, *_OPENSSL.split(), "-days", str(_DAYS)]
    try:
        made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or "").strip()
        raise NoCertificate(f"{program} made no certificate: {said or error}") from error
    return made.stdout


# Note [Encryption]
#
# If Spark encrypts its traffic, the channel is encrypted too, by TLS with a key and a certificate made for the run. The
# certificate travels to the ranks with the secret, inside Spark's job, which Spark encrypts. Ranks trust only this
# certificate and no authority, so there is no host name to check. The key stays in the driver's memory. Pre-shared
# keys, which need no certificate, are in Python's ssl only from 3.13 on.
