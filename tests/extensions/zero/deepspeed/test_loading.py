"""Packages that the import of DeepSpeed leaves out."""

from __future__ import annotations

import importlib
import sys

import pytest

from lagom.extensions.zero.deepspeed.loading import unimportable


def test_a_package_cannot_be_imported_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "this", raising=False)
    with unimportable("this"), pytest.raises(ImportError):
        importlib.import_module("this")
    assert "this" not in sys.modules


def test_one_that_is_imported_stays() -> None:
    with unimportable("sys"):
        assert importlib.import_module("sys") is sys
    assert importlib.import_module("sys") is sys
