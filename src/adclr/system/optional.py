"""Optional packages: import them where they are used, or say which extra installs them."""

from __future__ import annotations

import importlib.util
from typing import Any

from adclr.config.parsing import UserError


def require(package: str, extra: str, purpose: str) -> Any:
    """Return an optional package or one of its modules, imported; `purpose` says to users what needs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:  # its name is that of the missing package, which can be one that this one imports
        raise not_installed(error.name or package, f"'adclr[{extra}]'", purpose) from None


def check_installed(package: str, extra: str, purpose: str) -> None:
    """Refuse if an optional package is missing, without the time that importing it takes."""
    if importlib.util.find_spec(package) is None:
        raise not_installed(package, f"'adclr[{extra}]'", purpose)


def not_installed(package: str, install: str, purpose: str) -> UserError:
    """Return the error that names a missing package and what to give to `pip install`."""
    return UserError(f"{purpose} needs {package}, which is not installed; run: pip install {install}")
