"""Which name is taken for a slip of which."""

from __future__ import annotations

import time

import pytest

from transfer_queue.names import LOOKED_AT, near

NAMES = ["train_0", "train_1", "val", "old_log_probs", "reward", "x"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("trian_1", "train_1"), ("train-1", "train_1"), ("Train_1", "train_1"), ("tran_1", "train_1"),
        ("rewards", "reward"), ("old_logprobs", "old_log_probs"),
    ],
)  # fmt: skip
def test_a_slip_has_a_near_name(wrong: str, right: str) -> None:
    assert near(wrong, NAMES) == right


@pytest.mark.parametrize(
    "other", ["train_2", "train_10", "val_3", "test", "values", "y", "", "train_0", "critic_train"]
)
def test_other_numbers_and_other_words_are_no_slips(other: str) -> None:
    assert near(other, NAMES) is None


def test_only_so_many_names_are_looked_at() -> None:
    assert near("words", [*(f"other{n}" for n in range(LOOKED_AT)), "word"]) is None
    assert near("words", [*(f"other{n}" for n in range(LOOKED_AT - 1)), "word"]) == "word"


def test_looking_for_a_near_name_holds_nobody_up() -> None:
    names = [f"rollout_{n:08x}_{n * 7919 % 1000}_of_training_{'abcde'[n % 5]}" for n in range(1000)]
    took = []
    for _ in range(5):
        started = time.perf_counter()
        near("rollout_00000003_of_trianing", names)
        near("x" * 100_000, names)
        near("short", ["y" * 100_000] * 200)
        took.append(time.perf_counter() - started)
    assert min(took) < 0.01
