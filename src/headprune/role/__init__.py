"""Roles: what heads do, as their attention shows it.

The folder is not called ``roles``: the submodule would hide the function ``headprune.roles``.
"""

from headprune.role.table import ROLES, Role

__all__ = ["ROLES", "Role"]
