"""How a batch is cut."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import DistNetworkError, DistStoreError

from sit_vit5.utils.distributed import (
    BatchPlan,
    HostSync,
    Processes,
    check_joined,
    check_launcher_variables,
    check_plain_launcher,
    gather,
    join_processes,
    launch_rank,
)
from sit_vit5.utils.errors import UserError


@pytest.mark.parametrize(("processes", "accumulation"), [(1, 1), (2, 1), (1, 4), (2, 3), (4, 2)])
def test_plans_of_all_ranks_cover_the_batch_once(processes, accumulation):
    batch = 24
    seen = []
    for rank in range(processes):
        plan = BatchPlan(batch, accumulation, processes, rank)
        for micro in range(accumulation):
            assert len(plan.indices(micro)) == plan.micro_batch_size
            seen += plan.indices(micro)
    assert sorted(seen) == list(range(batch))


def test_indivisible_batch_is_refused_with_the_nearest_legal_sizes():
    with pytest.raises(UserError, match="100 is not divisible by 8 processes.*use 96 or 104"):
        BatchPlan(100, 1, 8, 0)
    with pytest.raises(UserError, match="use 8"):
        BatchPlan(3, 4, 2, 0)


def test_processes_that_did_not_find_one_another_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="started 2 processes but this one joined 1"):
        check_joined(1)
    check_joined(2)


def test_launcher_engines_that_would_change_the_run_are_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(UserError, match="DEEPSPEED, which is not supported; use DDP"):
        check_plain_launcher()


def test_of_fsdp_only_what_is_done_is_accepted_from_the_launcher(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="FSDP version 1; use fsdp_version 2"):
        check_plain_launcher()
    monkeypatch.setenv("FSDP_VERSION", "2")
    check_plain_launcher()
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    with pytest.raises(UserError, match="drop it, use --activation-checkpointing True"):
        check_plain_launcher()


def test_a_launcher_that_compiles_behind_our_back_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    check_plain_launcher()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(UserError, match="use --compile True"):
        check_plain_launcher()


def test_a_broken_connection_is_one_line_and_other_errors_stay_what_they_are(monkeypatch):
    words = HostSync(1)
    words.group = "of two"
    monkeypatch.setattr(words, "_missing", lambda: None)
    with pytest.raises(UserError, match="lost one another: a connection broke; a process is stuck"):
        with words.kept_together():
            raise RuntimeError("[gloo/transport/tcp/pair.cc:545] Read error: reset by peer")
    with pytest.raises(RuntimeError, match="out of memory"), words.kept_together():
        raise RuntimeError("out of memory")


def test_half_set_launcher_variables_get_one_line(command):
    import os
    import subprocess
    import sys

    from helpers import ROOT, TINY, command_environment

    environment = command_environment() | {"WORLD_SIZE": "2", "RANK": "0"}
    failed = subprocess.run(
        [sys.executable, "train_sit.py", *TINY, "--output-dir", os.devnull],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert failed.returncode == 2
    assert "error: the launcher" in failed.stderr and "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "abc"}, "RANK abc must be a number from 0"),
        ({"RANK": "-1"}, "RANK -1 must be a number from 0"),
        ({"RANK": "9" * 5000}, r"RANK 9{40}\.\.\. must be a number from 0 to 1,000,000; unset it"),
        ({"RANK": "3"}, "RANK 3 needs WORLD_SIZE; unset it, or start with accelerate launch"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK 2 must be below WORLD_SIZE 2"),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, "LOCAL_RANK 1 must be below LOCAL_WORLD"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE two must be a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE 0 must be a number from 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT 70000 must be a number from 0 to 65,535"),
    ],
)
def test_launcher_variables_out_of_range_are_refused(monkeypatch, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        join_processes()
    assert launch_rank() == 0  # its error is printed at once


def test_legal_launcher_variables_give_the_rank(monkeypatch):
    for variables in ({"LOCAL_RANK": "-1"}, {"RANK": "", "WORLD_SIZE": ""}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            check_launcher_variables()
            assert launch_rank() == 0
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launch_rank() == 3


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
            "1 of 2 processes joined within 180 s; see the others' last lines",
        ),
        (
            DistNetworkError("The client socket has timed out while trying to connect to (h, 1)"),
            "process 0 did not answer at host:29871 within 180 s",
        ),
        (DistNetworkError("The server socket: EADDRINUSE"), "host:29871: the port is in use; stop"),
        (DistStoreError("wait timeout after 3000ms"), "not all 2 processes joined within 180 s"),
    ],
)
def test_a_process_that_does_not_come_up_is_one_line(monkeypatch, error, message):
    def fail(*_: object, **__: object) -> None:
        raise error

    values = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "host", "MASTER_PORT": "29871"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("accelerate.PartialState", fail)
    with pytest.raises(UserError, match=message):
        join_processes(minutes=3)


def test_a_process_lost_while_values_are_gathered_is_one_line(monkeypatch):
    def fail(values: list) -> None:
        raise DistStoreError("wait timeout")

    monkeypatch.setattr("accelerate.utils.gather_object", fail)
    two = Processes(0, 2, torch.device("cpu"), lambda: None)
    with pytest.raises(UserError, match="have lost one another: wait timeout; a process is stuck"):
        gather([1], two)
