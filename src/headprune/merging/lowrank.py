"""Low-rank merge: the shared K and V that disturb scores and outputs least.

Starts from the closed form of ``tensors.lowrank`` and refines it by alternating least squares on
the calibration text, each half with the other held fixed:

    K   queries and the shared keys against the original's scores, each score weighted with the
        attention it gets; what all keys of a query have in common is left out where softmax
        ignores it
    V   the shared values and W_O against the original's outputs, under the attention that the new
        scores give

No gradient steps: every half is a quadratic problem, solved by a few conjugate gradient steps or
directly. Where a norm stands between the projections and the scores, queries cannot absorb a map,
and one of the group's own keys is taken, the one that disturbs the scores least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headprune.errors import PlanError
from headprune.merging.spec import Activations, Groups, Heads, Setting, project
from headprune.tensors.lowrank import shared_key, shared_value
from headprune.tensors.rotary import Rotation
from headprune.tensors.solvers import conjugate_gradients

ROUNDS = 2
STEPS = 3  # of conjugate gradients in every half round
QUERIES = 96  # of every window, evenly spaced, in the fit of the scores: neighbours attend alike
OUTPUTS = 128  # of every window, evenly spaced, in the fit of the outputs
RIDGE = 1e-2  # towards where a half round starts, against calibration text that is too short
_WHITE_FLOOR = 1e-4
_JOINT_LIMIT = 16_384  # side of the largest second moment that is kept in memory


def lowrank(heads: Heads, groups: Groups, setting: Setting) -> Heads:
    """Shares K and V by low rank; needs activations."""
    if setting.activations is None:
        raise PlanError("--merge lowrank needs text to calibrate on: give --calibrate DATA.")
    activations = setting.activations
    if activations.own_scored is None:
        merged = _merged_keys(heads, groups, setting)
        scored = _scored(merged, activations)
    else:
        chosen = _best_keys(heads, groups, activations)
        merged = heads.with_affine("k", heads.affine("k")[chosen])
        scored = activations.own_scored[0], activations.own_scored[1][:, chosen]
    return _merged_values(merged, groups, activations, *scored)


def _scored(heads: Heads, activations: Activations) -> tuple[Tensor, Tensor]:
    """Queries and keys of the converted model as they enter the scores."""
    inputs, turn = activations.inputs, activations.rotation
    queries, keys = (project(inputs[role], heads.affine(role)) for role in ("q", "k"))
    return _rotated(queries, turn), _rotated(keys, turn)


def _merged_keys(heads: Heads, groups: Groups, setting: Setting) -> Heads:
    activations = setting.activations
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
        found = shared_key(moments_of_queries, owners, joint @ key_moment @ joint.T, setting.planes)
        key, scale = found.basis @ joint, 1.0
        # as large as the keys were, so that one ridge suits both sides
        scale = float(k[list(group)].norm() / key.norm().clamp(min=1e-12) / len(group) ** 0.5)
        new_q[queries] = found.maps @ q[queries] / scale
        shared.append(key * scale)
    fit = _ScoreFit(heads, groups, activations)
    new_q, shared_k = fit.refined(new_q, torch.stack(shared))
    new_k = k.clone()
    for position, group in enumerate(groups):
        new_k[list(group)] = shared_k[position]
    return heads.with_affine("q", new_q).with_affine("k", new_k)


class _ScoreFit:
    """Least squares on the scores of some queries, weighted with the original's attention.

    Query heads are laid out by the group whose keys they read: (sequences, groups, heads of a group
    x length, ...), so that one product serves all heads of a group. Inputs are white, which makes
    the few steps go far, and the ridge one on what the maps compute.
    """

    def __init__(self, heads: Heads, groups: Groups, activations: Activations) -> None:
        length = activations.queries.shape[2]
        chosen = _evenly(length, QUERIES)
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
        attention = [
            activations.attention(
                activations.queries[part][:, :, chosen], activations.keys[part], part, chosen
            )
            for part in _one_by_one(len(activations.queries))
        ]
        self.weight = torch.cat([row[:, self.order] for row in attention])
        self.weight /= self.weight.sum()
        self.row_weight = self.weight.sum(-1, keepdim=True).clamp(min=1e-20)
        owners = [heads.owners[query] for query in self.order]
        scores = self.own_queries @ self.own_keys[:, owners].mT * self.scaling
        # where no attention goes, the weight is 0; far-off values would still overflow
        self.target = self._weighted(scores.masked_fill_(self.weight == 0, 0.0))
        self.query_white = _whitening(activations.second_moments["q"])
        self.key_white = _whitening(activations.second_moments["k"])
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
            return self._to_queries(self._scores(self._queries(q), keys), keys)

        return _ridge_solved(normal, self._to_queries(self.target, keys), q)

    def _fitted_keys(self, k: Tensor, queries: Tensor) -> Tensor:
        def normal(k: Tensor) -> Tensor:
            return self._to_keys(self._scores(queries, self._keys(k)), queries)

        return _ridge_solved(normal, self._to_keys(self.target, queries), k)

    def errors_of_own_keys(self, queries: Sequence[int], group: Sequence[int]) -> list[float]:
        """What it costs these queries to read, all of them, the keys of one head of a group."""
        places, errors = [self.order.index(query) for query in queries], []
        for head in group:
            scores = self.own_queries @ self.own_keys[:, head : head + 1].mT * self.scaling
            gap = (self._weighted(scores) - self.target)[:, places]
            weight = self.weight[:, places].clamp(min=1e-20)
            errors.append(float((gap.square() / weight).sum()))
        return errors

    def _queries(self, q: Tensor) -> Tensor:
        return _rotated(project(self.query_inputs, q), self.query_rotation)

    def _keys(self, k: Tensor) -> Tensor:
        return _rotated(project(self.key_inputs, k), self.key_rotation)

    def _weighted(self, scores: Tensor) -> Tensor:
        """The scores times the weights, less their mean in every row where softmax ignores it."""
        scores.mul_(self.weight)
        if self.shifts_count:
            return scores
        mean = scores.sum(-1, keepdim=True) / self.row_weight
        return scores.addcmul_(self.weight, mean, value=-1)

    def _by_group(self, per_query: Tensor) -> Tensor:
        """(sequences, heads, rows, columns) to (sequences, groups, heads x rows, columns)."""
        grouped: Tensor = per_query.unflatten(1, (self.groups, -1))
        return grouped.flatten(2, 3)

    def _scores(self, queries: Tensor, keys: Tensor) -> Tensor:
        scores = self._by_group(queries * self.scaling) @ keys.mT
        return self._weighted(scores.view(self.weight.shape))

    def _to_queries(self, weighted: Tensor, keys: Tensor) -> Tensor:
        moved = (self._by_group(weighted) @ (keys * self.scaling)).unflatten(
            2, (-1, weighted.shape[2])
        )
        moved = moved.flatten(1, 2)
        moved = moved if self.query_rotation is None else self.query_rotation.transposed(moved)
        return _gathered(moved, self.query_inputs)

    def _to_keys(self, weighted: Tensor, queries: Tensor) -> Tensor:
        moved = self._by_group(weighted).mT @ self._by_group(queries * self.scaling)
        moved = moved if self.key_rotation is None else self.key_rotation.transposed(moved)
        return _gathered(moved, self.key_inputs)


def _best_keys(heads: Heads, groups: Groups, activations: Activations) -> list[int]:
    """Per KV head, the one of its group whose keys all queries of the group can use best."""
    fit = _ScoreFit(heads, groups, activations)
    chosen = list(range(len(heads.k)))
    for group in groups:
        errors = fit.errors_of_own_keys(heads.queries_of(group), group)
        for head in group:
            chosen[head] = group[errors.index(min(errors))]
    return chosen


def _merged_values(
    heads: Heads, groups: Groups, activations: Activations, queries: Tensor, keys: Tensor
) -> Heads:
    v, o = heads.affine("v"), heads.o
    fit = _OutputFit(heads, groups, activations, queries, keys)
    bases, outputs = [], o.clone()
    for position, group in enumerate(groups):
        members = heads.queries_of(group)
        owners = [list(group).index(heads.owners[query]) for query in members]
        found = shared_value(o[members], owners, fit.pooled(position))
        bases.append(found.basis)
        outputs[members] = found.outputs
    basis, outputs, bias = fit.refined(torch.stack(bases), outputs)
    new_v = v.clone()
    for position, group in enumerate(groups):
        new_v[list(group)] = basis[position] @ v[list(group)].flatten(0, 1)
    return replace(heads.with_affine("v", new_v), o=outputs, o_bias=bias)


class _OutputFit:
    """Least squares on the outputs of the attention module, from what its heads read of V."""

    def __init__(
        self, heads: Heads, groups: Groups, activations: Activations, q: Tensor, k: Tensor
    ) -> None:
        self.group_of = torch.tensor(_group_of_query(heads, groups))
        self.o_bias = heads.o_bias
        width, size = heads.v.shape[1], max(map(len, groups))
        queries, joint, hidden = len(heads.q), size * width, heads.o.shape[1]
        if queries * joint > _JOINT_LIMIT:
            raise PlanError(
                f"{queries} query heads that share {size} V of {width} each need a matrix of "
                f"{queries * joint:,} rows, more than {_JOINT_LIMIT:,}. Convert in two steps, with "
                "more KV heads in the first."
            )
        self.moment = torch.zeros(queries * joint, queries * joint)
        self.cross = torch.zeros(queries * joint, hidden)
        mean, output_mean, tokens = torch.zeros(queries * joint), torch.zeros(hidden), 0
        values = project(activations.inputs["v"], heads.affine("v"))
        of_group = torch.stack(
            [values[:, list(group)].transpose(1, 2).flatten(2) for group in groups], dim=1
        )
        rows = _evenly(activations.outputs.shape[1], OUTPUTS)
        q = q[:, :, rows]
        for part in _one_by_one(len(q)):
            attention = activations.attention(q[part], k[part], part, rows)
            read = attention @ of_group[part][:, self.group_of]
            read = read.transpose(1, 2).flatten(2).flatten(0, 1)
            wanted = activations.outputs[part][:, rows].flatten(0, 1)
            self.moment.addmm_(read.T, read)
            self.cross.addmm_(read.T, wanted)
            mean += read.sum(0)
            output_mean += wanted.sum(0)
            tokens += len(read)
        self.moment, self.cross = self.moment / tokens, self.cross / tokens
        self.mean, self.output_mean = mean / tokens, output_mean / tokens
        if self.o_bias is not None:  # the bias takes care of the means
            self.moment -= torch.outer(self.mean, self.mean)
            self.cross -= torch.outer(self.mean, self.output_mean)
        self.moment = self.moment.view(queries, joint, queries, joint)
        self.cross = self.cross.view(queries, joint, hidden)

    def pooled(self, group: int) -> Tensor:
        """Second moment of what a group's heads read, all its queries taken together."""
        queries = (self.group_of == group).nonzero().flatten().tolist()
        first, *others = (self.moment[q, :, q] for q in queries)
        return sum(others, first) / len(queries)

    def refined(self, basis: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Alternates between the shared values and W_O; W_O last.

        Args:
            basis: Shared V of the joint V, shape (groups, head_dim, joint).
            o: W_O, shape (query heads, hidden, head_dim).
        """
        o = self._outputs(basis, o)
        for _ in range(ROUNDS):
            basis = self._basis(basis, o)
            o = self._outputs(basis, o)
        bias = self.o_bias
        if bias is not None:
            read = torch.einsum("hdv,hv->hd", basis[self.group_of], self.mean.view(len(o), -1))
            bias = self.output_mean - torch.einsum("hod,hd->o", o, read)
        return basis, o, bias

    def _outputs(self, basis: Tensor, o: Tensor) -> Tensor:
        each = basis[self.group_of]
        half = torch.einsum("hdv,hvjw->hdjw", each, self.moment)
        moment = torch.einsum("hdjw,jcw->hdjc", half, each).flatten(2).flatten(0, 1).double()
        cross = torch.einsum("hdv,hvo->hdo", each, self.cross).flatten(0, 1).double()
        ridge = RIDGE * moment.diagonal().mean().clamp(min=1e-30)
        before = o.mT.flatten(0, 1).double()
        moment += ridge * torch.eye(len(moment), dtype=torch.float64)
        solved = torch.linalg.solve(moment, cross + ridge * before)
        new: Tensor = solved.to(o).view(len(o), -1, o.shape[1]).mT
        return new.contiguous()

    def _basis(self, basis: Tensor, o: Tensor) -> Tensor:
        gram = torch.einsum("hod,joc->hdjc", o, o)

        def to_groups(per_query: Tensor) -> Tensor:
            return torch.zeros_like(basis).index_add_(0, self.group_of, per_query)

        def apply(candidate: Tensor) -> Tensor:
            mixed = torch.einsum("jcw,hvjw->jchv", candidate[self.group_of], self.moment)
            return to_groups(torch.einsum("hdjc,jchv->hdv", gram, mixed))

        right = to_groups(torch.einsum("hod,hvo->hdv", o, self.cross))
        return _ridge_solved(apply, right, basis, RIDGE / 10)


def _ridge_solved(
    apply: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, ridge: float = RIDGE
) -> Tensor:
    """Conjugate gradients from ``start``, held near it by a ridge of its own size."""
    image = apply(start)
    weight = ridge * (image * start).sum() / (start * start).sum().clamp(min=1e-30)
    return conjugate_gradients(lambda x: apply(x) + weight * x, start, right - image, STEPS)


def _gathered(moved: Tensor, inputs: Tensor) -> Tensor:
    """Sum over tokens of moved^T inputs, shape (heads, head_dim, hidden)."""
    rows = moved.permute(1, 3, 0, 2).flatten(2).flatten(0, 1)
    summed: Tensor = (rows @ inputs.flatten(0, 1)).unflatten(0, (moved.shape[1], -1))
    return summed


def _whitening(moment: Tensor) -> Tensor:
    """The symmetric map that makes inputs white, but for directions that hardly occur."""
    values, vectors = torch.linalg.eigh(moment.double())
    values = values.clamp(min=float(values.mean()) * _WHITE_FLOOR)
    white: Tensor = (vectors / values.sqrt()) @ vectors.T
    return white.to(moment)


def _rotated(x: Tensor, rotation: Rotation | None) -> Tensor:
    return x if rotation is None else rotation.apply(x)


def _at(rotation: Rotation | None, positions: Tensor) -> Rotation | None:
    if rotation is None:
        return None
    return Rotation(rotation.planes, rotation.cos[positions], rotation.sin[positions])


def _evenly(length: int, count: int) -> Tensor:
    """Positions of at most ``count`` tokens, the first and the last among them."""
    return torch.linspace(0, length - 1, min(length, count)).round().long()


def _one_by_one(count: int) -> Sequence[slice]:
    return [slice(i, i + 1) for i in range(count)]


def _group_of_query(heads: Heads, groups: Groups) -> list[int]:
    group_of_kv = {kv: position for position, group in enumerate(groups) for kv in group}
    return [group_of_kv[owner] for owner in heads.owners]
