"""Roles: what heads can be seen to do. One file each; a new one is a row here."""

from headprune.errors import PlanError
from headprune.registry import Registry
from headprune.role.broad import broad
from headprune.role.copying import copying
from headprune.role.delimiter import delimiter
from headprune.role.duplicate_token import duplicate_token
from headprune.role.first_token import first_token
from headprune.role.induction import induction
from headprune.role.next_token import next_token
from headprune.role.positional import positional
from headprune.role.previous_token import previous_token
from headprune.role.rare_token import rare_token
from headprune.role.retrieval import retrieval
from headprune.role.self_token import self_token
from headprune.role.spec import Attended, Role
from headprune.role.syntactic import syntactic

__all__ = ["ROLES", "Attended", "Role"]

ROLES: Registry[Role] = Registry("role", PlanError)
ROLES.add("previous-token", previous_token)
ROLES.add("next-token", next_token)
ROLES.add("self-token", self_token)
ROLES.add("positional", positional)
ROLES.add("delimiter", delimiter)
ROLES.add("duplicate-token", duplicate_token)
ROLES.add("induction", induction)
ROLES.add("retrieval", retrieval)
ROLES.add("syntactic", syntactic)
ROLES.add("rare-token", rare_token)
ROLES.add("copying", copying)
ROLES.add("broad", broad)
ROLES.add("first-token", first_token)
ROLES.freeze()
