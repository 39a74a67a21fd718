"""Where the processes of a group meet."""

import socket
import time
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tercel.core.member import Member
from tercel.errors import ConfigError, EngineError

_RETRY_S = 0.1


def open_store(member: Member, timeout_s: float, *, serve: bool = False) -> Store:
    """The store through which the ranks meet. Waits for its server that long.

    Args:
        serve: for the engine's process, which may have to serve it.
    Raises:
        ConfigError: nobody serves it, or the port is taken.
    """
    is_server = serve and member.serves_store
    if not is_server:
        _wait_for_server(member, timeout_s)
    try:
        store = TCPStore(
            member.host,
            member.port,
            is_master=is_server,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _unreachable(member, error) from error
    return PrefixStore(f"tercel{member.prefix}", store)


def _wait_for_server(member: Member, timeout_s: float) -> None:
    """Returns once somebody listens: TCPStore prints a trace of its own where nobody does."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            left = max(_RETRY_S, deadline - time.monotonic())
            socket.create_connection((member.host, member.port), left).close()
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                raise _unreachable(member, error) from error
            time.sleep(_RETRY_S)


def _unreachable(member: Member, error: Exception) -> ConfigError:
    return ConfigError(
        f"rank {member.rank} cannot reach the group at {member.host}:{member.port}: is rank 0 "
        f"running, and is the port free? ({str(error).splitlines()[0]})"
    )


def wait_for(store: Store, key: str) -> bytes:
    """The value of `key`, once another process has set it.

    Raises:
        EngineError: none has in the time of the store, or the store is gone.
    """
    try:
        value: bytes = store.get(key)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise EngineError(
            f"rank 0 has not started its engine ({str(error).splitlines()[0]}); see its own message"
        ) from error
    return value
