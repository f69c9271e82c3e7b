"""``lagom.program.signature``: a function gets by keyword what its signature names, as in a plain call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

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


def test_the_fields_of_the_config_are_passed_by_name_in_any_order() -> None:
    def train(test_set: Any, hparams: Any, module: Any, train_set: Any) -> Any:
        return module, hparams, train_set, test_set

    assert call(train) == ("M", PROVIDED["hparams"], "TRAIN", "TEST")


def test_the_data_sets_come_in_maggys_spelling_too() -> None:
    assert call(lambda module, dataset, reporter: (module, dataset, reporter)) == ("M", ["TRAIN", "TEST"], "R")


def test_a_function_without_parameters_gets_nothing() -> None:
    assert arguments(lambda: None, PROVIDED) == ([], {})


def test_other_names_are_looked_up_in_hparams() -> None:
    assert call(lambda lr, *, epochs: (lr, epochs)) == (0.1, 3)


def test_keyword_arguments_take_the_hparams_that_are_left() -> None:
    assert call(lambda lr, **rest: (lr, rest)) == (0.1, {"epochs": 3})
    assert call(lambda **rest: rest) == {"lr": 0.1, "epochs": 3}


def test_keyword_arguments_do_not_take_the_fields_of_the_config() -> None:
    assert call(lambda module, **rest: rest) == {"lr": 0.1, "epochs": 3}


def test_star_arguments_stay_empty() -> None:
    assert call(lambda lr, *rest, epochs: (lr, rest, epochs)) == (0.1, (), 3)


def test_positional_only_parameters_are_filled() -> None:
    def train(module: Any, lr: float, /, epochs: int) -> Any:
        return module, lr, epochs

    assert call(train) == ("M", 0.1, 3)


def test_a_positional_only_default_before_a_provided_one_keeps_its_place() -> None:
    def train(momentum: float = 0.9, lr: float = 1.0, /) -> Any:
        return momentum, lr

    assert call(train) == (0.9, 0.1)


def test_a_default_is_used_only_where_nothing_is_provided() -> None:
    assert call(lambda lr=5, momentum=0.9: (lr, momentum)) == (0.1, 0.9)


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


def test_a_partial_keeps_what_it_has() -> None:
    def train(a: Any, b: Any, lr: float) -> Any:
        return a, b, lr

    assert call(functools.partial(train, 1, b=2)) == (1, 2, 0.1)


def test_a_partials_keyword_is_a_default_that_hparams_replaces() -> None:
    assert call(functools.partial(lambda lr: lr, lr=9)) == 0.1


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
        (functools.partial(_waits, lr=1), "the partial is an async function"),
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
