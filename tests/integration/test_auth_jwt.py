"""JWTs on a real server: signed by the right key, for us, now, and about a principal we know."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.integration.auth_support import ALL, FORBIDDEN, ROOT, Place, code, place
from tests.integration.test_auth import refusal

ISSUER, AUDIENCE = "https://issuer.example", "fencepost"
ED = ed25519.Ed25519PrivateKey.generate()
FOREIGN = ed25519.Ed25519PrivateKey.generate()
EC = ec.generate_private_key(ec.SECP256R1())
RSA = rsa.generate_private_key(65537, 2048)
WORKERS = {
    "name": "workers",
    "subjects": ["worker-*", "root", "root2"],
    "grants": [{"streams": ["jobs/**"], "verbs": list(ALL)}],
}


def pem(key: Any) -> bytes:
    found: bytes = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return found


def jwks() -> str:
    keys = []
    kid: str
    key: Any
    algorithm: Any
    for kid, key, algorithm in (
        ("ed", ED, jwt.algorithms.OKPAlgorithm),
        ("ec", EC, jwt.algorithms.ECAlgorithm),
        ("rsa", RSA, jwt.algorithms.RSAAlgorithm),
    ):
        keys.append({**json.loads(algorithm.to_jwk(key.public_key())), "kid": kid, "use": "sig"})
    return json.dumps({"keys": keys})


def signed(
    key: Any = ED, algorithm: str = "EdDSA", kid: str | None = "ed", **claims: object
) -> str:
    now = int(time.time())
    about = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "sub": "worker-1",
        "exp": now + 600,
        "nbf": now - 10,
        **claims,
    }
    kept = {name: value for name, value in about.items() if value is not None}
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode(kept, key, algorithm=algorithm, headers=headers)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("jwt")
    (folder / "keys.json").write_text(jwks())
    with place(
        folder / "data",
        ROOT,
        WORKERS,
        jwt_keys=folder / "keys.json",
        jwt_issuer=ISSUER,
        jwt_audience=AUDIENCE,
        jwt_leeway_s=5,
    ) as found:
        yield found


def use(here: Place, token: str, path: str = "jobs/1", method: str = "PUT") -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    return httpx.request(method, f"{here.process.url}/v1/stream/{path}", headers=headers)


@pytest.mark.parametrize(
    ("key", "algorithm", "kid"), [(ED, "EdDSA", "ed"), (EC, "ES256", "ec"), (RSA, "RS256", "rsa")]
)
def test_a_good_jwt_is_its_subject_with_the_grants_of_its_entry(
    here: Place, key: Any, algorithm: str, kid: str
) -> None:
    token = signed(key, algorithm, kid)

    assert use(here, token).status_code in (200, 201)
    assert use(here, token).status_code == 200
    assert code(use(here, token, "orders/1")) == FORBIDDEN


NOW = int(time.time())


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(signed(FOREIGN), id="signed by another key"),
        pytest.param(signed(exp=NOW - 60), id="expired"),
        pytest.param(signed(exp=None), id="without an end"),
        pytest.param(signed(exp="soon"), id="with an end that is no time"),
        pytest.param(signed(nbf=NOW + 3600), id="not yet valid"),
        pytest.param(signed(iss="https://elsewhere.example"), id="of another issuer"),
        pytest.param(signed(iss=None), id="without an issuer"),
        pytest.param(signed(aud="another"), id="for another audience"),
        pytest.param(signed(aud=None), id="without an audience"),
        pytest.param(signed(sub=None), id="without a subject"),
        pytest.param(signed(sub="stranger"), id="about no principal we know"),
        pytest.param(signed(sub="worker-1\nroot"), id="about a name with a line in it"),
        pytest.param(signed(sub="worker-" + "x" * 200), id="about a name that is too long"),
        pytest.param(signed(sub="root"), id="about a principal that has a token"),
        pytest.param(signed(kid="none"), id="with a key that is not ours"),
        pytest.param(signed(kid=None), id="without the name of a key"),
        pytest.param(signed(EC, "ES256", "ed"), id="with another key's name"),
        pytest.param(signed(RSA, "RS512", "rsa"), id="by an algorithm that is not pinned"),
        pytest.param(signed("", "none", "ed"), id="not signed at all"),
        pytest.param(signed().rsplit(".", 1)[0] + ".", id="whose signature was taken off"),
        pytest.param("a.b.c", id="that is none"),
        pytest.param("..", id="of dots"),
    ],
)
def test_a_jwt_that_proves_nothing_is_a_401(here: Place, token: str) -> None:
    answer = use(here, token)

    assert code(answer) == (401, "unauthorized")
    assert 'error="invalid_token"' in answer.headers["WWW-Authenticate"]


def test_a_public_key_cannot_be_used_as_a_secret(here: Place) -> None:
    """The oldest trick: an HMAC keyed with the public key."""
    import base64
    import hashlib
    import hmac

    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    for kid, key in (("rsa", RSA), ("ed", ED)):
        claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "worker-1", "exp": int(time.time()) + 600}
        head = f"{part({'alg': 'HS256', 'typ': 'JWT', 'kid': kid})}.{part(claims)}"
        mac = hmac.new(pem(key), head.encode(), hashlib.sha256).digest()
        token = f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"

        assert code(use(here, token)) == (401, "unauthorized")


def test_a_changed_claim_breaks_the_signature_also_after_the_jwt_was_seen(here: Place) -> None:
    good = signed()
    assert use(here, good).status_code in (200, 201)
    other = signed(sub="worker-2").split(".")
    first = good.split(".")

    assert code(use(here, ".".join((first[0], other[1], first[2]))))[0] == 401
    assert use(here, good).status_code == 200


def test_a_jwt_that_was_good_ends_when_it_says(here: Place) -> None:
    """It is remembered as good, but not beyond its end and the leeway."""
    token = signed(exp=int(time.time()) - 4)
    answers = set()
    deadline = time.monotonic() + 30
    while 401 not in answers and time.monotonic() < deadline:
        answers.add(use(here, token).status_code)

    assert answers in ({200, 401}, {201, 401}, {201, 200, 401}, {401})
    assert use(here, token).status_code == 401


def test_each_subject_is_a_principal_of_its_own(here: Place) -> None:
    def send(subject: str, epoch: int, seq: int) -> httpx.Response:
        headers = {
            "Authorization": f"Bearer {signed(sub=subject)}",
            "Content-Type": "application/json",
            "Producer-Id": "task:1",
            "Producer-Epoch": str(epoch),
            "Producer-Seq": str(seq),
        }
        url = f"{here.process.url}/v1/stream/jobs/own"
        return httpx.post(url, headers=headers, content=b"1")

    use(here, signed(), "jobs/own")

    assert send("worker-1", 0, 0).status_code == 200
    assert code(send("worker-2", 0, 1)) == (403, "producer_held")
    assert send("worker-1", 0, 1).status_code == 200


JWT = f'[auth]\njwt_issuer = "{ISSUER}"\njwt_audience = "{AUDIENCE}"\n'
ENTRY = '[[principals]]\nname = "w"\nsubjects = "*"\n'


def test_one_key_as_pem_needs_no_name(tmp_path: Path) -> None:
    (tmp_path / "key.pem").write_bytes(pem(ED))
    keys = tmp_path / "key.pem"

    with place(
        tmp_path / "data", WORKERS, jwt_keys=keys, jwt_issuer=ISSUER, jwt_audience=AUDIENCE
    ) as here:
        assert use(here, signed(kid=None)).status_code == 201
        assert use(here, signed(FOREIGN, kid=None)).status_code == 401


@pytest.mark.parametrize(
    ("content", "more", "said"),
    [
        (None, "", "cannot be read"),
        ("nonsense", "", "neither a JWKS nor a PEM public key"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "", "holds a secret"),
        ('{"keys": 3}', "", "is not a JWKS"),
        ('{"keys": []}', "", "no key that fits"),
        ("private", "", "holds a private key"),
        (pem(ED).decode(), 'jwt_algorithms = ["HS256"]\n', "jwt_algorithms has 'HS256'"),
        (pem(ED).decode(), 'jwt_algorithms = ["none"]\n', "jwt_algorithms has 'none'"),
        (pem(ED).decode(), 'jwt_algorithms = ["RS256"]\n', "no key that fits jwt_algorithms"),
    ],
)
def test_keys_that_cannot_be_meant_are_refused_with_a_sentence(
    tmp_path: Path, content: str | None, more: str, said: str
) -> None:
    file = tmp_path / "keys"
    if content == "private":
        content = ED.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode()
    if content is not None:
        file.write_text(content)

    assert said in refusal(tmp_path, f'{JWT}jwt_keys = "{file}"\n{more}{ENTRY}')
