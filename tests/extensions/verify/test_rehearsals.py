"""``verify=True``: programs that ranks can run as one process does, and programs that they cannot, before they run."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from lagom import experiment
from lagom.cluster import Cluster
from lagom.config import TorchDistributedConfig
from lagom.driver.local import LocalLauncher
from lagom.errors import PlanError, VerificationError
from lagom.extensions.verify.rehearsals import verify
from lagom.extensions.verify.verification import Verification
from lagom.launch import choose
from lagom.plan import Plan, plan
from lagom.program.signature import Call
from lagom.random_states import random_states, set_random_states
from lagom.result import Result
from tests.imported_once import imported_once  # noqa: F401

POINTS = torch.rand(29, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
DATA = TensorDataset(POINTS, POINTS.prod(dim=1, keepdim=True))

pytestmark = pytest.mark.usefixtures("rng_untouched")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(
    data: Dataset[Any] = DATA,
    model: Callable[[], nn.Module] = network,
    reduction: str = "mean",
    each: Callable[[torch.Tensor], bool] = lambda loss: False,
) -> list[torch.Tensor]:
    """Two epochs in batches of 8, the last of 5; ends when ``each`` says so of a loss."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(2):
        for inputs, targets in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(inputs), targets, reduction=reduction)
            loss.backward()
            optimizer.step()
            if each(loss):
                return [p.detach() for p in net.parameters()]
    return [p.detach() for p in net.parameters()]


class Pairs(Dataset[Any]):
    """Each sample is compared with one drawn at random."""

    def __len__(self) -> int:
        return len(POINTS)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        other = POINTS[random.randrange(len(POINTS))]
        return POINTS[index] - other, other.prod().reshape(1)


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 1)).double()


class Recurrent(nn.Module):
    """Has dropout between the layers of a recurrent module, which is not ``nn.functional.dropout``."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(1, 4, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(4, 1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.gru(x.unsqueeze(-1))[0][:, -1])
        return output


def stops_on_loss() -> Any:
    return train(each=lambda loss: loss.item() < 1e-3)


def could_stop_on_loss() -> Any:
    return train(each=lambda loss: loss.item() < 1e-12)


def compares_tensors() -> Any:
    return train(each=lambda loss: bool(loss < 1e-12))


def steps_by_hand() -> None:
    net = network()
    for inputs, targets in DataLoader(DATA, batch_size=8, shuffle=True):
        gradients = torch.autograd.grad(nn.functional.mse_loss(net(inputs), targets), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            parameter.data.add_(gradient, alpha=-0.1)


def prints_the_running_loss() -> None:
    total = 0.0

    def add(loss: torch.Tensor) -> bool:
        nonlocal total
        total += loss.item()
        return False

    train(each=add)
    print(f"loss {total:.6f}")


def without_a_loader() -> list[torch.Tensor]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(POINTS), POINTS.prod(dim=1, keepdim=True)).backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


class Experts(nn.Module):
    """Each sample goes through one of two layers: a share may have samples of one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 1).double() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.zeros(len(x), 1, dtype=torch.float64)
        for i, layer in enumerate(self.layers):
            mine = (x.sum(dim=1) > 2.2) == bool(i)  # one of them all
            if mine.any():
                output = output.index_put((mine,), layer(x[mine]))
        return output


def unseeded() -> Any:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    for inputs, targets in DataLoader(DATA, batch_size=8, shuffle=True, generator=generator):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def configured(world_size: int = 2, **settings: Any) -> TorchDistributedConfig:
    return TorchDistributedConfig(
        launcher="local", world_size=world_size, **{"batches": "split", "seed": 0, **settings}
    )


def verified(function: Callable[..., Any], world_size: int = 2, **settings: Any) -> Verification:
    config = configured(world_size, **settings)
    launcher = choose("local")
    call = Call(function=function, provided={"hparams": {}})
    return verify(launcher, plan(config, launcher.cluster()), call)


def refused(function: Callable[..., Any], world_size: int = 2, **settings: Any) -> str:
    """The text of the error, what it says in the end on one line."""
    with pytest.raises(VerificationError) as error:
        verified(function, world_size, **settings)
    lines = str(error.value).splitlines()
    table = [line for line in lines[1:] if line.startswith("  ")]
    return "\n".join([lines[0], *table, " ".join(lines[1 + len(table) :])])


