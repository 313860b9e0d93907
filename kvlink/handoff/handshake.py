"""Both nodes prove that they share a secret, before either tells anything worth knowing.

::

    dialer                                             acceptor
      Hello{versions, nonce}            ------------>
                                        <------------  Challenge{version, nonce}
      Proof{HMAC(secret, "dialer"...)}  ------------>
                                        <------------  Proof{HMAC(secret, "acceptor"...)}
      everything sealed from here on, see FramedSocket.seal
                                        <------------  IntroduceSource{epoch, layout}
      IntroduceTarget{epoch, what it wants} --------->
                                        <------------  Welcome{how the source's regions are reached}
      the native core speaks from here on

    or, where the dialer only wants to ask, see kvlink/handoff/ask.py:
      IntroduceAsker{epoch, name, address} --------->
      Ask{number, kind, body}           ------------>
                                        <------------  Answer{number, body}

Each proof covers its role and every byte of Hello and Challenge. A proof sent back to its maker
names the wrong role; one of an earlier connection names other nonces; a version that somebody
lowered on the way is no longer what was proved. A node without a secret proves an empty one, so
that it can never be taken for a node that has one. In place of any message either side may send
``Refuse`` and hang up.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Sequence
from typing import Any, TypeVar, cast

from kvlink import wire
from kvlink.errors import (
    AuthenticationFailed,
    ConfigError,
    KvlinkError,
    LayoutMismatch,
    ProtocolError,
    VersionMismatch,
    error_class,
)
from kvlink.handoff.framed_socket import FramedSocket

__all__ = ["Keyring", "Secret", "Secrets", "answer", "prove", "receive", "receive_wish", "refuse", "secrets_of", "send"]

Secret = bytes | str
"""What both nodes share: the more random, the better; 32 random bytes are plenty."""

Secrets = tuple[bytes, ...]
"""The secrets that are valid now, the preferred one first; a single empty one stands for none."""

_NONCE_BYTES = 32
_HOW_TO_SHARE = ": give both nodes the same one, or look for who altered on its way a nonce, a version or a proof"
# What a peer that has proved nothing may make this side raise.
_REFUSALS_BEFORE_PROOF = {"AuthenticationFailed", "VersionMismatch", "ProtocolError", "Busy", "Closed", "NotReady"}

_M = TypeVar(
    "_M",
    bound=wire.Hello
    | wire.Challenge
    | wire.Proof
    | wire.IntroduceTarget
    | wire.IntroduceSource
    | wire.IntroduceAsker
    | wire.Welcome
    | wire.Ask
    | wire.Answer,
)


def secrets_of(secret: Secret | Sequence[Secret] | None) -> Secrets:
    """Return the valid secrets that the user's `secret` names.

    Two are for a rotation: give every node (old, new), then (new, old), then new alone.

    Raises
    ------
    ConfigError
        If one is empty or of another type, or there are none or more than two.
    """
    if secret is None:
        return (b"",)
    if not isinstance(secret, bytes | str | Sequence):
        raise ConfigError(f"secret: must be str or bytes, or two of them, not {type(secret).__name__}")
    several = [secret] if isinstance(secret, bytes | str) else list(secret)
    if not 1 <= len(several) <= 2:
        raise ConfigError(f"secret: {len(several)} secrets given; give one, or two during a rotation")
    for one in several:
        if not isinstance(one, bytes | str) or not one:
            raise ConfigError("secret: must be a non-empty str or bytes, or None for loopback only")
    return tuple(one.encode() if isinstance(one, str) else one for one in several)


class Keyring:
    """The secrets that are valid now. Thread-safe: a handshake uses those of its beginning to its end."""

    def __init__(self, secrets: Secrets) -> None:
        self._secrets = secrets

    @property
    def secrets(self) -> Secrets:
        """The preferred one first."""
        return self._secrets

    def rotate(self, secrets: Secrets) -> None:
        """Let handshakes use `secrets` from now on."""
        self._secrets = secrets


def prove(link: FramedSocket, secrets: Secrets) -> None:
    """Authenticate as the side that connected, and seal `link`.

    Raises
    ------
    AuthenticationFailed
        If the two nodes share no secret.
    VersionMismatch
        If they speak no common version.
    ProtocolError, PeerLost, DeadlineExceeded, Closed
        If the other side breaks the protocol or the connection, time runs out, the node closes.
    """
    ours = wire.versions()
    hello = wire.encode(wire.Hello(magic=wire.MAGIC, versions=ours, nonce=os.urandom(_NONCE_BYTES)))
    link.send(hello)
    raw_challenge = link.receive()
    challenge = _accept(wire.decode(raw_challenge, wire.Challenge), proven=False)
    if challenge.version not in ours:
        raise VersionMismatch(
            f"the peer chose version {challenge.version}, which was not among {ours}: upgrade the older one"
        )
    link.speak(wire.DIALECTS[challenge.version])
    transcript = _transcript(hello, raw_challenge)
    macs = [_derive(secret, "dialer proof", transcript) for secret in secrets]
    send(link, wire.Proof(macs=macs))
    proof = _accept(link.dialect.decode(link.receive(), wire.Proof), proven=False)
    secret = _matching(secrets, "acceptor proof", transcript, proof)
    if secret is None:
        raise AuthenticationFailed(f"the peer does not know the secret of this node{_HOW_TO_SHARE}")
    link.seal(
        send_key=_derive(secret, "dialer seal", transcript),
        receive_key=_derive(secret, "acceptor seal", transcript),
    )


def answer(link: FramedSocket, secrets: Secrets) -> None:
    """Authenticate as the side that was connected to, and seal `link`.

    Nothing depends on the secret before the dialer has proved it. Raises as `prove` does.
    """
    raw_hello = link.receive()
    hello = _accept(wire.decode(raw_hello, wire.Hello), proven=False)
    if hello.magic != wire.MAGIC:
        raise ProtocolError(f"expected the magic word {wire.MAGIC!r} and got {hello.magic!r}")
    ours = wire.versions()
    version = next((version for version in ours if version in hello.versions), None)
    if version is None:
        older = "the acceptor" if max(ours) < max(hello.versions) else "the dialer"
        raise VersionMismatch(
            f"the acceptor speaks versions {ours} and the dialer {hello.versions}: upgrade {older}, which is older"
        )
    challenge = wire.encode(wire.Challenge(version=version, nonce=os.urandom(_NONCE_BYTES)))
    link.send(challenge)
    link.speak(wire.DIALECTS[version])
    transcript = _transcript(raw_hello, challenge)
    proof = _accept(link.dialect.decode(link.receive(), wire.Proof), proven=False)
    secret = _matching(secrets, "dialer proof", transcript, proof)
    if secret is None:
        raise AuthenticationFailed(f"the two nodes do not share a secret{_HOW_TO_SHARE}")
    send(link, wire.Proof(macs=[_derive(secret, "acceptor proof", transcript)]))
    link.seal(
        send_key=_derive(secret, "acceptor seal", transcript),
        receive_key=_derive(secret, "dialer seal", transcript),
    )


def send(link: FramedSocket, message: wire.Message) -> None:
    """Send one message as the dialect of `link` writes it. Raises as ``FramedSocket.send`` does."""
    link.send(link.dialect.encode(message))


def receive(link: FramedSocket, expected: type[_M]) -> _M:
    """Return the next message of an authenticated peer.

    Raises
    ------
    KvlinkError
        The peer's own reason when it refused.
    ProtocolError, PeerLost, DeadlineExceeded, Closed
        As in `prove`.
    """
    # A frame that was altered is named by what was awaited; of several, by the first.
    awaited = getattr(expected, "__args__", (expected,))[0].__name__
    return _accept(link.dialect.decode(link.receive(awaited), expected), proven=True)


def receive_wish(link: FramedSocket) -> wire.IntroduceTarget | wire.IntroduceAsker:
    """Return what an authenticated dialer wants: bytes, or to ask. Raises as ``receive`` does."""
    if not link.dialect.asks:
        return receive(link, wire.IntroduceTarget)
    either = cast("Any", wire.IntroduceTarget | wire.IntroduceAsker)
    wish: wire.IntroduceTarget | wire.IntroduceAsker = receive(link, either)
    return wish


def refuse(link: FramedSocket, error: KvlinkError) -> None:
    """Tell the peer why this side hangs up, if that can be done without waiting."""
    mismatch = error if isinstance(error, LayoutMismatch) else LayoutMismatch()
    refusal = wire.Refuse(
        code=type(error).__name__,
        message=str(error)[:1024],
        field=str(mismatch.field)[:256],
        source_value=str(mismatch.source_value)[:256],
        target_value=str(mismatch.target_value)[:256],
    )
    link.try_send_last(link.dialect.encode(refusal))


def _accept(message: _M | wire.Refuse, *, proven: bool) -> _M:
    if not isinstance(message, wire.Refuse):
        return message
    text = f"the peer refused: {message.message}"
    if not proven and message.code not in _REFUSALS_BEFORE_PROOF:
        raise ProtocolError(text)
    if message.code == LayoutMismatch.__name__:
        raise LayoutMismatch(
            text, field=message.field, source_value=message.source_value, target_value=message.target_value
        )
    raise error_class(message.code)(text)


def _transcript(hello: bytes, challenge: bytes) -> bytes:
    return hashlib.sha256(wire.frame(hello) + wire.frame(challenge)).digest()


def _derive(secret: bytes, purpose: str, transcript: bytes) -> bytes:
    return hmac.digest(secret, f"kvlink {purpose}\0".encode() + transcript, "sha256")


def _matching(secrets: Secrets, purpose: str, transcript: bytes, proof: wire.Proof) -> bytes | None:
    matching = None
    for secret in secrets:
        expected = _derive(secret, purpose, transcript)
        for mac in proof.macs:
            if hmac.compare_digest(expected, mac):
                matching = secret
    return matching
