"""URLs keep their credentials to themselves."""

from __future__ import annotations

import pytest

from adclr.system import store_urls
from adclr.system.store_urls import conceal, is_remote, reveal

SIGNED = "https://host/x.tar?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=abc"
CASES = {
    "https://ann:pass@host/x.tar": "https://host/x.tar",
    SIGNED: "https://host/x.tar",
    "https://acc.blob.core.windows.net/c/x.tar?sv=2022&sig=s%3D&se=2027": "https://acc.blob.core.windows.net/c/x.tar",
    "https://host/x.tar?Expires=1&Signature=s&Key-Pair-Id=k": "https://host/x.tar",
    "https://host/x.tar?access_token=t": "https://host/x.tar",
    "s3://key:secret@bucket/x": "s3://bucket/x",
    "data.path=https://a:b@host/x model.init=https://host/w?token=1": "data.path=https://host/x model.init=https://host/w",
}
HARMLESS = ["s3://bucket/a b/x.png", "https://host/get?id=7&size=large", "photos/", "hf://datasets/org/name/x", "a@b"]


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_urls, "_whole", {})


@pytest.mark.parametrize("text", CASES)
def test_credentials_are_left_out(text: str) -> None:
    assert conceal(text) == CASES[text]
    assert conceal(CASES[text]) == CASES[text]
    if " " not in text:
        assert reveal(CASES[text]) == text


@pytest.mark.parametrize("text", HARMLESS)
def test_other_names_stay(text: str) -> None:
    assert conceal(text) == text == reveal(text)


def test_a_password_holds_for_what_is_below_a_url_and_a_signature_does_not() -> None:
    conceal("https://ann:pass@host/photos/")
    conceal(SIGNED)
    assert reveal("https://host/photos/cats/1.png") == "https://ann:pass@host/photos/cats/1.png"
    assert reveal("https://host/x.tar/y") == "https://host/x.tar/y"
    assert reveal("https://other/photos/1.png") == "https://other/photos/1.png"


def test_what_is_in_a_store() -> None:
    assert all(map(is_remote, ("s3://b/x", "gs://b", "az://c/x", "https://h/x", "hf://datasets/a/b")))
    assert not any(map(is_remote, ("hf:name", "timm:vit", "s3:/x", "photos", "file://x")))
