"""The guard at work: a name server is believed once, checked, and its answer connected to."""

import datetime
import ipaddress
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fencepost.server.subscriptions.security import Guard, UnsafeTargetError, is_loopback, is_public
from fencepost.server.subscriptions.webhooks import Delivered, Undelivered, Webhooks
from tests.integration.subscriptions_support import DONE, Receiver, Reply


class Names:
    """A name server that answers as told, each answer once, the last one for ever."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append(host)
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def webhooks(guard: Guard, *, tls: ssl.SSLContext | None = None) -> Webhooks:
    return Webhooks(guard, connections_max=4, response_bytes_max=1000, ssl_context=tls)


@pytest.mark.parametrize(
    "address",
    [
        "10.1.2.3",
        "127.0.0.1",
        "169.254.169.254",
        "192.168.0.1",
        "172.31.255.255",
        "100.127.0.1",
        "0.0.0.0",
        "198.18.0.1",
        "192.0.0.8",
        "203.0.113.9",
        "224.0.0.1",
        "240.0.0.1",
        "::",
        "::1",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
        "fe80::1%eth0",
        "fd00::1",
        "ff02::1",
        "2001:db8::1",
        "2001::1",
        "2002:808:808::1",
        "garbage",
    ],
)
async def test_a_name_with_an_address_inside_is_refused(address: str) -> None:
    guard = Guard(allow_localhost=True, resolver=Names([address]))

    with pytest.raises(UnsafeTargetError):
        await guard.addresses(guard.check_url("https://worker.example/"))


async def test_one_address_inside_is_enough_to_refuse_a_name() -> None:
    guard = Guard(allow_localhost=True, resolver=Names(["8.8.8.8", "10.0.0.1"]))

    with pytest.raises(UnsafeTargetError):
        await guard.addresses(guard.check_url("https://worker.example/"))


async def test_a_public_name_is_let_through() -> None:
    public = ["8.8.8.8", "2606:4700::1111"]
    guard = Guard(allow_localhost=False, resolver=Names(public))

    assert await guard.addresses(guard.check_url("https://worker.example:8443/hook")) == public


def test_localhost_is_for_development_only() -> None:
    for url in ("http://localhost:1/", "http://127.0.0.1/", "https://localhost/"):
        Guard(allow_localhost=True).check_url(url)
        with pytest.raises(UnsafeTargetError):
            Guard(allow_localhost=False).check_url(url)


async def test_localhost_that_resolves_elsewhere_is_refused() -> None:
    guard = Guard(allow_localhost=True, resolver=Names(["8.8.8.8"]))

    with pytest.raises(UnsafeTargetError):
        await guard.addresses(guard.check_url("http://localhost/"))


async def test_a_name_that_turns_inside_after_its_creation_is_refused_at_delivery() -> None:
    names = Names(["8.8.8.8"], ["127.0.0.1"])
    guard = Guard(allow_localhost=True, resolver=names)
    with Receiver() as receiver:
        url = f"https://worker.example:{receiver.port}/hook"
        await guard.addresses(guard.check_url(url))

        client = webhooks(guard)
        delivery = await client.post(url, b"{}", [], timeout_ms=5000)
        await client.close()

        assert isinstance(delivery, Undelivered)
        assert "refused" in delivery.reason
        assert receiver.is_empty


async def test_a_delivery_resolves_once_and_goes_where_that_led() -> None:
    names = Names(["127.0.0.1"], ["10.0.0.1"])
    with Receiver(DONE) as receiver:
        client = webhooks(Guard(allow_localhost=True, resolver=names))

        delivery = await client.post(
            f"http://localhost:{receiver.port}/", b"{}", [], timeout_ms=5000
        )
        await client.close()

        assert delivery == Delivered(done=True)
        assert names.asked == ["localhost"]


async def test_tls_verifies_the_name_although_the_address_is_dialled(tmp_path: Path) -> None:
    served, trusted = certificate(tmp_path, "localhost")
    asked: list[str | None] = []
    served.sni_callback = lambda _, name, __: asked.append(name)
    with Receiver(DONE, tls=served) as receiver:
        guard = Guard(allow_localhost=True, resolver=Names(["127.0.0.1"]))
        client = webhooks(guard, tls=trusted)

        named = await client.post(f"https://localhost:{receiver.port}/", b"{}", [], timeout_ms=5000)
        misnamed = await client.post(
            f"https://127.0.0.1:{receiver.port}/", b"{}", [], timeout_ms=5000
        )
        await client.close()

    assert named == Delivered(done=True)
    assert asked[0] == "localhost"
    assert isinstance(misnamed, Undelivered)


def certificate(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for `name`, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + datetime.timedelta(days=36_500))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    (folder / "certificate.pem").write_bytes(pem)
    (folder / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    return served, ssl.create_default_context(cadata=pem.decode())


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (Reply(), Delivered(done=False)),
        (DONE, Delivered(done=True)),
        (Reply(204, body=b""), Delivered(done=False)),
        (Reply(body=b"not json"), Delivered(done=False)),
        (Reply(body=b'{"done": "true"}'), Delivered(done=False)),
        (Reply(body=b'{"done": true}' + b" " * 2000), Delivered(done=False)),
        (Reply(302, headers={"Location": "http://127.0.0.1:1/"}), Undelivered("answered 302")),
        (Reply(404), Undelivered("answered 404")),
        (Reply(500), Undelivered("answered 500")),
    ],
)
async def test_what_a_webhook_answers_and_what_it_means(
    reply: Reply, expected: Delivered | Undelivered
) -> None:
    with Receiver(reply) as receiver:
        client = webhooks(Guard(allow_localhost=True))

        delivery = await client.post(receiver.url, b"{}", [], timeout_ms=5000)
        await client.close()

        assert delivery == expected


async def test_a_webhook_that_nobody_serves_or_that_never_answers_is_a_failure() -> None:
    client = webhooks(Guard(allow_localhost=True))
    with Receiver() as receiver:
        gone = receiver.url
    refused = await client.post(gone, b"{}", [], timeout_ms=5000)

    hold = threading.Event()
    with Receiver(Reply(hold=hold)) as receiver:
        silent = await client.post(receiver.url, b"{}", [], timeout_ms=100)
        hold.set()
    await client.close()

    assert isinstance(refused, Undelivered)
    assert silent == Undelivered("no answer within 100 ms")


async def test_a_name_that_cannot_be_resolved_is_a_failure() -> None:
    async def nothing(host: str, port: int) -> Sequence[str]:
        raise OSError("no such host")

    client = webhooks(Guard(allow_localhost=False, resolver=nothing))

    delivery = await client.post("https://worker.example/", b"{}", [], timeout_ms=5000)
    await client.close()

    assert isinstance(delivery, Undelivered)


def test_only_addresses_of_the_public_internet_are_public() -> None:
    assert is_public(ipaddress.ip_address("8.8.8.8"))
    assert is_public(ipaddress.ip_address("2606:4700::1111"))
    assert not is_public(ipaddress.ip_address("::ffff:8.8.8.8"))


def test_a_server_on_loopback_is_known_as_such() -> None:
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("server.example")
