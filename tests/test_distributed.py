"""How a batch is cut."""

from __future__ import annotations

import pytest

from sit_vit5.distributed import BatchPlan, Words, check_joined, check_plain_launcher
from sit_vit5.errors import UserError


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
    with pytest.raises(UserError, match="drop it, use --recompute True"):
        check_plain_launcher()


def test_a_launcher_that_compiles_behind_our_back_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    check_plain_launcher()
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    with pytest.raises(UserError, match="use --compile True"):
        check_plain_launcher()


def test_a_broken_connection_is_one_line_and_other_errors_stay_what_they_are(monkeypatch):
    words = Words(1)
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
