"""How a library's file says that it does not take a call."""

__all__ = ["NotTaken", "require"]


class NotTaken(Exception):
    """The reason is the message; ours serves the call."""


def require(taken: bool, reason: str) -> None:
    """Raise `NotTaken` with this reason unless the call is taken."""
    if not taken:
        raise NotTaken(reason)
