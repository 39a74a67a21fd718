"""What launchers say about a process, and what is wrong with it."""

import pytest

from tercel.core.layout import Layout
from tercel.core.member import Member
from tercel.errors import ConfigError, EngineError
from tercel.parallel.launch import from_environment, local_members, member_of
from tercel.parallel.store import open_store, wait_for

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SRUN = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[03-04,9]",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "member"),
    [
        (TORCHRUN, Member(5, 16, 1, 4, "node7", 29500, serves_store=False, prefix="/2")),
        (SRUN, Member(9, 16, 1, 8, "gpu03", 23456, serves_store=True, prefix="/3")),
        (
            SRUN | {"SLURM_STEP_NODELIST": "login1", "MASTER_PORT": "77"},
            Member(9, 16, 1, 8, "login1", 77, serves_store=True, prefix="/3"),
        ),
        (OPEN_MPI, Member(1, 4, 1, 4, "127.0.0.1", 20000, serves_store=True)),
        (HYDRA | {"MASTER_ADDR": "a"}, Member(3, 4, 1, 2, "a", 20000, serves_store=True)),
    ],
    ids=["torchrun", "srun", "srun, one node", "Open MPI", "Hydra on two hosts"],
)
def test_launchers(environ, member):
    assert from_environment(environ) == member


def test_no_launcher():
    batch_script = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_NTASKS": "16"}
    alone = SRUN | {"SLURM_STEP_NUM_TASKS": "1"}
    for environ in ({}, batch_script, alone, {"RANK": "0"}):
        assert from_environment(environ) is None


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "five"}, "RANK='five' must be a number"),
        (HYDRA, "MASTER_ADDR is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (SRUN | {"SLURM_STEP_NODELIST": ""}, "names no node; set MASTER_ADDR"),
    ],
)
def test_refused(environ, message):
    with pytest.raises(ConfigError, match=message):
        from_environment(environ)


def test_as_many_processes_as_the_layout_has_ranks():
    assert member_of(Layout.parse("tp8_pp2"), TORCHRUN).rank == 5
    assert member_of(Layout(), TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None
    with pytest.raises(ConfigError, match="tp8 has 8 ranks, and the launcher started 16"):
        member_of(Layout(tp=8), TORCHRUN)


def test_members_of_this_host_meet():
    first, second = local_members(2)
    assert (first.rank, second.local_rank, second.local_size) == (0, 1, 2)
    store = open_store(first, 5, serve=True)
    store.set("engine", "here")
    assert wait_for(open_store(second, 5), "engine") == b"here"
    with pytest.raises(EngineError, match="rank 0 has not started its engine"):
        wait_for(open_store(second, 0.2), "other")
    with pytest.raises(ConfigError, match=r"cannot reach the group at 127\.0\.0\.1"):
        open_store(first, 1, serve=True)


def test_nobody_serves_the_store(capfd):
    with pytest.raises(ConfigError, match=r"rank 1 cannot reach the group .* \(.*refused"):
        open_store(local_members(2)[1], 0.5)
    assert capfd.readouterr().err == ""
