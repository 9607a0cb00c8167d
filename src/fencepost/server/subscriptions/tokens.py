"""Callback and claim tokens: a signed statement that its bearer was given one wake.

A token is an HS256 JWT. It says which subscription, which incarnation of it, which generation, and
until when; whether that generation is still the current one is for the fence to decide, not for the
token. The library's own look at the wall clock is turned off: time comes from whoever asks.
"""

from __future__ import annotations

from typing import NamedTuple

import jwt

TOKEN_SECRET = "subscription-token-key"
KEY_BYTES = 32
_ALGORITHM = "HS256"


class Token(NamedTuple):
    """What a valid token says."""

    name: str
    incarnation: int
    generation: int


class BadToken(NamedTuple):
    """Not a token of ours, or one whose time is over."""

    detail: str


class Tokens:
    """Makes and reads tokens with one key."""

    def __init__(self, key: bytes, *, ttl_ms: int) -> None:
        self._key = key
        self._ttl_ms = ttl_ms

    def make(self, token: Token, *, now_ms: int) -> str:
        """A token that is good from now on."""
        return jwt.encode(
            {
                "sub": token.name,
                "inc": token.incarnation,
                "gen": token.generation,
                "exp": (now_ms + self._ttl_ms) // 1000,
            },
            self._key,
            algorithm=_ALGORITHM,
        )

    def read(self, text: str, *, now_ms: int) -> Token | BadToken:
        """What `text` says, once its signature is checked (in constant time) and its time."""
        try:
            claims = jwt.decode(
                text,
                self._key,
                algorithms=[_ALGORITHM],
                options={
                    "verify_exp": False,
                    "verify_iat": False,
                    "verify_nbf": False,
                    "require": ["sub", "inc", "gen", "exp"],
                },
            )
        except jwt.InvalidTokenError:
            return BadToken("the token is not one of this server's")
        if claims["exp"] * 1000 <= now_ms:
            return BadToken("the token has expired: claim again, or wait for the next wake")
        return Token(claims["sub"], claims["inc"], claims["gen"])
