"""Low-rank merge: the shared K and V that disturb scores and outputs least.

Starts from the closed form of ``tensors.lowrank`` and refines it by least squares on calibration
text:

    K   queries and the shared keys, in turn, against the scores that the module itself would give,
        each score weighted with the attention it gets. A part common to all keys of a query is
        left out where softmax ignores it.
    V   the shared values in closed form, from the reads of the new scores; then W_O against
        the original's outputs, by a ridge towards the closed form that held-out sequences choose

No gradient steps: each half of K is a quadratic problem, and a few conjugate gradient steps into it
carry over to other text. W_O, solved all the way, needs the ridge: few sequences hold few more
tokens than it has inputs. A norm between projections and scores keeps queries from absorbing a
map. Then the group shares one of its own keys, the least disturbing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headprune.errors import DataError, PlanError
from headprune.model.heads import HeadWeights
from headprune.surgery.merges.outputs import OutputMoments, with_fitted_outputs
from headprune.surgery.merges.spec import Groups, MergeActivations, MergeContext, project
from headprune.tensors.least_squares import Moments
from headprune.tensors.lowrank import shared_key, shared_value
from headprune.tensors.rotary import Rotation

TOKENS = 1024  # at a time in the scores
ROUNDS = 2
STEPS = 3  # of conjugate gradients in every half round
QUERIES = 96  # of every sequence, evenly spaced, in the fit of the scores: neighbours attend alike,
ALL_QUERIES = 3072  # in all, at least, where there are few sequences
POOLED = 128  # of every sequence, evenly spaced, in the second moment of reads of V
_WHITE_FLOOR = 1e-4


def lowrank(heads: HeadWeights, groups: Groups, context: MergeContext) -> HeadWeights:
    """Shares K and V by low rank; needs activations."""
    if context.activations is None:
        raise PlanError("--merge lowrank needs text to calibrate on: give --calibrate DATA.")
    activations = context.activations
    given = (activations.queries, activations.keys, activations.outputs)
    known = (*given, *activations.second_moments.values())
    if not all(bool(tensor.isfinite().all()) for tensor in known):
        raise DataError(
            "Inputs or outputs of an attention module on the calibration text are not finite. Try "
            "--config dtype=float32."
        )
    if context.linear:
        merged = _merged_keys(heads, groups, context)
        scored = _scored(merged, activations)
    else:
        chosen = _best_keys(heads, groups, activations)
        merged = heads.with_affine("k", heads.affine("k")[chosen])
        scored = activations.queries, activations.keys[:, chosen]
    return _merged_values(merged, groups, activations, *scored)


def _scored(heads: HeadWeights, activations: MergeActivations) -> tuple[Tensor, Tensor]:
    """Queries and keys of the converted model as they enter the scores."""
    inputs, rotation = activations.inputs, activations.rotation
    queries, keys = (project(inputs[role], heads.affine(role)) for role in ("q", "k"))
    return _rotated(queries, rotation), _rotated(keys, rotation)


def _merged_keys(heads: HeadWeights, groups: Groups, context: MergeContext) -> HeadWeights:
    activations = context.activations
    assert activations is not None
    q, k = heads.affine("q"), heads.affine("k")
    moments = activations.second_moments
    query_moment, key_moment = moments["q"], moments["k"]
    new_q, shared = q.clone(), []
    for group in groups:
        queries = heads.queries_of(group)
        joint = k[list(group)].flatten(0, 1)
        moments_of_queries = q[queries] @ query_moment @ q[queries].mT
        owners = [list(group).index(heads.owners[query]) for query in queries]
        found = shared_key(moments_of_queries, owners, joint @ key_moment @ joint.T, context.pairs)
        key = found.basis @ joint
        # as large as the keys were
        scale = float(joint.norm() / key.norm().clamp(min=1e-12) / len(group) ** 0.5) or 1.0
        new_q[queries] = found.maps @ q[queries] / scale
        shared.append(key * scale)
    fit = _ScoreFit(heads, groups, activations)
    new_q, shared_k = fit.refined(new_q, torch.stack(shared))
    new_k = k.clone()
    for position, group in enumerate(groups):
        new_k[list(group)] = shared_k[position]
    return heads.with_affine("q", new_q).with_affine("k", new_k)


class _ScoreFit:
    """Least squares on the scores of some queries, weighted with the module's own attention.

    Query heads are laid out by the group whose keys they read: (sequences, groups, heads of a group
    x length, ...), so that one product serves all heads of a group. Scores are computed for a few
    sequences at a time; their weights are kept of all sequences. Inputs are white, which makes
    the few steps go far.
    """

    def __init__(self, heads: HeadWeights, groups: Groups, activations: MergeActivations) -> None:
        sequences, _, length, _ = activations.queries.shape
        chosen = _evenly(length, max(QUERIES, ALL_QUERIES // sequences))
        self.shifts_count = activations.shifts_count
        sizes = {len(heads.queries_of(group)) for group in groups}
        if len(sizes) > 1:
            raise PlanError(
                "--merge lowrank needs groups with equal numbers of queries; these would have "
                f"{', '.join(map(str, sorted(sizes)))}. Use --merge procrustes or mean."
            )
        self.order = [query for group in groups for query in heads.queries_of(group)]
        self.groups = len(groups)
        self.scaling = activations.scaling
        self.key_rotation = activations.rotation
        self.query_rotation = _at(activations.rotation, chosen)
        self.own_keys = activations.keys
        self.own_queries = activations.queries[:, self.order][:, :, chosen]
        self.owners = [heads.owners[query] for query in self.order]
        self.parts = _some(sequences, max(1, TOKENS // length))
        shape = *self.own_queries.shape[:3], self.own_keys.shape[2]
        self.weight = self.own_queries.new_empty(shape)
        for part in _some(sequences, 1):
            query, key = activations.queries[part][:, :, chosen], activations.keys[part]
            self.weight[part] = activations.attention(query, key, part, chosen)[:, self.order]
        self.weight /= self.weight.sum()
        self.row_weight = self.weight.sum(-1, keepdim=True).clamp(min=1e-20)
        moments = activations.second_moments
        self.query_white = self.key_white = _whitening(moments["q"])
        if moments["k"] is not moments["q"]:
            self.key_white = _whitening(moments["k"])
        self.query_inputs = activations.inputs["q"][:, chosen] @ self.query_white.mT
        self.key_inputs = activations.inputs["k"] @ self.key_white.mT

    def refined(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Alternates between queries (query heads, head_dim, hidden) and shared keys."""
        new_q = torch.linalg.solve(self.query_white, q[self.order], left=False)
        new_k = torch.linalg.solve(self.key_white, k, left=False)
        for _ in range(ROUNDS):
            new_q = self._fitted_queries(new_q, self._keys(new_k))
            new_k = self._fitted_keys(new_k, self._queries(new_q))
        q = q.clone()
        q[self.order] = new_q @ self.query_white
        return q, new_k @ self.key_white

    def _fitted_queries(self, q: Tensor, keys: Tensor) -> Tensor:
        def normal(q: Tensor) -> Tensor:
            return self._to_queries(partial(self._scores, self._queries(q), keys), keys)

        return conjugate_gradients(normal, self._to_queries(self._target, keys), q)

    def _fitted_keys(self, k: Tensor, queries: Tensor) -> Tensor:
        def normal(k: Tensor) -> Tensor:
            return self._to_keys(partial(self._scores, queries, self._keys(k)), queries)

        return conjugate_gradients(normal, self._to_keys(self._target, queries), k)

    def errors_of_own_keys(self, heads: HeadWeights, groups: Groups) -> dict[int, float]:
        """Return, by KV head, the cost for all queries of its group of reading its keys."""
        errors = {head: 0.0 for group in groups for head in group}
        for part in self.parts:
            target, keys = self._target(part), self.own_keys[part]
            for group in groups:
                places = [self.order.index(query) for query in heads.queries_of(group)]
                weight = self.weight[part][:, places].clamp(min=1e-20)
                for head in group:
                    scores = self.own_queries[part] @ keys[:, head : head + 1].mT * self.scaling
                    gap = (self._weighted(scores, part) - target)[:, places]
                    errors[head] += float((gap.square() / weight).sum())
        return errors

    def _queries(self, q: Tensor) -> Tensor:
        return _rotated(project(self.query_inputs, q), self.query_rotation)

    def _keys(self, k: Tensor) -> Tensor:
        return _rotated(project(self.key_inputs, k), self.key_rotation)

    def _target(self, part: slice) -> Tensor:
        """The module's own scores, weighted."""
        scores = self.own_queries[part] @ self.own_keys[part, self.owners].mT * self.scaling
        # where no attention goes, the weight is 0; far-off values would still overflow
        return self._weighted(scores.masked_fill_(self.weight[part] == 0, 0.0), part)

    def _weighted(self, scores: Tensor, part: slice) -> Tensor:
        """The scores times the weights, less their mean in every row where softmax ignores it."""
        scores.mul_(self.weight[part])
        if self.shifts_count:
            return scores
        mean = scores.sum(-1, keepdim=True) / self.row_weight[part]
        return scores.addcmul_(self.weight[part], mean, value=-1)

    def _by_group(self, per_query: Tensor) -> Tensor:
        """(sequences, heads, rows, columns) to (sequences, groups, heads x rows, columns)."""
        grouped: Tensor = per_query.unflatten(1, (self.groups, -1))
        return grouped.flatten(2, 3)

    def _scores(self, queries: Tensor, keys: Tensor, part: slice) -> Tensor:
        scores = self._by_group(queries[part] * self.scaling) @ keys[part].mT
        return self._weighted(scores.view(self.weight[part].shape), part)

    def _to_queries(self, weighted: Callable[[slice], Tensor], keys: Tensor) -> Tensor:
        keys = keys * self.scaling
        moved = torch.cat([self._by_group(weighted(p)) @ keys[p] for p in self.parts])
        moved = moved.unflatten(2, (-1, self.weight.shape[2])).flatten(1, 2)
        moved = moved if self.query_rotation is None else self.query_rotation.transposed(moved)
        return _gathered(moved, self.query_inputs)

    def _to_keys(self, weighted: Callable[[slice], Tensor], queries: Tensor) -> Tensor:
        queries = self._by_group(queries * self.scaling)
        moved = torch.cat([self._by_group(weighted(p)).mT @ queries[p] for p in self.parts])
        moved = moved if self.key_rotation is None else self.key_rotation.transposed(moved)
        return _gathered(moved, self.key_inputs)


