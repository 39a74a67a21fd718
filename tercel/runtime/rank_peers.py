"""The engine's end of the wires to its ranks."""

import contextlib
import secrets
from socket import gethostbyname

import msgspec
import zmq

from tercel.errors import ConfigError
from tercel.runtime.rank_messages import Address, FromRank, Hello, Ping, ToRank

_HEARTBEAT_MS = 5000
"""How often a connection to another host is tried; four tries fail before it counts as lost."""


class Peers:
    """A port that ranks connect to, each by a Hello that shows the token. Who does not is ignored,
    whatever it sends."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of `host`, an address of this machine.

        Raises:
            ConfigError: it is none.
        """
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0  # for whoever forgets to close
        self._socket.router_mandatory = True
        self._socket.heartbeat_ivl = _HEARTBEAT_MS
        self._socket.heartbeat_timeout = 4 * _HEARTBEAT_MS
        try:
            self._socket.bind(f"tcp://{gethostbyname(host)}:*")
        except (OSError, zmq.ZMQError) as error:
            self.close()
            raise ConfigError(
                f"the engine cannot listen on {host}, where the ranks look for it: {error}; start "
                "rank 0 on that host, or set MASTER_ADDR to an address of this one"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(endpoint, secrets.token_hex(16))
        self._decoder = msgspec.msgpack.Decoder(FromRank)
        self._identities: dict[int, bytes] = {}
        self._ranks: dict[bytes, int] = {}
        self._places: dict[int, str] = {}

    def receive(self, timeout_ms: int) -> tuple[int, FromRank] | None:
        """The next message and its rank, or None if there is none in time."""
        if not self._socket.poll(timeout_ms):
            return None
        identity, payload = self._socket.recv_multipart()
        if identity not in self._ranks and not self._welcome(identity, payload):
            return None
        return self._ranks[identity], self._decoder.decode(payload)

    def send(self, rank: int, message: ToRank) -> None:
        """Raises zmq.ZMQError where the rank is not connected."""
        self._socket.send_multipart([self._identities[rank], msgspec.msgpack.encode(message)])

    def send_all(self, message: ToRank) -> None:
        """To every rank that is connected."""
        payload = msgspec.msgpack.encode(message)
        for identity in self._identities.values():
            with contextlib.suppress(zmq.ZMQError):
                self._socket.send_multipart([identity, payload])

    def is_lost(self, rank: int) -> bool:
        """Whether the rank was connected and is no longer."""
        if rank not in self._identities:
            return False
        try:
            self.send(rank, Ping())
        except zmq.ZMQError:
            return True
        return False

    def place(self, rank: int) -> str:
        """Where the rank runs, for messages."""
        return self._places.get(rank, "not connected yet")

    def close(self, linger_ms: int = 0) -> None:
        """Lets go of the ranks; those that live notice. May be called again."""
        self._socket.close(linger=linger_ms)
        self._context.term()

    def _welcome(self, identity: bytes, payload: bytes) -> bool:
        try:
            hello = msgspec.msgpack.decode(payload, type=Hello)
        except msgspec.MsgspecError:
            return False
        if not secrets.compare_digest(hello.token.encode(), self.address.token.encode()):
            return False
        self._identities[hello.rank] = identity
        self._ranks[identity] = hello.rank
        self._places[hello.rank] = f"{hello.host}, process {hello.pid}"
        return True
