"""What to say of a model type that the family table does not have.

Names tell nothing (mamba is not like mbart), so the model is built without weights, and the answer
is read off its attention modules: whose row describes such, or that there are no heads to cut.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from headprune.family import FAMILIES, Family
from headprune.runtime import modeling_headprune

_HOW = "headprune/family/spec.py says what stands in a row"


@dataclass(frozen=True)
class _Site:
    """The attention modules that one path names.

    Attributes:
        path: Their path below the base model, with ``*`` for every number.
        names: Their paths as they are.
        tensors: What holds weights in the last of them; the first often has a bias for all.
    """

    path: str
    names: tuple[str, ...]
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class _Likeness:
    """How well a row of the table describes the attention of a model.

    Attributes:
        row: The row.
        own: The sites where the row looks for attention and finds its projections.
        elsewhere: Other sites with the projections of the row.
        beside: Tensors at the first of these sites of which the row says nothing.
    """

    row: Family
    own: tuple[_Site, ...]
    elsewhere: tuple[_Site, ...]
    beside: tuple[str, ...]

    @property
    def rank(self) -> tuple[int, ...]:
        """Larger for a better likeness: most at its own place, least that it does not name."""
        own = sum(len(site.names) for site in self.own)
        kinds = -abs(len(self.row.attention) - len(self.own or self.elsewhere))
        tails = {pattern.rpartition(".")[2] for pattern in self.row.attention.values()}
        tail = any(site.path.rpartition(".")[2] in tails for site in self.elsewhere)
        return own, -len(self.beside), tail, kinds, bool(self.row.size_attributes)


def why_unknown(config: PreTrainedConfig) -> str:
    """One or two sentences on a model whose type has no row: whose row its own would be like."""
    start = f"headprune has no row for model type '{config.model_type}'"
    model = _on_meta(config)
    if model is None:
        return f"{start}; 'headprune families' lists the {len(FAMILIES)} that it has."
    base = model.base_model
    sites = _sites(base)
    if not sites:
        return f"{start}, and {type(base).__name__} has no attention heads that could be cut."
    best = _nearest(base, sites)
    if best is None:
        most = max(sites, key=lambda site: len(site.names))
        return (
            f"{start}. Its attention ({most.path} with {_listed(most.tensors)}) is laid out like "
            f"that of no family in the table; {_HOW}."
        )
    return f"{start}. {_likened(best, sites)}: {_HOW}."


def _likened(best: _Likeness, sites: Sequence[_Site]) -> str:
    described = best.own or best.elsewhere
    where = _listed([site.path for site in described], most=2 if best.own else 1)
    what = _listed([p.path for p in best.row.projections if not p.optional])
    like = f"{best.row.model_type}'s"
    how = f"is laid out like {like}" if best.own else f"has {like} projections at another place"
    text = f"Its attention ({where} with {what}) {how}"
    if best.beside:
        return f"{text} but for {_listed(best.beside, most=3)}, which a row would have to place"
    others = [site.path for site in sites if site not in described]
    if others:
        text += f" (not that in {_listed(others, most=1)})"
    return f"{text}, so that a row of {'one line' if best.own else 'a few lines'} may do"


def _listed(names: Sequence[str], most: int = 6) -> str:
    """Names, shortened so that a sentence remains one."""
    short = [name if len(name) <= 48 else f"...{name[-45:]}" for name in names[:most]]
    more = len(names) - len(short)
    return ", ".join(short) + (f" and {more} more" if more else "")


def _on_meta(config: PreTrainedConfig) -> PreTrainedModel | None:
    """The model without weights; None where transformers cannot build it from this config."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            classes = modeling_headprune.auto_classes(type(config))
            cls = classes.get("AutoModel") or next(iter(classes.values()))
            return cls(copy.deepcopy(config))
    except Exception:  # anything: it is the model's own code, and there is a sentence without it
        return None
    finally:
        logging.set_verbosity(verbosity)