def _best_keys(heads: HeadWeights, groups: Groups, activations: MergeActivations) -> list[int]:
    """Per KV head, the one of its group whose keys all queries of the group can use best."""
    errors = _ScoreFit(heads, groups, activations).errors_of_own_keys(heads, groups)
    chosen = list(range(len(heads.k)))
    for group in groups:
        best = min(group, key=errors.__getitem__)
        for head in group:
            chosen[head] = best
    return chosen


def _merged_values(
    heads: HeadWeights, groups: Groups, activations: MergeActivations, queries: Tensor, keys: Tensor
) -> HeadWeights:
    v, new_v, o = heads.affine("v"), heads.affine("v").clone(), heads.o.clone()
    read = _read_moments(heads, groups, activations, queries, keys)
    for group, moments in zip(groups, read, strict=True):
        moment = (moments.centred() if heads.o_bias is not None else moments).inputs
        members = heads.queries_of(group)
        owners = [list(group).index(heads.owners[query]) for query in members]
        found = shared_value(o[members], owners, moment / moments.tokens)
        new_v[list(group)] = found.basis @ v[list(group)].flatten(0, 1)
        o[members] = found.maps
    merged = replace(heads.with_affine("v", new_v), o=o)
    outputs = OutputMoments.of(activations.read(merged), activations.outputs)
    return with_fitted_outputs(merged, outputs)[0]


