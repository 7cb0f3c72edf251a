"""Who reaches the first island's port without a key, or with one and bad intent, gets and breaks nothing."""

from __future__ import annotations

import json
import os
import resource
import socket
import ssl
import stat
import struct
import subprocess
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.errors import ConfigError, DataError
from dsx.islands import links
from dsx.islands.coordinator import IslandNode
from dsx.islands.links import Connection, LinkError, context_of, key_file, write_keys
from dsx.islands.rounds import LedRound, RoundProtocol
from dsx.islands.standing import Ready, Round, Standing
from dsx.parallel.islands import Islands

PATIENCE = 20.0
STATE = torch.arange(200, dtype=torch.float32)
STANDING = Standing(name="common", version=3, progress=6, facts={"step": 6, "lr_scheduler": None})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder, 3)
    return folder


class OneRank:
    """The ranks of an island that has one."""

    rank, size = 0, 1

    def told(self, mine: Any) -> list[Any]:
        return [mine]

    def agree(self, action: Callable[[], Any]) -> Any:
        return action()

    def everybody(self, well: bool) -> bool:
        return well


class Site:
    """An island's first rank, without a model."""

    def __init__(
        self, index: int, meet: str, keys: Path | None, *, layout: str = "same", patience: float = PATIENCE
    ) -> None:
        folder = None if keys is None else str(keys)
        islands = Islands(
            count=3, index=index, ranks=1, meet=meet, keys=folder, patience_seconds=patience, insecure=True
        )
        self.node = IslandNode(islands, 0)
        self.protocol = RoundProtocol(
            self.node,
            OneRank(),  # type: ignore[arg-type]
            layout=layout,
            shares=1,
            wire="fp32",
            last_step=60,
            gives_up=lambda: False,
            standing=lambda: STANDING,
            state=lambda: (STANDING, STATE),
            elements=STATE.numel,
        )

    def ready(self, standing: Standing = STANDING) -> Ready:
        return Ready(standing=standing, moved=True, facts=standing.facts, samples=8)

    def round(self, movement: torch.Tensor, standing: Standing = STANDING) -> Any:
        """What comes of a round."""
        pending = type("Pending", (), {"ready": self.ready(standing)})()
        return self.protocol.go_through(pending, lambda _: ([movement], []))


@contextmanager
def site(index: int, meet: str, keys: Path | None, **kinds: Any) -> Iterator[Site]:
    here = Site(index, meet, keys, **kinds)
    try:
        yield here
    finally:
        here.node.close(0.0)


@pytest.fixture
def first(keys: Path) -> Iterator[Site]:
    """The first island, with keys."""
    with site(0, "127.0.0.1:0", keys) as here:
        yield here


def linked(first: Site, keys: Path | None, island: int = 1) -> Connection:
    context = None if keys is None else context_of(keys, island, serves=False)
    return Connection.to(first.node.address, context, patience_seconds=PATIENCE, connect_seconds=PATIENCE)


def plain(first: Site) -> socket.socket:
    host, _, port = first.node.address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def others_are_served(first: Site, keys: Path) -> bool:
    """Whether an island with a key gets the weights."""
    link = linked(first, keys)
    link.send({"kind": "state", "island": 1})
    header, size = link.receive()
    values = torch.frombuffer(link.payload(size, 4 * STATE.numel()), dtype=torch.float32)
    link.close()
    return bool(header["standing"]["name"] == "common" and torch.equal(values, STATE))


def test_keys_are_secret_and_what_openssl_takes_for_a_chain(tmp_path: Path) -> None:
    files = write_keys(tmp_path / "keys", 2)
    assert [file.name for file in files] == ["ca.pem", "island0.pem", "island1.pem"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files[1:]] == [0o600, 0o600]
    for file in files[1:]:
        command = ["openssl", "verify", "-x509_strict", "-CAfile", files[0], file]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
    assert not any(b"PRIVATE" in file.read_bytes() for file in files[:1])
    with pytest.raises(DataError, match="there are keys already"):
        write_keys(tmp_path / "keys", 3)
    with pytest.raises(ConfigError, match=r"it has no ca\.pem and island7\.pem that can be used"):
        context_of(tmp_path / "keys", 7, serves=False)


def test_it_listens_where_it_is_said_and_nowhere_else(keys: Path) -> None:
    with site(0, "127.0.0.2:0", keys) as here:
        port = int(here.node.address.rpartition(":")[2])
        assert here.node.address == f"127.0.0.2:{port}"
        assert here.node._listener is not None
        assert here.node._listener._socket.getsockname() == ("127.0.0.2", port)
        with pytest.raises(
            ConfigError, match=r"127\.0\.0\.2:\d+, where the first island is to listen .*it cannot"
        ):
            Site(0, here.node.address, keys)
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0, where the first island is to listen"):
        Site(0, "192.0.2.1:0", keys)  # nobody's address (RFC 5737)


