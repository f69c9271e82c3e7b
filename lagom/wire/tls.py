"""Keys, certificates and TLS contexts of a run: for its channel, and for connections between ranks of several hosts."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import subprocess

from lagom.wire.framing import anonymous_file

_DAYS = 90
_OPENSSL = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=lagom -keyout - -out -"
_TIMEOUT_S = 20.0
_NO_CHECK_TIME = 0x200000
"""X509_V_FLAG_NO_CHECK_TIME, for which Python has no name; set because a host's clock may be behind the driver's."""


class NoCertificate(RuntimeError):
    """This machine has no means to create a certificate."""


def certificate_of_a_run() -> tuple[ssl.SSLContext, str]:
    """Make a key and certificate for the driver's end of the channel; return its TLS context and the certificate (PEM).

    A process that connects to the driver accepts only this certificate.

    Raises:
        NoCertificate: if there is neither the Python package cryptography nor an openssl program that works.
    """
    pem = key_and_certificate()
    return _showing(pem), _certificate_in(pem)


def key_and_certificate() -> str:
    """Make a key and its certificate, and return both (PEM).

    Raises:
        NoCertificate: as ``certificate_of_a_run``.
    """
    return _by_package() or _by_program()


def contexts_of_ranks(pem: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS contexts of the accepting and the connecting end of a connection between ranks.

    Args:
        pem: key and certificate, the same for all ranks of a run.
    """
    accepting, connecting = _showing(pem), trusting(_certificate_in(pem))
    _trust(accepting, _certificate_in(pem))
    accepting.verify_mode = ssl.CERT_REQUIRED
    _show(connecting, pem)
    accepting.minimum_version = connecting.minimum_version = ssl.TLSVersion.TLSv1_3
    return accepting, connecting


def trusting(certificate: str) -> ssl.SSLContext:
    """Return the TLS context of a connecting end that accepts only ``certificate`` (PEM) from the other end."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # only this certificate is trusted, so its address does not matter
    _trust(context, certificate)
    return context


def _trust(context: ssl.SSLContext, certificate: str) -> None:
    context.load_verify_locations(cadata=certificate)
    context.verify_flags |= _NO_CHECK_TIME


def _showing(pem: str) -> ssl.SSLContext:
    """Return the TLS context of an accepting end that shows the certificate in ``pem``, which also has the key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.num_tickets = 0  # no client resumes a session
    _show(context, pem)
    return context


def _show(context: ssl.SSLContext, pem: str) -> None:
    fd = anonymous_file("key")  # ``ssl`` loads keys only from files, and the key must not be on a disk
    try:
        os.write(fd, pem.encode())
        os.lseek(fd, 0, os.SEEK_SET)
        context.load_cert_chain(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def _certificate_in(pem: str) -> str:
    begin = pem.index("-----BEGIN CERTIFICATE-----")
    return pem[begin : pem.index("-----END CERTIFICATE-----")] + "-----END CERTIFICATE-----\n"


def _by_package() -> str:
    """Return key and certificate (PEM), made by the package cryptography; "" if the package is missing."""
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
# certificate and no authority, so there is no host name to check. The key stays in the driver's memory. For connections
# between ranks of several hosts, and between hosts that copy the payload, there are another key and certificate, which
# all of them have. Pre-shared keys, which need no certificate, are in Python's ssl only from 3.13 on.
