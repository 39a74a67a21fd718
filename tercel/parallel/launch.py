"""How ranks find each other: started here as processes of this host, or by a launcher.

The only module that reads the environment: torchrun, srun and mpirun tell a process its rank in
variables of their own. Imports no torch.
"""

import os
import re
import socket
from collections.abc import Mapping

from tercel.core.layout import Layout
from tercel.core.member import Member
from tercel.errors import ConfigError

_FIRST_PORT, _PORTS = 20000, 20000
"""Where the port of a Slurm job without MASTER_PORT is taken from."""


def local_members(world_size: int) -> list[Member]:
    """The ranks of a group whose processes are all started on this host, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    return [
        Member(rank, world_size, rank, world_size, "127.0.0.1", port, serves_store=True)
        for rank in range(world_size)
    ]


def member_of(layout: Layout, environ: Mapping[str, str] | None = None) -> Member | None:
    """Which rank of `layout` a launcher made of this process; None where it made one process of
    its own of it, or no launcher was there.

    Raises:
        ConfigError: it started more or fewer processes than the layout has ranks.
    """
    member = from_environment(environ)
    if member is None or member.world_size == 1:
        return None
    if member.world_size != layout.world_size:
        raise ConfigError(
            f"layout={layout.name} has {layout.world_size} ranks, and the launcher started "
            f"{member.world_size}; start as many, or choose another layout"
        )
    return member


def from_environment(environ: Mapping[str, str] | None = None) -> Member | None:
    """What a launcher says about this process; None where none started it.

    Raises:
        ConfigError: variables of one launcher are there in part, or make no sense.
    """
    variables = os.environ if environ is None else environ
    for launcher in (_torchrun, _srun, _open_mpi, _hydra):
        member = launcher(_Variables(variables))
        if member is not None:
            return member
    return None


class _Variables:
    """Reads of the environment that fail by name."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __contains__(self, name: str) -> bool:
        return name in self._variables

    def text(self, name: str, default: str | None = None) -> str:
        value = self._variables.get(name, default)
        if value is None:
            raise ConfigError(f"{name} is not set, though the launcher's other variables are")
        return value

    def number(self, name: str, default: int | None = None) -> int:
        value = self.text(name, None if default is None else str(default))
        if not value.isdecimal():
            raise ConfigError(f"{name}={value!r} must be a number")
        return int(value)


def _torchrun(read: _Variables) -> Member | None:
    if "RANK" not in read or "WORLD_SIZE" not in read:
        return None
    return Member(
        read.number("RANK"),
        read.number("WORLD_SIZE"),
        read.number("LOCAL_RANK", 0),
        read.number("LOCAL_WORLD_SIZE", 1),
        read.text("MASTER_ADDR"),
        read.number("MASTER_PORT"),
        serves_store=read.text("TORCHELASTIC_USE_AGENT_STORE", "False") != "True",
        prefix="/" + read.text("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _srun(read: _Variables) -> Member | None:
    """A step's task; the batch script around it has SLURM_PROCID too, but no task of a step."""
    if "SLURM_PROCID" not in read or "SLURM_STEP_NODELIST" not in read:
        return None
    if read.number("SLURM_STEP_NUM_TASKS", 1) == 1:
        return None
    host = read.text("MASTER_ADDR", _first_host(read.text("SLURM_STEP_NODELIST")))
    port = read.number("MASTER_PORT", _FIRST_PORT + read.number("SLURM_JOB_ID") % _PORTS)
    local_size = read.text("SLURM_STEP_TASKS_PER_NODE", "1")
    return Member(
        read.number("SLURM_PROCID"),
        read.number("SLURM_STEP_NUM_TASKS"),
        read.number("SLURM_LOCALID"),
        int(re.split(r"\D", local_size)[0] or 1),
        host,
        port,
        serves_store=True,
        prefix="/" + read.text("SLURM_STEP_ID", "0"),
    )


def _open_mpi(read: _Variables) -> Member | None:
    return _mpi(
        read,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )


def _hydra(read: _Variables) -> Member | None:
    return _mpi(read, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _mpi(read: _Variables, *names: str) -> Member | None:
    """mpirun passes no address: one host needs none, several need MASTER_ADDR."""
    if names[0] not in read:
        return None
    rank, world_size = read.number(names[0]), read.number(names[1])
    local_rank, local_size = read.number(names[2], rank), read.number(names[3], world_size)
    one_host = "127.0.0.1" if local_size == world_size else None
    return Member(
        rank,
        world_size,
        local_rank,
        local_size,
        read.text("MASTER_ADDR", one_host),
        read.number("MASTER_PORT", _FIRST_PORT),
        serves_store=True,
    )


def _first_host(nodes: str) -> str:
    """The first of a Slurm node list such as `node[03-07,9],login1`."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ConfigError(f"SLURM_STEP_NODELIST={nodes!r} names no node; set MASTER_ADDR")
    return match[1] + (match[2] or "")