def test_beyond_this_machine_nobody_listens_without_keys() -> None:
    islands = Islands(count=2, index=0, ranks=1, meet="192.0.2.1:29700")
    with pytest.raises(ConfigError, match="could read the weights and change them"):
        IslandNode(islands, 0)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" + b"\0" * 500, b"dsx2" * 9])
def test_who_does_not_speak_tls_is_given_nothing(first: Site, keys: Path, data: bytes) -> None:
    told = bytearray()
    with plain(first) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while said := stranger.recv(1000):
                told += said
        except TimeoutError:
            raise
        except OSError:  # the first island has ended it before
            pass
    assert len(told) < 100, told  # at most TLS's own word for it
    assert others_are_served(first, keys)


def test_a_key_of_others_and_no_key_are_refused(first: Site, keys: Path, tmp_path: Path) -> None:
    write_keys(tmp_path, 3)
    with pytest.raises(LinkError, match=r"shows no key that is known: .*CERTIFICATE_VERIFY_FAILED"):
        linked(first, tmp_path)
    # Who does not look at the first island's certificate has none to show that is known there.
    for folder in (tmp_path, None):
        careless = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        careless.check_hostname, careless.verify_mode = False, ssl.CERT_NONE
        if folder is not None:
            careless.load_cert_chain(key_file(folder, 1))
        refused = pytest.raises(OSError, match=r"alert|EOF|reset")
        with careless.wrap_socket(plain(first)) as stranger, refused:
            stranger.recv(1)
    assert others_are_served(first, keys)


def test_an_island_is_the_one_that_its_key_says(first: Site, keys: Path) -> None:
    link = linked(first, keys, 2)
    link.send({"kind": "state", "island": 1})
    with pytest.raises(LinkError, match="closed"):
        link.receive()
    with site(0, "127.0.0.1:0", None) as open_one, pytest.raises(LinkError, match="no key that is known"):
        linked(open_one, keys)


def frame(header: bytes, payload: bytes = b"", *, mark: bytes = b"dsx2", **sizes: int) -> bytes:
    head, size = sizes.get("head", len(header)), sizes.get("size", len(payload))
    return struct.pack("!4sIQ", mark, head, size) + header + payload


BROKEN = {
    "another mark": (frame(b"{}", mark=b"HTTP"), "no message of dsx's"),
    "header of many bytes": (frame(b"{}", head=1 << 30), "no message of dsx's"),
    "header that is no JSON": (frame(b"{]"), "no message of dsx's"),
    "header that is no text": (frame(b"\xff\xfe"), "no message of dsx's"),
    "header without end": (frame(b"[" * 100_000), "no message of dsx's"),
    "header that is a list": (frame(b"[1]"), "no message of dsx's"),
    "a gigabyte": (frame(b"{}", size=1 << 30), "1073741824 bytes were to come, and 0 are due"),
    "payload beyond all memory": (frame(b"{}", size=1 << 63), "bytes were to come, and 0 are due"),
    "nothing at all": (b"", "closed the connection"),
    "half of the sizes": (frame(b"{}")[:7], "closed the connection"),
    "half of the header": (frame(b'{"kind": "word"}')[:20], "closed the connection"),
}


@pytest.mark.parametrize(("data", "what"), BROKEN.values(), ids=BROKEN)
def test_what_is_no_message_takes_no_memory(data: bytes, what: str) -> None:
    near, far = socket.socketpair()
    tracemalloc.start()
    near.sendall(data)
    near.shutdown(socket.SHUT_WR)
    with near, far, pytest.raises(LinkError, match=what):
        Connection(far, PATIENCE).word()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 21


def test_messages_come_whole_in_order_and_counted() -> None:
    near, far = socket.socketpair()
    payloads = [b"", b"x", bytes(range(256)) * 4000]  # the last one is more than a socket's buffers hold
    with near, far:
        sender, receiver, counts = Connection(near, PATIENCE), Connection(far, PATIENCE), list[int]()
        thread = threading.Thread(
            target=lambda: counts.extend(sender.send({"who": "île"}, payload) for payload in payloads)
        )
        thread.start()
        for payload in payloads:
            header, size = receiver.receive()
            assert header == {"who": "île"}
            assert bytes(receiver.payload(size, len(payload))) == payload
        thread.join()
    head = len(json.dumps({"who": "île"}).encode())
    assert counts == [16 + head + len(payload) for payload in payloads]


