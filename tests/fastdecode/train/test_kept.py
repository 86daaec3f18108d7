"""Kept features: what is read is what the target said, and only when it was this target on this data."""

import pytest
import torch
from loop_fixtures import conversations, tiny_target

from fastdecode.train import kept
from fastdecode.train.batches import collate
from fastdecode.train.features import target_choices, target_states
from fastdecode.train.kept import KeptFeatures
from models.errors import InputError

DATA = conversations(10)
LAYERS = (1, 3)
ROWS = (4, 0, 7)


def features(folder, target, data=DATA, layers=LAYERS, fingerprint="f", **limits) -> KeptFeatures:
    return KeptFeatures(folder, target, fingerprint, data, 30, layers, **limits)


def assert_right(found: KeptFeatures, rows=ROWS) -> None:
    batch = collate([DATA[i] for i in rows], 30)
    hidden, choices = found.read(rows, batch)
    expected = target_states(found.target, batch, LAYERS)
    real = batch.real
    for mine, theirs in zip((*hidden.entering, hidden.last), (*expected.entering, expected.last), strict=True):
        torch.testing.assert_close(mine[real], theirs[real].bfloat16().float(), rtol=0.01, atol=1e-3)
    assert torch.equal(choices[real], target_choices(found.target, expected.last)[real])


def fill(found: KeptFeatures) -> None:
    for i in range(len(DATA)):
        found.read([i], collate([DATA[i]], 30))


def forbid_computing(monkeypatch) -> None:
    monkeypatch.setattr(kept, "target_states", lambda *args: pytest.fail("the target was asked again"))


def test_states_are_right_when_they_are_computed_and_when_they_are_read(tmp_path):
    found = features(tmp_path, tiny_target())
    assert_right(found)
    assert found.known.tolist() == [i in ROWS for i in range(10)]
    assert_right(found)
    assert_right(found, (1, 7, 0, 2))


def test_a_second_epoch_and_a_second_run_do_not_ask_the_target(tmp_path, monkeypatch):
    found = features(tmp_path, tiny_target())
    fill(found)
    assert found.flush().all()
    again = features(tmp_path, tiny_target())
    batch = collate([DATA[i] for i in ROWS], 30)
    expected = found.read(ROWS, batch)[0].last
    forbid_computing(monkeypatch)
    found.read(ROWS, batch)
    assert torch.equal(again.read(ROWS, batch)[0].last, expected)


def test_incomplete_files_are_made_anew_unless_the_state_says_what_is_in_them(tmp_path):
    found = features(tmp_path, tiny_target())
    assert_right(found)
    known = found.flush()
    again = features(tmp_path, tiny_target())
    assert not again.known.any()
    again.restore(known)
    assert again.known.sum() == 3


@pytest.mark.parametrize("what", ["fingerprint", "data", "layers", "damage"])
def test_files_of_something_else_are_made_anew(tmp_path, what):
    found = features(tmp_path, tiny_target())
    fill(found)
    known = found.flush()
    changes = {
        "fingerprint": {"fingerprint": "g"},
        "data": {"data": [c._replace(token_ids=c.token_ids[::-1]) for c in DATA]},  # of the same lengths
        "layers": {"layers": (2, 3)},
    }
    if what == "damage":
        (tmp_path / "states.bin").write_bytes(b"short")
    other = features(tmp_path, tiny_target(), **changes.get(what, {}))
    assert not other.known.any()
    other.restore(known)
    assert not other.known.any()


def test_no_more_is_kept_than_was_allowed_and_the_rest_is_computed(tmp_path):
    notes = []
    bytes_per_token = 3 * 32 * 2 + 4
    room = sum(min(len(c.token_ids), 30) for c in DATA[:5]) * bytes_per_token
    found = features(tmp_path, tiny_target(), gigabytes=room / 1e9, note=notes.append)
    fill(found)
    assert found.known.tolist() == [True] * 5 + [False] * 5
    assert sum((tmp_path / name).stat().st_size for name in ("states.bin", "choices.bin")) == room
    assert f"{bytes_per_token} bytes a token" in notes[0] and "5 of 10" in notes[0]
    assert_right(found)


def test_a_disk_without_room_is_met_at_once(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept.os, "posix_fallocate", full)
    with pytest.raises(InputError, match=r"--keep-features needs .*No space left"):
        features(tmp_path, tiny_target())
