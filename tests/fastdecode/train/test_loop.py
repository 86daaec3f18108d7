"""The training loop: killed and resumed runs, steps cut in other ways, several processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from loop_fixtures import tiny_target, tiny_trainer, weights_of

from fastdecode.train import checkpoint
from fastdecode.train.kept import KeptFeatures
from models.errors import InputError

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATHS = os.pathsep.join((str(ROOT), str(HERE)))


class Stopped(Exception):
    pass


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def without_seconds(rows: list[dict]) -> list[dict]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.mark.parametrize("kind", ["eagle3", "eagle1"])
def test_the_loss_falls_and_the_target_does_not_change(tmp_path, kind):
    target = tiny_target()
    before = {name: p.clone() for name, p in target.named_parameters()}
    trainer = tiny_trainer(tmp_path, target=target, kind=kind, epochs=15, lr=3e-3)
    assert trainer.run()
    losses = [row["loss"] for row in trainer.rows if row["split"] == "train"]
    assert losses[-1] < 0.95 * losses[0]
    assert_same(before, dict(target.named_parameters()))


@pytest.mark.parametrize(
    ("kind", "keep", "optimizer"),
    [("eagle3", False, "adamw"), ("eagle3", True, "muon"), ("eagle1", False, "muon"), ("eagle1", True, "adamw")],
)
def test_a_run_that_dies_in_mid_epoch_and_goes_on_ends_with_the_same_bits_and_the_same_curve(
    tmp_path, kind, keep, optimizer
):
    def trainer_in(name: str, seed: int = 0):
        # Another first head: what counts on resuming is the state alone.
        trainer = tiny_trainer(tmp_path / name, kind=kind, optimizer=optimizer)
        if seed:
            with torch.no_grad():
                for parameter in trainer.parameters.values():
                    parameter.add_(1.0)
        if keep:
            folder, layers = tmp_path / name / "features", trainer.head.feature_layers
            trainer.kept = KeptFeatures(folder, trainer.target, "f", trainer.conversations, 64, layers)
        return trainer

    whole = trainer_in("whole")
    whole.run()
    assert len(whole.epochs[0]) > 6

    broken = trainer_in("broken")

    def die(trainer):
        if trainer.step == 5:
            trainer.save()
        if trainer.step == 8:
            raise Stopped

    with pytest.raises(Stopped):
        broken.run(progress=die)
    again = trainer_in("broken", seed=1)
    assert again.resume()
    assert (again.step, again.position, again.epoch) == (5, 5, 0)
    again.run()
    assert_same(weights_of(whole), weights_of(again))
    assert without_seconds(again.rows) == without_seconds(whole.rows)
    assert again.score == whole.score


VICTIM = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
from loop_fixtures import tiny_trainer
trainer = tiny_trainer(Path(sys.argv[1]))
def slowly(trainer):
    trainer.save()
    print(trainer.step, flush=True)
    time.sleep(0.05)
trainer.run(progress=slowly)
"""


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_killed_process_that_goes_on_ends_with_the_same_bits(tmp_path, one_thread):
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", VICTIM, str(tmp_path / "killed")]
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    while (line := killed.stdout.readline()) and int(line) < 6:
        pass
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    again, whole = tiny_trainer(tmp_path / "killed"), tiny_trainer(tmp_path / "whole")
    assert again.resume() and 6 <= again.step < again.n_steps
    again.run()
    whole.run()
    assert_same(weights_of(whole), weights_of(again))


def test_a_step_of_two_batches_has_the_gradients_of_one_batch_twice_as_large(tmp_path):
    """Batches count by their positions, so that cutting a step otherwise changes nothing but rounding."""
    one = tiny_trainer(tmp_path / "one", kind="eagle1", noise=0.0)
    two = tiny_trainer(tmp_path / "two", kind="eagle1", noise=0.0, accumulate=2)
    first, second = sorted(one.epochs[0], key=len)[:: len(one.epochs[0]) - 1]
    found = []
    for trainer, plan in ((one, [first + second]), (two, [first, second])):
        trainer.optimizer.step = lambda lr, trainer=trainer: found.append(
            {name: p.grad.clone() for name, p in trainer.parameters.items()}
        )
        trainer._step(plan)
        assert trainer.step == 1
    assert len(first) != len(second)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-6)
    assert one.tally.values.tolist() == pytest.approx(two.tally.values.tolist(), rel=1e-5)


