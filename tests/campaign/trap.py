"""Death before a file operation, told by Python's own audit events."""

import os
import signal
import sys

_EVENTS = {
    *("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"),
    *("os.chmod", "os.utime", "shutil.move", "shutil.rmtree", "shutil.copyfile"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class Trap:
    """Kills the process just before one of the operations that change a folder.

    Args:
        folder: The folder, in which the process works.
        fatal: Which operation is not made; the first is 1, and at 0 all are.
        count: A file that grows by a byte with each operation.
    """

    def __init__(self, folder, fatal=0, count=None):
        self.folder, self.fatal, self.made = str(folder), fatal, 0
        self.count = None if count is None else os.open(count, os.O_CREAT | os.O_WRONLY)

    def set(self):
        """Sets it in this process; it cannot be taken away again."""
        sys.addaudithook(self._heard)

    def _heard(self, event, about):
        if event == "open":
            if not isinstance(about[2], int) or not about[2] & _WRITING:
                return
        elif event not in _EVENTS:
            return
        if not self._inside(about[0]):
            return
        self.made += 1
        if self.count is not None:
            os.write(self.count, b".")
        if self.made == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    def _inside(self, path):
        if isinstance(path, int):
            return False
        name = os.fsdecode(path)
        return not name.startswith("/") or name.startswith(self.folder)
