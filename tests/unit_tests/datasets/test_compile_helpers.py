"""The built dataset helper of the wheel is used as it is."""

import importlib.util

import pytest

from megatron.core.datasets import utils


def test_nothing_is_built_where_the_helper_imports(monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *args, **kwargs: pytest.fail("make was started"))
    utils.compile_helpers()


def test_stock_ends_the_program_there():
    with pytest.raises(SystemExit):
        utils.upstream.compile_helpers()


def test_stock_builds_it_where_it_is_missing(monkeypatch):
    called = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(utils.upstream, "compile_helpers", lambda: called.append(True))
    utils.compile_helpers()
    assert called == [True]