WORKER = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from fastdecode.train.parallel import join_group, leave_group
from loop_fixtures import tiny_trainer
group = join_group(torch.device("cpu"))
for kind in ("eagle3", "eagle1"):
    trainer = tiny_trainer(Path(sys.argv[1]) / kind, kind=kind, group=group)
    trainer.run()
    torch.save((trainer.parameters, trainer.rows, trainer.step), f"{sys.argv[1]}/{kind}{group.rank}.pt")
leave_group(group)
"""


def test_two_processes_train_as_one_that_accumulates_two_batches(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {**os.environ, "PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, str(script), str(tmp_path)], env=environment, check=True, capture_output=True)
    for kind in ("eagle3", "eagle1"):
        alone = tiny_trainer(tmp_path / "alone" / kind, kind=kind, accumulate=2)
        alone.run()
        for rank in (0, 1):
            parameters, rows, step = torch.load(tmp_path / f"{kind}{rank}.pt", weights_only=False)
            assert step == alone.step
            for name, parameter in alone.parameters.items():
                torch.testing.assert_close(parameters[name], parameter, rtol=1e-3, atol=2e-5)
            assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in alone.rows], rel=1e-3)


def test_a_full_disk_leaves_the_last_good_state_and_is_said(tmp_path, monkeypatch):
    notes = []
    trainer = tiny_trainer(tmp_path, note=notes.append)
    trainer._step(trainer.epochs[0])
    trainer.save()
    good = (tmp_path / "state.pt").read_bytes()
    trainer._step(trainer.epochs[0])

    class FullDisk:
        def __init__(self, file):
            self.file, self.left = file, 2000

        def write(self, data):
            self.left -= len(data)
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(data)

        def flush(self):
            self.file.flush()

    save = torch.save
    monkeypatch.setattr(checkpoint.torch, "save", lambda state, file: save(state, FullDisk(file)))
    trainer.save()
    assert (tmp_path / "state.pt").read_bytes() == good
    assert not list(tmp_path.glob("*.tmp"))
    assert len(notes) == 1 and "could not be saved" in notes[0]
    monkeypatch.undo()
    again = tiny_trainer(tmp_path)
    assert again.resume() and again.step == 1


def test_the_hours_bound_a_run_and_bring_the_rate_down_with_them(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trainer = tiny_trainer(tmp_path, epochs=100, hours=1.0, save_minutes=1e5)
    rates = []

    def minutes_pass(trainer):
        now[0] += 600  # a step takes ten minutes
        rates.append(trainer.lr())

    assert trainer.run(progress=minutes_pass)
    assert trainer.step == 6 and trainer.n_steps > 100
    assert trainer.seconds == pytest.approx(3600)
    assert rates[-1] < 0.2 * rates[0]
    assert trainer.score is not None
    again = tiny_trainer(tmp_path, epochs=100, hours=2.0)
    assert again.resume() and again.seconds == pytest.approx(3600) and again.share() == pytest.approx(0.5)


def test_a_run_that_is_asked_to_stop_saves_its_last_step(tmp_path):
    trainer = tiny_trainer(tmp_path)
    assert not trainer.run(stop=lambda: trainer.step == 3)
    again = tiny_trainer(tmp_path)
    assert again.resume() and again.step == 3


def test_a_state_of_other_settings_is_refused_by_name(tmp_path):
    tiny_trainer(tmp_path, epochs=1).run()
    with pytest.raises(InputError, match="lr 0.001, now 0.01"):
        tiny_trainer(tmp_path, lr=1e-2).resume()
    with pytest.raises(InputError, match="conversations 40, now 30"):
        tiny_trainer(tmp_path, n=30).resume()
    assert tiny_trainer(tmp_path, epochs=3).resume()  # longer is another run's good right


def test_a_damaged_state_is_refused_in_a_sentence(tmp_path):
    tiny_trainer(tmp_path, epochs=1).run()
    state = tmp_path / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(InputError, match="cannot be read as the state"):
        tiny_trainer(tmp_path).resume()


def test_held_out_conversations_are_never_trained_on(tmp_path):
    trainer = tiny_trainer(tmp_path)
    held_out = {i for batch in trainer.held_out for i in batch}
    trained = [{i for batch in plan for i in batch} for plan in trainer.epochs]
    assert held_out and all(not held_out & epoch for epoch in trained)
    assert all(len(held_out) + len(epoch) == 40 for epoch in trained)
