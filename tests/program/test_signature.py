"""``lagom.program.signature``: a function gets by keyword what its signature names, as in a plain call."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from lagom import experiment
from lagom.config import TorchDistributedConfig
from lagom.program.signature import arguments, check_makers, unread_hparams

PROVIDED = {
    "module": "M",
    "hparams": {"lr": 0.1, "epochs": 3},
    "train_set": "TRAIN",
    "test_set": "TEST",
    "dataset": ["TRAIN", "TEST"],
    "reporter": "R",
}


def call(function: Callable[..., Any], provided: dict[str, Any] | None = None) -> Any:
    positional, named = arguments(function, PROVIDED if provided is None else provided)
    return function(*positional, **named)


REST = {"epochs": 3}


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (lambda: "nothing", "nothing"),
        # Fields of the config, by name and in any order; data sets in Maggy's spelling too.
        (lambda test_set, module, train_set: (module, train_set, test_set), ("M", "TRAIN", "TEST")),
        (lambda module, dataset, reporter: (module, dataset, reporter), ("M", ["TRAIN", "TEST"], "R")),
        # Other names are those of hparams; keyword arguments are the hparams that are left, no fields of the config.
        (lambda lr, *, epochs: (lr, epochs), (0.1, 3)),
        (lambda lr, **rest: (lr, rest), (0.1, REST)),
        (lambda **rest: rest, {"lr": 0.1, **REST}),
        (lambda module, **rest: rest, {"lr": 0.1, **REST}),
        (lambda lr, *rest, epochs: (lr, rest, epochs), (0.1, (), 3)),
        # Parameters by position only, with and without a default.
        (lambda module, lr, /, epochs: (module, lr, epochs), ("M", 0.1, 3)),
        (lambda momentum=0.9, lr=1.0, /: (momentum, lr), (0.9, 0.1)),
        # A default is used only where nothing is provided.
        (lambda lr=5, momentum=0.9: (lr, momentum), (0.1, 0.9)),
        # A partial keeps what it has by position; by keyword it has a default.
        (functools.partial(lambda a, b, lr: (a, b, lr), 1, b=2), (1, 2, 0.1)),
        (functools.partial(lambda lr: lr, lr=9), 0.1),
    ],
)
def test_a_function_gets_what_it_names(function: Callable[..., Any], wanted: Any) -> None:
    assert call(function) == wanted


def test_a_default_serves_a_field_that_the_config_does_not_have() -> None:
    assert call(lambda hparams, module=None: module, {"hparams": {}}) is None


def test_a_field_of_the_config_goes_before_an_hparam_of_that_name() -> None:
    provided = {"hparams": {"module": "from hparams"}, "module": "from the config"}
    assert call(lambda module: module, provided) == "from the config"
    assert call(lambda module, **rest: rest, provided) == {}


def test_an_hparam_called_hparams_is_found_inside_hparams_only() -> None:
    assert call(lambda hparams: hparams, {"hparams": {"hparams": 1}}) == {"hparams": 1}


def test_hparams_that_are_none_or_false_are_passed() -> None:
    assert call(lambda a, b=7, c=8: (a, b, c), {"hparams": {"a": None, "b": None, "c": 0}}) == (None, None, 0)


def test_methods_callable_objects_and_classes_are_functions_too() -> None:
    class Trainer:
        def __init__(self, lr: float = 0.0) -> None:
            self.lr = lr

        def fit(self, epochs: int) -> int:
            return epochs

        def __call__(self, module: Any, lr: float) -> Any:
            return module, lr

        @classmethod
        def make(cls, lr: float) -> float:
            return lr

        @staticmethod
        def double(lr: float) -> float:
            return 2 * lr

    assert call(Trainer().fit) == 3
    assert call(Trainer()) == ("M", 0.1)
    assert call(Trainer).lr == 0.1
    assert call(Trainer.make) == 0.1
    assert call(Trainer.double) == 0.2


def test_a_decorated_function_is_asked_for_what_the_inner_one_names() -> None:
    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper

    assert call(decorated(lambda lr, epochs: (lr, epochs))) == (0.1, 3)


def test_a_builtin_with_a_signature_works() -> None:
    assert call(len, {"hparams": {"obj": [1, 2]}}) == 2


def test_a_builtin_without_a_signature_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="wrap it in a def"):
        arguments(dict, PROVIDED)


@pytest.mark.parametrize("thing", [None, 3, "train", ["train"]])
def test_what_is_no_function_is_refused(thing: Any) -> None:
    with pytest.raises(ValueError, match="want the training function"):
        arguments(thing, PROVIDED)


async def _waits(lr: float) -> None: ...


def _yields(lr: float) -> Any:
    yield lr


async def _streams(lr: float) -> Any:
    yield lr


class _Called:
    async def __call__(self, lr: float) -> None: ...


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_waits, r"_waits\(\) is an async function"),
        (functools.partial(_waits, lr=1), r"_waits\(\) is an async function"),
        (_Called(), "the _Called is an async function"),
        (_yields, r"_yields\(\) is a generator function"),
        (_streams, r"_streams\(\) is a generator function"),
        (torch.nn.Sequential(torch.nn.ReLU()), "the Sequential is a module"),
    ],
)
def test_what_would_not_train_when_it_is_called_is_refused(function: Any, said: str) -> None:
    with pytest.raises(ValueError, match=rf"^{said}.*; want an ordinary function.*$") as raised:
        arguments(function, PROVIDED)
    assert "\n" not in str(raised.value)


def _wrapped(function: Any) -> Any:
    @functools.wraps(function)
    def call(lr: float) -> Any:
        return function(lr)

    return call


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_wrapped(_waits), r"_waits\(\) returned a coroutine, which only an event loop would run"),
        (_wrapped(_yields), r"_yields\(\) returned a generator, which runs when it is read"),
        (lambda lr: _streams(lr), r"<lambda>\(\) returned a generator, which runs when it is read"),
    ],
)
def test_a_function_that_hides_one_that_does_not_run_is_told_when_it_returns(function: Any, said: str) -> None:
    config = TorchDistributedConfig(hparams={"lr": 1.0}, launcher="inline", run_dir=None)
    with warnings.catch_warnings(record=True) as warned, pytest.raises(ValueError, match=said):
        experiment.lagom(function, config)
    assert warned == []


def test_a_misspelt_parameter_is_told_the_nearest_name() -> None:
    with pytest.raises(ValueError, match=r"'epoch', which nothing provides; did you mean 'epochs'\?"):
        arguments(lambda epoch: None, PROVIDED)
    with pytest.raises(ValueError, match=r"'trainset', which nothing provides; did you mean 'train_set'\?"):
        arguments(lambda trainset: None, {"hparams": {}})
    with pytest.raises(ValueError, match=r"'test_set', which nothing provides\. The config"):
        arguments(lambda test_set: None, {"hparams": {}})


def test_a_misspelt_hparam_that_leaves_a_parameter_at_its_default_is_told() -> None:
    def train(learning_rate: float = 0.1, epochs: int = 1) -> None: ...

    misspelt = {"learnign_rate": 1.0, "epochs": 2}
    assert unread_hparams(train, misspelt) == ["nothing reads hparams['learnign_rate']; did you mean 'learning_rate'?"]
    assert unread_hparams(train, {"learning_rate": 1.0, "batch_size": 2}) == []
    assert unread_hparams(lambda hparams, learning_rate=1: None, misspelt) == []
    assert unread_hparams(lambda learning_rate=1, **rest: None, misspelt) == []


def test_a_maker_of_data_that_needs_arguments_is_refused_naming_them() -> None:
    class Digits(torch.utils.data.Dataset[Any]):
        def __init__(self, root: str, *, train: bool = True) -> None: ...

    with pytest.raises(ValueError, match=r"train_set is Digits, .* needs 'root'; .* train_set=lambda: Digits\("):
        check_makers({"train_set": Digits})
    with pytest.raises(ValueError, match=r"test_set is <lambda>, .* needs 'path', 'kind'"):
        check_makers({"test_set": lambda path, kind: None})
    check_makers({"train_set": lambda root="x": None, "test_set": functools.partial(Digits, "root")})
    check_makers({"train_set": [1, 2], "test_set": "path", "dataset": None})


def test_a_missing_hparam_is_an_error_naming_it_the_function_and_what_is_there() -> None:
    def train(module: Any, learning_rate: float) -> None: ...

    with pytest.raises(ValueError, match="learning_rate") as raised:
        arguments(train, PROVIDED)
    text = str(raised.value)
    assert "train()" in text
    assert "'lr', 'epochs'" in text
    assert "into hparams" in text


def test_a_missing_field_is_an_error_that_tells_which_field_to_set() -> None:
    with pytest.raises(ValueError, match="set test_set= in the config") as raised:
        arguments(lambda test_set: None, {"hparams": {}, "module": "M"})
    assert "module" in str(raised.value)


def test_dataset_with_one_of_the_two_sets_is_missing() -> None:
    with pytest.raises(ValueError, match="dataset"):
        arguments(lambda dataset: None, {"hparams": {}, "train_set": "TRAIN"})


def test_hparams_are_not_copied_so_the_function_sees_the_type_it_was_given() -> None:
    class Settings(dict[str, Any]):
        pass

    settings = Settings(lr=1)
    assert call(lambda hparams: hparams, {"hparams": settings}) is settings
