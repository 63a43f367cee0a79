"""The family table: what headprune knows of each supported model family."""

from headprune.errors import FamilyError
from headprune.families.bert import BERT
from headprune.families.gpt2 import GPT2
from headprune.families.llama import LLAMA
from headprune.families.spec import Family, Projection
from headprune.registry import Registry

__all__ = ["FAMILIES", "Family", "Projection"]

FAMILIES: Registry[Family] = Registry("family", FamilyError)
for _row in (LLAMA, GPT2, BERT):
    FAMILIES.add(_row.model_type, _row)
FAMILIES.freeze()