def test_strangers_that_say_nothing_or_little_lose_their_connections(
    first: Site, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_STRANGER_SECONDS", 0.3)
    idle, slow = plain(first), plain(first)
    with idle, slow:
        slow.sendall(b"\x16")
        ended = threading.Event()

        def drip() -> None:  # a byte now and then, each within any time that is waited for one
            while not ended.wait(0.05):
                try:
                    slow.sendall(b"\x03")
                except OSError:
                    return

        threading.Thread(target=drip, daemon=True).start()
        for stranger in (idle, slow):
            with suppress(ConnectionResetError):
                assert stranger.recv(1000) == b""
        ended.set()
    monkeypatch.undo()
    assert others_are_served(first, keys)


def test_of_many_idle_connections_the_oldest_go_and_an_island_gets_through(first: Site, keys: Path) -> None:
    strangers = [plain(first) for _ in range(links._MOST_STRANGERS + 30)]
    assert others_are_served(first, keys)
    assert strangers[0].recv(1000) == b""
    for stranger in strangers:
        stranger.close()


def test_running_out_of_descriptors_once_leaves_it_listening(first: Site, keys: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger = socket.socket()
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    host, _, port = first.node.address.rpartition(":")
    held: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with suppress(OSError):
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        with pytest.raises(OSError, match="Too many open files"):
            socket.socket()
        stranger.connect((host, int(port)))  # the kernel takes it, and accept fails
        assert first.node._listener is not None
        first.node._listener._closed.wait(2 * links._SWEEP_SECONDS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
        stranger.close()
    assert others_are_served(first, keys)


# --- with a key, and bad intent

Bad = Callable[[Connection, bytes], None]


def in_rounds(found: dict[int, Any], sites: list[Site], movements: list[torch.Tensor]) -> None:
    """A round of these islands, which may have others in it: what comes of it by island."""

    def go(place: int) -> None:
        found[place] = sites[place].round(movements[place])

    threads = [threading.Thread(target=go, args=(place,)) for place in range(len(sites))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def nan(link: Connection, movement: bytes) -> None:
    link.send({"kind": "part"}, struct.pack("<f", float("nan")) + movement[4:])


def infinite(link: Connection, movement: bytes) -> None:
    link.send({"kind": "part"}, struct.pack("<f", float("inf")) + movement[4:])


def short(link: Connection, movement: bytes) -> None:
    link.send({"kind": "part"}, movement[:-4])


def long(link: Connection, movement: bytes) -> None:
    link.send({"kind": "part"}, movement + movement)


def claims_a_gigabyte(link: Connection, _movement: bytes) -> None:
    link._socket.sendall(frame(b"{}", size=1 << 30))


def breaks_off(link: Connection, movement: bytes) -> None:
    link._socket.sendall(frame(b"{}", size=len(movement)))


WHY = {
    nan: "its movement is not finite",
    infinite: "its movement is not finite",
    short: "796 bytes were to come, and 800 are due",
    long: "1600 bytes were to come, and 800 are due",
    claims_a_gigabyte: "1073741824 bytes were to come, and 800 are due",
    breaks_off: "closed the connection",
}


@pytest.mark.parametrize("bad", WHY, ids=lambda bad: bad.__name__)
def test_a_bad_part_drops_that_island_by_name_and_the_round_goes_on(
    first: Site, keys: Path, bad: Bad
) -> None:
    found: dict[int, Any] = {}
    with site(1, first.node.address, keys) as honest:
        talk = linked(first, keys, 2)
        talk.send({"kind": "hello", "island": 2, "life": "bad", "layout": "same"})
        assert talk.word()["kind"] == "welcome"
        movements = {0: torch.ones(200), 1: 3 * torch.ones(200)}
        threads = [
            threading.Thread(target=lambda i=i, here=here: found.update({i: here.round(movements[i])}))
            for i, here in enumerate((first, honest))
        ]
        for thread in threads:
            thread.start()
        talk.send({"kind": "ready", **asdict(first.ready())})
        while (said := talk.word())["kind"] == "wait":
            pass
        assert said["members"] == [0, 1, 2]
        up = linked(first, keys, 2)
        up.send({"kind": "up", "island": 2, "round": said["name"]})
        bad(up, bytes(800))
        up.close()
        for thread in threads:
            thread.join(PATIENCE)
        talk.close()
    for outcome in found.values():
        assert (outcome.members, outcome.moved, outcome.standing.version) == ([0, 1], [0, 1], 4)
        assert torch.equal(outcome.means[0], 2 * torch.ones(200))
    assert found[0].standing == found[1].standing
    (news,) = first.protocol.news
    assert news.startswith("island 2 is left out of a round: ")
    assert WHY[bad] in news  # type: ignore[index]


AHEAD = {
    "a round that cannot be": (
        replace(STANDING, name="x", version=1_000_000, progress=10**7),
        "island 1 says that it is at round 1000000, and at step 6 there have been at most 6",
    ),
    "a step that cannot be": (
        replace(STANDING, name="x", facts={"step": 61}),
        "island 1 says that it is at step 61, and the last one is 60",
    ),
    "a round before all": (replace(STANDING, version=-1), "island 1 says that it is at round -1"),
    "no step": (replace(STANDING, name="x", facts={}), "island 1 says that it is at step None"),
}


@pytest.mark.parametrize(("standing", "news"), AHEAD.values(), ids=AHEAD)
def test_weights_of_a_round_that_cannot_be_are_not_taken(
    first: Site, keys: Path, standing: Standing, news: str
) -> None:
    talk = linked(first, keys, 1)
    talk.send({"kind": "hello", "island": 1, "life": "bad", "layout": "same"})
    talk.word()
    talk.send({"kind": "ready", **asdict(first.ready(standing))})
    assert talk.word() == {"kind": "out"}
    assert first.protocol.news[0].startswith(news)
    talk.close()


@pytest.mark.parametrize(
    "change",
    [{"standing": None}, {"standing": {"version": "x"}}, {"samples": "many"}, {"moved": [1]}, {"facts": 7}],
    ids=str,
)
def test_a_word_of_another_shape_ends_the_connection(first: Site, keys: Path, change: dict[str, Any]) -> None:
    talk = linked(first, keys, 1)
    talk.send({"kind": "hello", "island": 1, "life": "bad", "layout": "same"})
    talk.word()
    talk.send({"kind": "ready", **asdict(first.ready()), **change})
    with pytest.raises(LinkError, match="closed"):
        talk.word()
    assert others_are_served(first, keys)


@pytest.mark.parametrize("island", [0, 3, -1, "1", None, [1]], ids=str)
def test_who_is_no_island_of_the_run_is_not_served(island: Any) -> None:
    with site(0, "127.0.0.1:0", None) as first:
        link = linked(first, None)
        link.send({"kind": "state", "island": island})
        with pytest.raises(LinkError, match="closed"):
            link.receive()


LIES = {
    "mean that is not finite": (struct.pack("<f", float("nan")) * 200, "the mean that came is not finite"),
    "mean of another length": (bytes(4), "4 bytes were to come, and 800 are due"),
}


@pytest.mark.parametrize(("mean", "why"), LIES.values(), ids=LIES)
def test_an_island_holds_the_first_one_to_what_is_due(
    first: Site, keys: Path, monkeypatch: pytest.MonkeyPatch, mean: bytes, why: str
) -> None:
    def give(self: LedRound, link: Connection, island: int) -> None:
        link.send({"kind": "mean"}, mean)
        link.send({"kind": "end", "members": [0, 1], "moved": [0, 1]})

    monkeypatch.setattr(LedRound, "give", give)
    with site(1, first.node.address, keys) as honest:
        thread = threading.Thread(target=first.round, args=(torch.ones(200),))
        thread.start()
        first.node.server._membership._met = True  # type: ignore[union-attr] - so that island 2 is not awaited
        assert honest.round(torch.ones(200)) is None
        thread.join(PATIENCE)
        assert why in honest.protocol.news[0]


def test_a_round_about_other_weights_is_not_gone_into(first: Site, keys: Path) -> None:
    with site(1, first.node.address, keys) as honest:
        assert honest.node.client is not None
        far = Round(
            name="far", members=[0, 1], moved=[0, 1], behind=[1], source=0, facts=STANDING.facts, samples={},
            standing=replace(STANDING, name="other", version=1_000_000),
        )  # fmt: skip
        honest.node.client.ask = lambda ready: (far, [])  # type: ignore[method-assign]
        assert honest.round(torch.ones(200)) is None
        assert "weights that there cannot be" in honest.protocol.news[0]


@pytest.mark.parametrize("size", [200, 3_000_000])
def test_rounds_over_tls_lose_nothing_that_was_sent(first: Site, keys: Path, size: int) -> None:
    """Where an end closes without having read what came, as tickets of TLS, what it has sent is lost."""
    with site(1, first.node.address, keys) as other, site(2, first.node.address, keys) as third:
        for _ in range(3):
            found: dict[int, Any] = {}
            movements = [torch.full((size,), float(index)) for index in range(3)]
            in_rounds(found, [first, other, third], movements)
            assert [found[index].members for index in range(3)] == [[0, 1, 2]] * 3
            for outcome in found.values():
                assert torch.equal(outcome.means[0], torch.ones(size))
