"""Keys by which islands know each other: a certificate for each, all signed by a key that nobody keeps."""

from __future__ import annotations

import ssl
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dsx.errors import ConfigError, DataError
from dsx.terminal import with_room

AUTHORITY = "ca.pem"
_NAME, _AUTHORITY_NAME = "dsx island ", "dsx islands"
_YEARS = 10
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def key_file(folder: Path, island: int) -> Path:
    """Where the private key and the certificate of an island lie."""
    return folder / f"island{island}.pem"


def write_keys(folder: Path, count: int) -> list[Path]:
    """Make keys for so many islands.

    Args:
        folder: Is made. ``ca.pem`` in it is for every site, ``island0.pem`` and so on are secret.
        count: How many islands there are.

    Raises:
        DataError: There are keys in the folder already, or it cannot be written.
    """
    # Here: nothing else of dsx needs it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    def named(words: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, words)])

    def certificate(words: str, key: ec.EllipticCurvePrivateKey, *, signs: bool) -> x509.Certificate:
        public, now = key.public_key(), datetime.now(UTC)
        usage = dict.fromkeys(_USAGES, False)
        builder = (
            x509.CertificateBuilder()
            .subject_name(named(words))
            .issuer_name(named(_AUTHORITY_NAME))
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(days=1))  # clocks of sites differ
            .not_valid_after(now + timedelta(days=365 * _YEARS))
        )
        key_usage = x509.KeyUsage(**usage | {"key_cert_sign" if signs else "digital_signature": True})
        for extension, critical in (
            (x509.BasicConstraints(ca=signs, path_length=0 if signs else None), True),
            (key_usage, True),
            (x509.SubjectKeyIdentifier.from_public_key(public), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical=critical)
        return builder.sign(signer, hashes.SHA256())

    pem, signer = serialization.Encoding.PEM, ec.generate_private_key(ec.SECP256R1())
    files = [folder / AUTHORITY, *(key_file(folder, island) for island in range(count))]
    begun: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (known := next((file for file in files if file.exists()), None)) is not None:
            raise DataError(
                str(known), "there are keys already, which islands may use", "name another folder"
            )
        begun.append(files[0])
        files[0].write_bytes(certificate(_AUTHORITY_NAME, signer, signs=True).public_bytes(pem))
        for island, file in enumerate(files[1:]):
            key = ec.generate_private_key(ec.SECP256R1())
            secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            begun.append(file)
            file.touch(mode=0o600)
            file.write_bytes(secret + certificate(f"{_NAME}{island}", key, signs=False).public_bytes(pem))
    except OSError as error:
        for file in begun:
            with suppress(OSError):
                file.unlink()
        fix = with_room(error, "name a folder that can be written")
        raise DataError(str(folder), f"keys cannot be written there: {error}", fix) from error
    return files


def context_of(folder: Path, island: int, *, serves: bool) -> ssl.SSLContext:
    """What an island makes connections with, on which both ends have to show a certificate of these keys.

    Raises:
        ConfigError: Its key cannot be read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if serves:
        # Nobody takes up a session again, and where an end closes without having read what came, such as
        # tickets, what it has sent is lost.
        context.num_tickets = 0
    context.check_hostname = False  # a certificate says which island it is, wherever that is
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / AUTHORITY)
        context.load_cert_chain(key_file(folder, island))
    except OSError as error:
        raise ConfigError(
            f'dsx.outer.keys = "{folder}"',
            f"it has no {AUTHORITY} and {key_file(folder, island).name} that can be used: {error}",
            "make keys with dsx islands keys FOLDER, once, and copy these two files to this site",
        ) from error
    return context


def island_of(connection: ssl.SSLSocket) -> int:
    """Which island the other end has shown that it is. Raises ValueError."""
    shown = connection.getpeercert() or {}
    names = dict(pair for part in shown.get("subject", ()) for pair in part)  # type: ignore[misc]
    return int(str(names.get("commonName", "")).removeprefix(_NAME))