def _read_moments(
    heads: HeadWeights, groups: Groups, activations: MergeActivations, queries: Tensor, keys: Tensor
) -> list[Moments]:
    """Return, per group, the moments of its queries' joint reads of all its V."""
    values = project(activations.inputs["v"], heads.affine("v"))
    rows = _evenly(queries.shape[2], POOLED)
    found: list[Moments] = []
    for part in _some(len(values), 1):
        attention = activations.attention(queries[part][:, :, rows], keys[part], part, rows)[0]
        joints = [values[part][0, list(group)].transpose(0, 1).flatten(1) for group in groups]
        read = [
            (attention[heads.queries_of(group)] @ joint).flatten(0, 1)
            for group, joint in zip(groups, joints, strict=True)
        ]
        here = [Moments.of(x, x[:, :0]) for x in read]
        found = [a + b for a, b in zip(found, here, strict=True)] if found else here
    return found


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, steps: int = STEPS
) -> Tensor:
    """Solve ``apply(x) = right`` for a symmetric positive operator, in a few steps from ``start``.

    Entries along the first dimension are problems of their own, each with its own step lengths.
    Each step lowers the quadratic x.apply(x)/2 - right.x, so that stopping early is safe. That they
    are few is what holds x near ``start``.
    """
    x, rest = start, right - apply(start)
    direction, size = rest, _dot(rest, rest)
    for _ in range(steps):
        image = apply(direction)
        curvature = _dot(direction, image)
        length = (size / curvature.clamp(min=1e-30)).where(curvature > 0, 0)
        x, rest = x + length * direction, rest - length * image
        new = _dot(rest, rest)
        direction = rest + (new / size.clamp(min=1e-30)) * direction
        size = new
    return x


def _dot(a: Tensor, b: Tensor) -> Tensor:
    product = (a * b).flatten(1).sum(1)
    return product.view(-1, *[1] * (a.dim() - 1))


def _gathered(moved: Tensor, inputs: Tensor) -> Tensor:
    """Sum over tokens of moved^T inputs, shape (heads, head_dim, hidden)."""
    rows = moved.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
    summed: Tensor = (rows @ inputs.flatten(0, 1)).unflatten(0, (moved.shape[1], -1))
    return summed


def _whitening(moment: Tensor) -> Tensor:
    """The symmetric map that makes inputs white, but for directions that hardly occur."""
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp(min=float(values.mean()) * _WHITE_FLOOR or 1.0)
    white: Tensor = (vectors / values.sqrt()) @ vectors.T
    return white.to(moment)


def _rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotation.rotate(x)


def _at(rotation: Rotation | None, positions: Tensor) -> Rotation | None:
    if rotation is None:
        return None
    return Rotation(rotation.pairs, rotation.cos[positions], rotation.sin[positions])


def _evenly(length: int, count: int) -> Tensor:
    """Positions of at most ``count`` tokens, the first and the last among them."""
    return torch.linspace(0, length - 1, min(length, count)).round().long()


def _some(count: int, at_once: int) -> Sequence[slice]:
    return [slice(i, i + at_once) for i in range(0, count, at_once)]