def row(table: object, what: str) -> str:
    """The row's first line."""
    return next(line.strip() for line in str(table).splitlines() if line.strip().startswith(what))


@cache
def train_verified(world_size: int) -> Verification:
    return verified(train, world_size)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_program_that_ranks_run_as_one_process_does_is_said_to_agree(world_size: int) -> None:
    found = train_verified(world_size)
    assert found.verdict == "agrees"
    for what in ("losses", "gradients", "parameters", "samples", "result"):
        assert "agrees" in row(found, what), what
    assert "58 in 8 batches" in row(found, "samples")
    assert str(found).endswith("The ranks do what one process does.")


def train_wide() -> None:
    """Train a network in float32 that is large enough to be split."""
    x = torch.rand(768, 64, generator=torch.Generator().manual_seed(5))
    net = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for inputs, targets in DataLoader(TensorDataset(x, x[:, :1].sin()), batch_size=256):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs), targets).backward()
        optimizer.step()


def test_rounding_of_the_ranks_is_shown_beside_that_of_one_process() -> None:
    one, ranks = re.findall(r"(\S+) loss, (\S+) weights", row(verified(train_wide, batches="whole"), "rounding"))
    assert max(map(float, one + ranks)) < 1e-5
    assert float(one[1]) > 0
    assert float(ranks[1]) > 0


def test_without_rounding_there_is_no_control() -> None:
    assert "rounding" not in str(train_verified(2))


def fetches_ahead() -> list[torch.Tensor]:
    """Fetch the next batch between forward and backward; the last batch has 5 samples."""
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    batches = iter(DataLoader(DATA, batch_size=8))
    batch = next(batches)
    while batch is not None:
        inputs, targets = batch
        loss = nn.functional.mse_loss(net(inputs), targets)
        batch = next(batches, None)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()]


def test_a_loss_has_the_weight_of_its_own_batch_though_the_next_one_was_fetched() -> None:
    assert verified(fetches_ahead).verdict == "agrees"


@pytest.mark.soak
def test_parameters_that_only_some_ranks_reach_are_compared_on_all() -> None:
    assert verified(lambda: train(model=Experts)).verdict == "agrees"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.soak)])
def test_a_sum_is_found_by_its_factor_and_whole_is_named(world_size: int) -> None:
    with pytest.raises(VerificationError) as error:
        verified(lambda: train(reduction="sum"), world_size)
    assert f"1/{world_size} of one process's" in str(error.value)
    found = " ".join(str(error.value).split())
    assert "This program needs batches='whole': with it, the ranks do what one process does." in found


@pytest.mark.soak
def test_a_number_that_leaves_torch_through_numpy_is_of_a_share() -> None:
    def leaves(loss: torch.Tensor) -> bool:
        numbers: list[Any] = [
            loss.detach().numpy(),
            loss.tolist(),
            np.asarray(loss.detach()),
        ]
        return all(float(number) < 1e-12 for number in numbers)

    found = " ".join(refused(lambda: train(each=leaves)).split())
    line = leaves.__code__.co_firstlineno + 2
    places = ", ".join(f"test_rehearsals.py:{line + i}" for i in range(3))
    assert f"each rank reads that of its own share ({places})" in found


@pytest.mark.soak  # test_rehearsal.py and tests/extensions/verify/test_programs.py show decisions by default
@pytest.mark.parametrize("program", [stops_on_loss, could_stop_on_loss, compares_tensors])
def test_a_program_that_decides_by_the_loss_of_a_share_needs_whole(program: Callable[[], Any]) -> None:
    with pytest.raises(VerificationError, match=r"needs\s+batches='whole'") as error:
        verified(program)
    if program is not stops_on_loss:  # that one ends with ranks in different places
        assert "the program decides by it (test_rehearsals.py:" in " ".join(str(error.value).split())


@pytest.mark.soak
def test_updates_from_autograd_grad_agree() -> None:
    assert verified(steps_by_hand).verdict == "agrees"


@pytest.mark.soak
def test_updates_from_the_loss_of_a_share_need_whole() -> None:
    def shrinks() -> None:
        net = network()
        for inputs, targets in DataLoader(DATA, batch_size=8, shuffle=True):
            loss = nn.functional.mse_loss(net(inputs), targets)
            loss.backward()
            for parameter in net.parameters():
                parameter.data.mul_(1 - loss.detach())

    with pytest.raises(VerificationError, match="batches='whole'") as error:
        verified(shrinks)
    assert "no longer has the" in str(error.value)


