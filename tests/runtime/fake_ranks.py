"""A rank that only speaks: it computes nothing, imports no torch, and goes wrong where it is told.

config.model is "FAULT PHASE RANK": a rank that kills itself, stops, raises or reports something
else when it comes to a phase.
"""

import os
import signal
import sys
import threading
import time

import msgspec
import zmq

from tercel.core.sampling import RowResult, StepResult
from tercel.errors import CheckpointError, ExchangeError
from tercel.runtime.lifeline import end_with_parent
from tercel.runtime.messages import Failure
from tercel.runtime.rank_messages import (
    AskCalls,
    Calls,
    Close,
    Done,
    Failed,
    Hello,
    Join,
    Joined,
    Load,
    Loaded,
    LoadedSome,
    Ping,
    Report,
    Run,
    StartRank,
    ToRank,
)


class FakeRank:
    def __init__(self, start: StartRank) -> None:
        self.rank = start.member.rank
        self.last = start.member.world_size - 1
        self.fault, self.phase, victim = (*start.config.model.split(), "", "", "")[:3]
        self.is_victim = victim == str(self.rank)
        self.come_to("connect")
        self.socket = zmq.Context().socket(zmq.DEALER)
        self.socket.connect(start.address.endpoint)
        self.decoder = msgspec.msgpack.Decoder(ToRank)
        self.steps = 0
        self.send(Hello(self.rank, start.address.token, "here", os.getpid()))

    def send(self, message):
        self.socket.send(msgspec.msgpack.encode(message))

    def receive(self):
        while isinstance(message := self.decoder.decode(self.socket.recv()), Ping):
            pass
        return message

    def come_to(self, phase):
        if self.phase != phase:
            return
        match self.fault:
            case "kill" if self.is_victim:
                os.kill(os.getpid(), signal.SIGKILL)
            case "kill":
                time.sleep(600)
            case "stop" | "slow" if self.is_victim:
                time.sleep(600)
            case "raise" if self.is_victim:
                self.fail(CheckpointError("model-1.safetensors: cut short; download it again"))
            case "slow":  # the others are, and say so
                for _ in range(100):
                    time.sleep(0.1)
                    self.send(LoadedSome(1, 2))
            case "late" if self.is_victim:  # the others wait for it in an exchange, and give up
                time.sleep(600)
            case "late" | "drop":
                time.sleep(0.2)
                if self.is_victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                self.fail(ExchangeError("Connection closed by peer"))

    def fail(self, error):
        self.send(Failed(Failure.of(error)))
        self.socket.close(linger=1000)
        sys.exit(1)

    def run(self):
        self.come_to("start")
        differs = self.fault == "differ" and self.is_victim
        checkpoint = "other" if differs else "same"
        self.send(Report({"checkpoint": checkpoint, "program": "p"}))
        assert isinstance(self.receive(), Load)
        self.send(LoadedSome(1, 2))
        self.come_to("load")
        self.send(LoadedSome(2, 2))
        self.send(Loaded())
        assert isinstance(self.receive(), Join)
        self.come_to("join")
        self.send(Joined())
        while not isinstance(message := self.receive(), Close):
            match message:
                case Run(step, plan):
                    self.steps += 1
                    self.come_to("step")
                    if self.rank == self.last:
                        rows = tuple(RowResult(row.request_id, (step,)) for row in plan.rows)
                        self.send(Done(step, StepResult(rows)))
                case AskCalls():
                    self.send(Calls({"fake": self.steps}))


def main():
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=StartRank)
    threading.Thread(target=end_with_parent, daemon=True).start()
    FakeRank(start).run()
