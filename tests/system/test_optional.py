"""Optional packages: imported, or refused with the extra that installs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from adclr.config.parsing import UserError
from adclr.system import optional


def test_an_installed_package_is_imported() -> None:
    optional.check_installed("json", "extra", "this test")
    assert optional.require("json", "extra", "this test") is json


def test_a_missing_package_names_its_purpose_and_its_extra() -> None:
    sentence = r"^this test needs no_such_package, which is not installed; run: pip install 'adclr\[extra\]'$"
    with pytest.raises(UserError, match=sentence):
        optional.require("no_such_package", "extra", "this test")
    with pytest.raises(UserError, match=sentence):
        optional.check_installed("no_such_package", "extra", "this test")


def test_what_a_package_itself_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "half_installed", raising=False)
    with pytest.raises(UserError, match="this test needs no_such_package, which"):
        optional.require("half_installed", "extra", "this test")
