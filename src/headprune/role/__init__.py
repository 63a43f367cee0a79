"""Roles of heads; a folder ``roles`` would hide the function ``headprune.roles``."""

from headprune.role.table import ROLES, Role

__all__ = ["ROLES", "Role"]
