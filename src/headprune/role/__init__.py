"""Roles: what heads do, as their attention shows it."""

from headprune.role.table import ROLES, Role

__all__ = ["ROLES", "Role"]
