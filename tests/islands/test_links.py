"""Messages over TCP: whole, broken, too late, refused, and what a listener and an inbox make of them."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

import pytest

from dsx.errors import ConfigError
from dsx.islands.links import (
    Arrivals,
    Connection,
    Header,
    LinkError,
    Listener,
    address_of,
    doubts,
    own_address,
)

PATIENCE = 60.0
SHORT = 0.05
PART = {"attempt": "a", "phase": "mean", "island": 1}


@contextmanager
def raw(patience: float = PATIENCE) -> Iterator[tuple[socket.socket, Connection]]:
    """A socket that says what it likes, and the link at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        link = Connection.to(address(server), patience_seconds=patience, connect_seconds=PATIENCE)
        stack.callback(link.close)
        other, _ = server.accept()
        other.settimeout(PATIENCE)
        yield stack.enter_context(other), link


@contextmanager
def listening(handled: SimpleQueue[Any], *, kinds: tuple[str, ...] = ("word",)) -> Iterator[Listener]:
    """A listener that puts down what it hears, and None for a connection that has ended."""
    listener = Listener(None, PATIENCE, moved=lambda header, count: None, lost=lambda link: handled.put(None))
    listener.start(dict.fromkeys(kinds, lambda link, header, payload: handled.put((header, bytes(payload)))))
    try:
        yield listener
    finally:
        listener.close()


