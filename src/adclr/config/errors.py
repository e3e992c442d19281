"""The error for mistakes of the user, without pydantic, which takes 60 ms to import and which --help does not need."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the user; its message is one sentence for a person."""
