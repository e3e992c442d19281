"""URLs of object stores as text: their schemes, their parts, and credentials, which are kept out of every name.

A URL can hold credentials: `https://user:password@host/x`, or the query of a signed URL. `conceal` returns the URL
without them and remembers the whole one in this process; `reveal` returns it where a connection is opened. So settings,
provenance, logs, cards and messages hold concealed URLs only.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple


class Scheme(NamedTuple):
    """What a scheme needs: the package of its fsspec file system, and what to install."""

    package: str
    install: str
    credentials: str  # where they come from, for messages


SCHEMES = {
    "s3": Scheme("s3fs", "'adclr[remote]'", "the AWS_... variables, or a role of this machine"),
    "gs": Scheme("gcsfs", "gcsfs", "GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login"),
    "az": Scheme("adlfs", "adlfs", "the AZURE_STORAGE_... variables"),
    "http": Scheme("aiohttp", "'adclr[remote]'", "the URL itself, signed or with user:password@"),
    "https": Scheme("aiohttp", "'adclr[remote]'", "the URL itself, signed or with user:password@"),
    "hf": Scheme("huggingface_hub", "'adclr[remote]'", "HF_TOKEN, or hf auth login"),
}
WRITABLE = ("s3", "gs", "az")
URL = re.compile(rf"(?:{'|'.join(SCHEMES)})://")
# A URL inside of a text; it ends at white space, quotes and closing brackets.
INSIDE = re.compile(rf"\b(?:{'|'.join(SCHEMES)})://[^\s'\"<>)\]]+")
USER = re.compile(r"(?<=://)[^/@\s]*@")
# Names of the parts of a query that sign it: of AWS, Google, Azure (se, sig, sp, sr, sv), CloudFront, and plain tokens
SIGNED = re.compile(
    r"[?&](?:x-(?:amz|goog)-[^=&]+|awsaccesskeyid|googleaccessid|signature|policy|key-pair-id|s(?:ig|as|v|e|p|r)"
    r"|[^=&]*(?:token|secret|password|passwd|credential|auth|api[-_]?key)[^=&]*)=",
    re.IGNORECASE,
)
_whole: dict[str, str] = {}  # URLs with credentials by the same without


def is_remote(name: str | os.PathLike[str]) -> bool:
    """Return whether a name is a URL of a store, and not a path on this machine."""
    return URL.match(os.fspath(name)) is not None


def url_of(path: os.PathLike[str]) -> str | None:
    """Return the URL, without credentials, that a path was made of, s3:/bucket/x; None of another path."""
    url = os.fspath(path).replace(":/", "://", 1)
    return conceal(url) if URL.match(url) else None


def scheme_of(url: str) -> str:
    """Return the scheme of a URL."""
    return url.partition("://")[0]


def conceal(text: str) -> str:
    """Return a text in which no URL has credentials, and remember those of its URLs for `reveal`."""

    def without(match: re.Match[str]) -> str:
        url = match[0]
        clean = USER.sub("", url, count=1)
        if scheme_of(url) in ("http", "https") and SIGNED.search(clean):
            clean = clean.partition("?")[0]
        if clean != url:
            _whole[clean] = url
        return clean

    return INSIDE.sub(without, text) if "://" in text else text


def reveal(url: str) -> str:
    """Return a URL with the credentials that it, or a folder above it, was given with in this process."""
    if not _whole:
        return url
    if url in _whole:
        return _whole[url]
    above = url
    while "://" in (above := above.rpartition("/")[0]):
        whole = _whole.get(above) or _whole.get(f"{above}/")
        if whole is not None and "?" not in whole:  # the signature of one object is of no use for another
            return whole.rstrip("/") + url[len(above) :]
    return url


def join(url: str, name: str) -> str:
    """Return the URL of a name below a URL; a name that is a URL itself stays."""
    return name if is_remote(name) else f"{url.rstrip('/')}/{name}"


def parent(url: str) -> str:
    """Return the URL of the folder of an object."""
    return url.rstrip("/").rpartition("/")[0]


def base_name(url: str) -> str:
    """Return the last part of a URL, without a query."""
    return url.partition("?")[0].rstrip("/").rpartition("/")[2]