def test_a_number_that_is_only_shown_is_a_reason_not_to_begin() -> None:
    found = refused(prints_the_running_loss)
    assert "DIFFERS" in row(found, "printed")
    assert "agrees" in row(found, "parameters")
    assert "Not what one process shows: " in found
    assert "with batches='whole' it agrees" in found


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda: train(data=Pairs(), model=with_dropout), marks=pytest.mark.soak),
        pytest.param(lambda: train(data=Pairs()), marks=pytest.mark.soak),
        lambda: train(model=with_dropout),
        pytest.param(lambda: train(model=Recurrent), marks=pytest.mark.soak),
    ],
    ids=["both", "pairs", "dropout", "recurrent"],
)
def test_random_numbers_of_the_ranks_own_are_told_from_mistakes(program: Callable[[], Any]) -> None:
    found = refused(program)
    assert "its draws fixed" in found
    assert "Not the numbers of one process: each rank draws random numbers of its own" in found
    assert "with batches='whole' it agrees" in found


@pytest.mark.soak
def test_draws_of_larger_batches_are_said_to_be_random() -> None:
    found = verified(lambda: train(data=Pairs(), model=with_dropout), batches="per_rank")
    assert found.verdict == "random"  # no setting has these batches and these draws


@pytest.mark.soak
def test_a_mistake_is_not_hidden_by_random_numbers() -> None:
    with pytest.raises(VerificationError, match="batches='whole'"):
        verified(lambda: train(model=with_dropout, reduction="sum"))


@pytest.mark.soak
def test_what_every_rank_does_whole_is_right_and_said_not_to_be_faster() -> None:
    found = verified(without_a_loader)
    assert found.verdict == "agrees"
    assert "not split" in row(found, "work")
    assert "no faster than in one process" in str(found)


@pytest.mark.soak
def test_a_program_that_does_not_repeat_itself_is_told_so() -> None:
    with pytest.raises(VerificationError, match="Two runs of one process already differ"):
        verified(unseeded)


@pytest.mark.soak
def test_a_program_that_no_setting_keeps_is_told_so() -> None:
    def uses_its_rank() -> Any:
        import lagom

        return train(reduction="sum" if lagom.rank() else "mean")

    with pytest.raises(VerificationError, match="cannot be distributed faithfully"):
        verified(uses_its_rank)


def test_per_rank_is_compared_with_one_process_that_has_the_larger_batch() -> None:
    found = verified(train, batches="per_rank")
    assert found.verdict == "agrees"
    assert "in 4 backwards" in row(found, "losses")  # 29 samples in twos of batches of 8, twice


class Stream(IterableDataset[Any]):
    """The points, in order; each rank's own part where it ``lagom_sharded`` itself."""

    def __init__(self, *, sharded: bool = False) -> None:
        self.lagom_sharded = sharded

    def __iter__(self) -> Any:
        import lagom

        rank, world_size = (lagom.rank(), lagom.world_size()) if self.lagom_sharded else (0, 1)
        yield from ((x, x.prod().reshape(1)) for x in POINTS[rank::world_size])


def over_a_stream(*, sharded: bool = False) -> None:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for _ in range(2):
        for inputs, targets in DataLoader(Stream(sharded=sharded), batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("batches", "num_backwards"), [("split", 8), pytest.param("per_rank", 4, marks=pytest.mark.soak)]
)
def test_iterable_data_sets_are_rehearsed_too(batches: Any, num_backwards: int) -> None:
    found = verified(over_a_stream, batches=batches)
    assert found.verdict == "agrees"
    assert f"in {num_backwards} backwards" in row(found, "losses")


def test_a_data_set_that_shards_itself_is_said_to_have_no_like_in_one_process() -> None:
    found = verified(lambda: over_a_stream(sharded=True))
    assert found.verdict == "unlike"
    assert "lagom_sharded" in str(found)


