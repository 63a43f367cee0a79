"""The family table: what headprune knows of each supported model family."""

from headprune.errors import FamilyError
from headprune.family import bert, gpt, llama, perception, seq2seq, vision_language
from headprune.family.spec import Family, Projection
from headprune.registry import Registry

__all__ = ["FAMILIES", "Family", "Projection"]

FAMILIES: Registry[Family] = Registry("family", FamilyError, listed_by="headprune families")
for _module in (llama, gpt, bert, seq2seq, perception, vision_language):
    for _row in _module.ROWS:
        FAMILIES.add(_row.model_type, _row)
FAMILIES.freeze()
