"""Locks of files and folders that end with the process that holds them."""

from __future__ import annotations

import errno
import sys

_HAS_NONE = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EBADF)


def lock(file: int) -> bool | None:
    """Locks an open file or folder until it is closed, without waiting.

    Returns:
        Whether it is locked now; False if another process holds it, None where there are no locks.

    Raises:
        OSError: If it cannot be locked for another reason.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _HAS_NONE:
            raise
        return None
    return True