def test_a_program_for_torchrun_is_not_rehearsed(capfd: pytest.CaptureFixture[str]) -> None:
    def joins() -> int:
        torch.distributed.init_process_group("gloo")
        return torch.distributed.get_world_size()

    assert experiment.lagom(joins, configured(verify=True)).value == 2
    told = capfd.readouterr().err
    assert "lagom: joins: not rehearsed: it, or a module of yours that it uses, starts a process group" in told
    assert "rehearsed on" not in told


def evaluate() -> float:
    with torch.no_grad():
        return sum(float(inputs.sum()) for inputs, _ in DataLoader(DATA, batch_size=10))


def test_what_follows_from_time_is_left_out_however_long_ranks_take() -> None:
    def timed() -> str:
        import lagom

        start = time.perf_counter()
        train()
        time.sleep(0.3 * (lagom.world_size() > 1))
        seconds = time.perf_counter() - start
        print(
            f"epoch 1 | {time.strftime('%H:%M:%S')}s" + (" slow" if seconds > 0.3 else "") + f" | {seconds / 1e3:.4f}"
        )
        print("fps", int(58 / seconds))
        return f"{seconds / 100:.3f} h"

    found = verified(timed)
    assert found.verdict == "agrees"
    assert "agrees" in row(found, "printed")
    assert "agrees" in row(found, "result")


@pytest.mark.soak
def test_a_rehearsal_that_dies_agrees_with_nothing() -> None:
    def dies() -> None:
        train()
        os._exit(3)

    found = refused(dies)
    assert "The process of the rehearsal died" in found


@pytest.mark.soak
def test_a_program_that_tries_again_without_end_is_no_hang() -> None:
    def stubborn() -> None:
        net = network()
        while True:
            try:
                net(POINTS).mean().backward()
            except:  # noqa: E722, PERF203
                continue

    assert "The process of the rehearsal died" in refused(stubborn)