def _sites(base: nn.Module) -> list[_Site]:
    """The innermost modules that call themselves attention and hold two tensors or more."""
    found: dict[str, list[str]] = {}
    for name, module in base.named_modules():
        inner = (m for m in module.modules() if m is not module)
        if _is_attention(module) and not any(_is_attention(m) for m in inner):
            found.setdefault(_starred(name), []).append(name)
    return [
        _Site(path, tuple(names), _tensors(base.get_submodule(names[-1])))
        for path, names in found.items()
    ]


def _is_attention(module: nn.Module) -> bool:
    named = re.search("Attention|Attn|MLA$", type(module).__name__)
    return bool(named) and len(_tensors(module)) > 1


def _tensors(module: nn.Module) -> tuple[str, ...]:
    """Names of the parameters of a module, and of its children that have any."""
    children = (n for n, child in module.named_children() if list(child.parameters()))
    return (*(n for n, _ in module.named_parameters(recurse=False)), *children)


def _starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def _nearest(base: nn.Module, sites: Sequence[_Site]) -> _Likeness | None:
    rows = (row for name, row in FAMILIES.items() if name in CONFIG_MAPPING)
    likenesses = (_likeness(base, sites, row) for row in rows)
    best = max(filter(None, likenesses), key=lambda likeness: likeness.rank, default=None)
    if best is None or not best.beside:
        return best
    # what the row's own models have as well belongs to no head
    own = _on_meta(CONFIG_MAPPING[best.row.model_type]())
    known = {name for site in _sites(own.base_model) for name in site.tensors} if own else set()
    return replace(best, beside=tuple(name for name in best.beside if name not in known))


def _likeness(base: nn.Module, sites: Sequence[_Site], row: Family) -> _Likeness | None:
    patterns = {_starred(pattern) for pattern in row.attention.values()}
    like = [site for site in sites if _has_projections(base, site.names[-1], row)]
    own = tuple(site for site in like if site.path in patterns)
    elsewhere = tuple(site for site in like if site.path not in patterns)
    if not like:
        return None
    return _Likeness(row, own, elsewhere, _beside(base, (own or elsewhere)[0], row))


def _has_projections(base: nn.Module, path: str, row: Family) -> bool:
    """Whether a module has the projections of a row, its head_dim and the sizes that follow."""
    module = base.get_submodule(path)
    found = [_submodule(base, path, p.path) for p in row.projections if not p.optional]
    found += [_submodule(base, path, norm) for norm in row.full_width_norms]
    sized = isinstance(getattr(module, row.head_dim, None), int)
    sized = sized and all(hasattr(module, size) for size in row.size_attributes)
    return None not in found and sized and _wide(module, row)


def _submodule(base: nn.Module, path: str, relative: str) -> nn.Module | None:
    while relative.startswith("../"):
        path, relative = path.rpartition(".")[0], relative[3:]
    try:
        return base.get_submodule(f"{path}.{relative}")
    except AttributeError:
        return None


def _wide(module: nn.Module, row: Family) -> bool:
    """Whether norms of Q and K run over all heads at once where the row says so, and only there."""
    head_dim = getattr(module, row.head_dim)
    over_all = {
        name
        for name, child in module.named_children()
        if re.fullmatch("(q|k|query|key)_(layer)?norm", name)
        and any(p.dim() == 1 and len(p) > head_dim for p in child.parameters(recurse=False))
    }
    return over_all == set(row.full_width_norms)


def _beside(base: nn.Module, site: _Site, row: Family) -> tuple[str, ...]:
    """Tensors of an attention module that the row neither names nor that are norms."""
    named = _firsts([p.path for p in row.projections]) | _firsts(row.per_head)
    named |= _firsts(row.full_width_norms)
    module = base.get_submodule(site.names[-1])
    norms = {
        name for name, child in module.named_children() if "norm" in type(child).__name__.lower()
    }
    return tuple(name for name in site.tensors if name not in named | norms)


def _firsts(paths: Iterable[str]) -> set[str]:
    return {path.partition(".")[0] for path in paths}