def address(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


def connected(listener: Listener) -> Connection:
    return Connection.to(f"127.0.0.1:{listener.port}", patience_seconds=PATIENCE, connect_seconds=PATIENCE)


def frame(header: bytes, payload: bytes = b"", *, mark: bytes = b"dsx1", **sizes: int) -> bytes:
    """A message as it is on the wire: a mark, the sizes of header and payload, header and payload."""
    head, size = sizes.get("head", len(header)), sizes.get("size", len(payload))
    return struct.pack("!4sIQ", mark, head, size) + header + payload


def test_messages_come_whole_and_in_order_and_their_bytes_are_counted() -> None:
    payloads = [b"", b"x", bytes(range(256)) * 20_000]  # the last one is more than a socket's buffers hold
    with raw() as (other, link):
        receiver, sent, told, counts = Connection(other, PATIENCE), list[int](), list[int](), list[int]()

        def send() -> None:
            for number, payload in enumerate(payloads):
                counts.append(link.send({"number": number, "who": "île"}, payload, sent.append))

        sender = threading.Thread(target=send)
        sender.start()
        for number, payload in enumerate(payloads):
            header, got = receiver.receive(moved=lambda header, count: told.append(count))
            assert (header, bytes(got)) == ({"number": number, "who": "île"}, payload)
        sender.join()
    assert sum(told) == sum(map(len, payloads))
    heads = [json.dumps({"number": number, "who": "île"}).encode() for number in range(len(payloads))]
    assert counts == [16 + len(head) + len(payload) for head, payload in zip(heads, payloads, strict=True)]
    assert sum(sent) == sum(counts)


def test_what_two_threads_send_at_once_does_not_mix() -> None:
    with raw() as (other, link):
        receiver = Connection(other, PATIENCE)
        senders = [
            threading.Thread(
                target=lambda who=who: [link.send({"who": who}, bytes([who]) * 300_000) for _ in range(10)]
            )
            for who in range(3)
        ]
        for sender in senders:
            sender.start()
        heard = [receiver.receive() for _ in range(30)]
        for sender in senders:
            sender.join()
    assert sorted(header["who"] for header, _ in heard) == sorted([*range(3)] * 10)
    assert all(set(payload) == {header["who"]} for header, payload in heard)


BROKEN = {
    "another mark": (frame(b"{}", mark=b"HTTP"), "no message of dsx's"),
    "header of many bytes": (frame(b"{}", head=1 << 27), "no message of dsx's"),
    "header that is no JSON": (frame(b"{]"), "no message of dsx's"),
    "header that is no text": (frame(b"\xff\xfe"), "no message of dsx's"),
    "header without end": (frame(b"[" * 100_000), "no message of dsx's"),
    "header that is a list": (frame(b"[1]"), "no message of dsx's"),
    "payload beyond all memory": (frame(b"{}", size=1 << 62), "too large"),
    "nothing at all": (b"", "closed the connection"),
    "half of the sizes": (frame(b"{}")[:7], "closed the connection"),
    "half of the header": (frame(b'{"kind": "word"}')[:20], "closed the connection"),
    "half of the payload": (frame(b"{}", b"1234", size=8), "closed the connection"),
}


@pytest.mark.parametrize(("data", "what"), BROKEN.values(), ids=BROKEN)
def test_a_broken_message_is_an_error(data: bytes, what: str) -> None:
    with raw() as (other, link):
        other.sendall(data)
        other.shutdown(socket.SHUT_WR)
        with pytest.raises(LinkError, match=what):
            link.receive()


@pytest.mark.parametrize("begun", [b"", frame(b"{}")[:7], frame(b"{}", b"12", size=9)], ids=len)
def test_an_end_that_says_nothing_more_is_not_waited_for_longer_than_agreed(begun: bytes) -> None:
    with raw(SHORT) as (other, link):
        other.sendall(begun)
        with pytest.raises(LinkError, match=r"nothing came for 0\.05 s"):
            link.receive(within_seconds=None if begun else SHORT)


def test_an_end_that_takes_nothing_is_not_waited_for_longer_than_agreed() -> None:
    with raw(SHORT) as (_, link), pytest.raises(LinkError, match="sending broke off"):
        link.send({}, bytes(1 << 26))


def test_closing_wakes_who_waits_and_later_use_is_an_error() -> None:
    with raw() as (_, link):
        waiting, errors = threading.Event(), SimpleQueue[LinkError]()

        def wait() -> None:
            waiting.set()
            try:
                link.receive()
            except LinkError as error:
                errors.put(error)

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        link.close()
        thread.join(PATIENCE)
        assert errors.get(timeout=PATIENCE)
        for use in (link.receive, lambda: link.send({})):
            with pytest.raises(LinkError):
                use()
        link.close()


def test_a_connection_that_is_refused_is_an_error() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody else gets the port, and nobody listens
        with pytest.raises(LinkError, match="cannot be connected"):
            Connection.to(address(bound), patience_seconds=PATIENCE, connect_seconds=PATIENCE)
    with pytest.raises(LinkError, match="cannot be connected"):
        Connection.to("no port", patience_seconds=PATIENCE, connect_seconds=PATIENCE)


def test_a_listener_hands_each_message_to_its_handler_and_tells_of_the_end() -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    with listening(heard) as listener:
        link = connected(listener)
        link.send({"kind": "word", "n": 1}, b"abc")
        link.send({"kind": "word", "n": 2})
        assert heard.get(timeout=PATIENCE) == ({"kind": "word", "n": 1}, b"abc")
        assert heard.get(timeout=PATIENCE) == ({"kind": "word", "n": 2}, b"")
        assert listener.connected == 1
        link.close()
        assert heard.get(timeout=PATIENCE) is None
        assert listener.connected == 0


@pytest.mark.parametrize(
    "data", [frame(b'{"kind": "secret"}'), frame(b"{}"), frame(b'{"kind": [1]}'), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_who_says_something_else_loses_its_connection_and_nobody_else_does(data: bytes) -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    with listening(heard) as listener, socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        link = connected(listener)
        stranger.settimeout(PATIENCE)
        stranger.sendall(data)
        assert heard.get(timeout=PATIENCE) is None
        assert stranger.recv(1) == b""
        link.send({"kind": "word"})
        assert heard.get(timeout=PATIENCE) == ({"kind": "word"}, b"")
        link.close()


def test_a_listener_that_ends_ends_its_connections_and_takes_no_more() -> None:
    heard: SimpleQueue[Any] = SimpleQueue()
    with listening(heard) as listener:
        link = connected(listener)
        link.send({"kind": "word"})
        heard.get(timeout=PATIENCE)
        listener.close()
        with pytest.raises(LinkError):
            link.receive(within_seconds=PATIENCE)
        with pytest.raises(LinkError, match="cannot be connected"):
            connected(listener)
        link.close()


def test_a_port_that_another_program_has_is_one_clear_error() -> None:
    with listening(SimpleQueue()) as listener, pytest.raises(ConfigError) as caught:
        Listener(f"host:{listener.port}", PATIENCE, moved=lambda header, count: None, lost=lambda link: None)
    assert f"port {listener.port}" in str(caught.value)
    assert "another port" in str(caught.value)


def test_an_inbox_gives_a_part_once_it_has_come() -> None:
    inbox = Arrivals()
    came: list[Header] = []

    def comes() -> None:
        came.append(PART)
        threading.Thread(target=inbox.put, args=(None, PART, bytearray(b"12"))).start()

    assert inbox.take("a", "mean", 1, PATIENCE, comes) == b"12"
    assert came == [PART]


def test_an_inbox_waits_for_an_island_as_long_as_something_moves_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inbox, now, looks = Arrivals(), [100.0], list[int]()
    monkeypatch.setattr("dsx.islands.links.time.monotonic", lambda: now[0])

    def look() -> None:
        """Its traffic grows ten times; then it says the same again and again."""
        looks.append(len(looks))
        now[0] += 0.75 * SHORT
        inbox.beat(None, {"island": 1, "traffic": min(len(looks), 10)}, bytearray())  # type: ignore[arg-type]

    with pytest.raises(LinkError, match=r"nothing came from island 1 for 0\.05 s"):
        inbox.take("a", "mean", 1, SHORT, look)
    assert len(looks) == 12  # the tenth is the last that counts, and two more are less than it may be silent


def test_an_inbox_drops_what_is_of_other_attempts() -> None:
    inbox = Arrivals()
    for attempt in ("a", "b"):
        inbox.put(None, {**PART, "attempt": attempt}, bytearray(attempt, "ascii"))  # type: ignore[arg-type]
    inbox.begin("b")
    assert inbox.take("b", "mean", 1, SHORT) == b"b"
    with pytest.raises(LinkError):
        inbox.take("a", "mean", 1, SHORT)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:0", "host:65536", "host:-1", "host:x"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(ValueError, match=f"^{text}$"):
        address_of(text)


def test_addresses() -> None:
    assert address_of("host:29700") == ("host", 29700)
    assert address_of("[fe80::1]:1") == ("fe80::1", 1)
    assert own_address("127.0.0.1:29700") == "127.0.0.1"


def test_doubts_about_addresses(monkeypatch):
    assert doubts(("127.0.0.1:29700", "localhost:29700", "192.0.2.1:29700"), 0) == []
    # 192.0.2.0/24 is nobody's (RFC 5737).
    (doubt,) = doubts(("127.0.0.1:29700", "192.0.2.1:29700"), 1)
    assert doubt.startswith("dsx.outer.meet[1] = 192.0.2.1:29700: that is no address of this machine.")
    assert doubt.endswith("is dsx.outer.island = 1 meant?")

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    (doubt,) = doubts(("hostb:29700",), 0)
    assert doubt.startswith(
        "dsx.outer.meet[0] = hostb:29700: hostb is not known here (Name or service not known)"
    )