def test_padding_to_the_longest_sample_of_a_share_is_not_called_random() -> None:
    def pad(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        longest = max(int(10 * x[0]) + 1 for x, _ in samples)
        return torch.stack([nn.functional.pad(x, (0, 10 - len(x)), value=float(longest)) for x, _ in samples])[
            :, : max(longest, 3)
        ]

    def padded() -> None:
        weight = nn.Parameter(torch.ones(10, dtype=torch.float64))
        for batch in DataLoader(DATA, batch_size=8, collate_fn=pad):
            (batch * weight[: batch.shape[1]]).sum(1).square().mean().backward()

    found = refused(padded)
    assert "as many, of other shapes" in found
    assert "random" not in found


@pytest.mark.soak
def test_an_evaluation_that_begins_in_training_mode_is_found() -> None:
    def evaluates_inside() -> float:
        train()
        net, correct = network(), 0
        for inputs, targets in DataLoader(DATA, batch_size=8):
            net.eval()
            with torch.no_grad():
                correct += int((net(inputs).sigmoid() > targets).sum())
        return correct / len(DATA)

    found = refused(evaluates_inside)
    assert "needs batches='whole': with it, the ranks do what one process does" in " ".join(found.split())


@pytest.mark.soak
def test_a_result_at_the_end_of_many_epochs_is_compared_whatever_its_type() -> None:
    def history() -> Any:
        net, found = network(), SimpleNamespace(accuracy=[])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        for _epoch in range(6):
            correct = 0
            for inputs, targets in DataLoader(DATA, batch_size=8, shuffle=True):
                output = net(inputs)
                optimizer.zero_grad()
                nn.functional.mse_loss(output, targets).backward()
                optimizer.step()
                correct += int(((output > 0.125) == (targets > 0.125)).sum())
            found.accuracy.append(correct / len(DATA))
        return found

    found = refused(history)
    assert "DIFFERS: in .accuracy[0]" in row(found, "result")
    assert "agrees" in row(found, "parameters")
    assert "needs batches='whole': with it, the ranks do what one process does" in " ".join(found.split())


@pytest.mark.soak
def test_whole_says_when_split_gives_the_same() -> None:
    assert "batches='split' shares it out, and gives the same" in verified(train, batches="whole").told


@pytest.mark.soak
def test_whole_does_not_name_split_where_it_gives_other_numbers() -> None:
    found = verified(lambda: train(reduction="sum"), batches="whole")
    assert found.verdict == "agrees"
    assert "split" not in found.told


def test_an_exception_that_one_process_ends_with_too_is_left_to_the_run(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        train()
        raise KeyError("later")

    with pytest.raises(KeyError, match="later"):
        experiment.lagom(fails, configured(verify=True))
    told = capfd.readouterr().err
    assert "KeyError: 'later'" in row(told, "ends with")
    assert "One process ends with an error, and so do the ranks; up to there they do the same." in " ".join(
        told.split()
    )
    assert "What would follow is not compared" in " ".join(told.split())


def lands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "start.txt").write_text("7")
    (tmp_path / "kept.txt").write_text("as it was")
    monkeypatch.chdir(tmp_path)


def test_files_of_a_rehearsal_do_not_land_and_it_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lands(tmp_path, monkeypatch)

    def program() -> Any:
        weights = train()
        print("printed", Path("start.txt").read_text())
        Path("kept.txt").write_text("changed")
        (tmp_path / "absolute.txt").write_text("written")
        assert Path("absolute.txt").read_text() == "written"
        os.makedirs("out", exist_ok=True)
        torch.save(weights, "out/model.pt")
        return weights

    verified(program)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt", "start.txt"]
    assert Path("kept.txt").read_text() == "as it was"
    assert capfd.readouterr() == ("", "")


@pytest.mark.soak
def test_the_run_itself_is_the_one_without_verify(capfd: pytest.CaptureFixture[str]) -> None:
    before = random_states()

    def drawing() -> tuple[torch.Tensor, ...]:
        print("drawing")
        return (*train(), torch.rand(2), torch.tensor(random.random()))

    plain: Result = experiment.lagom(drawing, configured(seed=None))
    after = random_states()
    set_random_states(before)
    assert capfd.readouterr().out == "drawing\n"
    checked: Result = experiment.lagom(drawing, configured(seed=None, verify=True))
    out, err = capfd.readouterr()
    assert out == "drawing\n"
    assert "rehearsed on this machine" in err
    assert all(torch.equal(a, b) for a, b in zip(plain.value, checked.value, strict=True))
    assert repr(random_states()) == repr(after)
    set_random_states(before)


@pytest.mark.soak
def test_sharded_evaluation_is_right_where_the_program_does_not_add_up_and_such_a_run_does_not_begin(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "begun")

    def program() -> float:
        total = evaluate()
        Path(path).touch()
        return total

    with pytest.raises(VerificationError) as error:
        experiment.lagom(program, configured(evaluation="sharded", verify=True))
    assert "needs evaluation='gathered': with it, the ranks do what one process does" in " ".join(
        str(error.value).split()
    )
    assert not os.path.exists(path)


def test_one_rank_is_not_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    run = LocalLauncher.run

    def noted(self: LocalLauncher, plan: Plan, *others: Any) -> Any:
        plans.append(plan)
        return run(self, plan, *others)

    monkeypatch.setattr(LocalLauncher, "run", noted)
    experiment.lagom(train, configured(1, verify=True))
    assert [plan.rehearsal for plan in plans] == [None]


@pytest.mark.soak
def test_a_long_program_is_cut_short() -> None:
    def endless() -> None:
        while True:
            train()

    found = verified(endless)
    assert "in 64 backwards" in row(found, "losses")
    assert "what it returns is not compared" in " ".join(str(found).split())


@pytest.mark.soak
def test_half_precision_and_adam_are_allowed_their_rounding() -> None:
    def half() -> None:
        net = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        labels = torch.arange(29) % 4
        for _ in range(3):
            for inputs, targets in DataLoader(TensorDataset(POINTS.float(), labels), batch_size=16, shuffle=True):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = nn.functional.cross_entropy(net(inputs), targets)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    assert verified(half).verdict == "agrees"


def test_a_notebook_gets_a_table() -> None:
    found = train_verified(2)
    text = found._repr_html_()
    assert text.count("<tr>") == 1 + len(found.shown_rows())
    assert "<th style='text-align:left'>2 ranks, batches=&#x27;split&#x27;</th>" in text
    assert re.search(r"<td[^>]*>losses</td>", text)


def test_what_cannot_be_planned_is_said_before_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalLauncher, "cluster", lambda _: Cluster(launcher="local", slots=1))
    monkeypatch.setattr(LocalLauncher, "run", lambda *_: pytest.fail("it began to rehearse"))
    with pytest.raises(PlanError, match="has 1 task slots"):
        experiment.lagom(train, configured(2, verify=True))
