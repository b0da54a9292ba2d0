"""Runs a program for every rank of its mesh in one process, in lock step, without torch.distributed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from zerofx._torch import OpOverload, argument_index, by_name
from zerofx.layout import ParamLayout, PerRank, chunk_rows, rows_at
from zerofx.mesh import Mesh
from zerofx.ops import REPLICATED
from zerofx.program import Program, output_node, pair_saved, placeholders, tag

Ranks = list[Any]
Call = dict[str, Any]
DATA_PARALLEL = "dp"


def simulate(program: Program, inputs: Sequence[Sequence[Any]]) -> list[Ranks]:
    """The flat outputs of each rank.

    `inputs` holds one value a rank for each placeholder, in order: for a forward and a backward, those of the forward
    and then those that the forward doesn't save for the backward. The outputs are then those of the forward that aren't
    saved, and those of the backward.

    Sums over ranks are taken in the order of the ranks and a mean is their sum over their number, so the same program
    gives the same bits. Raises ValueError where the inputs don't fit the program or ranks don't fit each other.
    """
    mesh, given, results = program.mesh, iter(inputs), list[Ranks]()
    saved = list[tuple[str, Ranks]]()
    for graph in _order(program):
        kept = pair_saved([name for name, _ in saved], placeholders(graph))
        env = {node: saved[kept[node]][1] if node in kept else _next(given, node, mesh) for node in placeholders(graph)}
        output = output_node(graph)
        flat = _run(graph, mesh, env)
        tags = output.meta.get("zerofx") or (None,) * len(flat)
        for value, known, ranks in zip(_flat(output), tags, flat, strict=True):
            if known is not None and known.role == "saved":
                saved.append((value.name, ranks))
            else:
                results.append(ranks)
    if next(given, None) is not None:
        raise ValueError(f"{len(inputs)} inputs are more than the program's placeholders")
    return [[ranks[rank] for ranks in results] for rank in range(mesh.world)]


def scatter(whole: Tensor, param: ParamLayout, mesh: Mesh) -> list[Tensor]:
    """The part of a whole parameter that each rank of the mesh stores."""
    if tuple(whole.shape) != param.size:
        raise ValueError(f"{param.name} has the shape {tuple(whole.shape)}, but {param.size} in the layout")
    if param.dim is None:
        return [whole.clone() for _ in range(mesh.world)]
    parts, dim = mesh.axis(DATA_PARALLEL).size, param.dim
    return [_part(whole, dim, parts, mesh.coordinate(rank, DATA_PARALLEL)) for rank in range(mesh.world)]


def feed(program: Program, whole: Mapping[str, Tensor], rest: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
    """Inputs for `simulate`: placeholders tagged `shard` or `replica` get their part of the parameter's whole value, by
    name; the others get `rest`, in order.
    """
    graph, given = _order(program)[0], iter(rest)
    inputs: list[Sequence[Any]] = []
    for node in placeholders(graph):
        known = tag(node)
        if known is None or known.role not in ("shard", "replica"):
            inputs.append(_next(given, node, program.mesh))
            continue
        (name,) = known.params
        inputs.append(scatter(whole[name], program.layout[name], program.mesh))
    return [*inputs, *given]


def _order(program: Program) -> list[Graph]:
    pair = [program.graphs[name] for name in ("forward", "backward") if name in program.graphs]
    if pair or len(program.graphs) == 1:
        return pair or list(program.graphs.values())
    raise ValueError(f"simulate runs one graph, or a forward and a backward, not {list(program.graphs)}")


def _next(given: Iterator[Sequence[Any]], node: Node, mesh: Mesh) -> Ranks:
    values = next(given, None)
    if values is None:
        raise ValueError(f"no input is left for the placeholder {node.name}")
    if len(values) != mesh.world:
        raise ValueError(f"{node.name} has {len(values)} values for {mesh.world} ranks")
    return list(values)


@torch.no_grad()
def _run(graph: Graph, mesh: Mesh, env: dict[Node, Ranks]) -> list[Ranks]:
    """The flat outputs, one list over ranks each. Empties `env`: a value goes after its last use."""
    last_uses = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "output":
            return [[_resolve(value, env, mesh, rank) for rank in range(mesh.world)] for value in _flat(node)]
        if node.op != "placeholder":
            try:
                env[node] = _run_node(node, env, mesh)
            except Exception as error:
                error.add_note(f"while simulating {node.name} = {node.target}{node.args}")
                raise
        for done in last_uses.get(node, ()):
            del env[done]
    raise ValueError("the graph has no output")


def _last_uses(graph: Graph) -> dict[Node, list[Node]]:
    """The values that no node after the key reads, the key's own among them if none reads it at all."""
    seen: set[Node] = set()
    found: dict[Node, list[Node]] = {}
    for node in reversed(graph.nodes):
        found[node] = [value for value in (*node.all_input_nodes, node) if value not in seen]
        seen.update(found[node])
    return found


def _run_node(node: Node, env: dict[Node, Ranks], mesh: Mesh) -> Ranks:
    if node.op == "get_attr" and _owner(node) is not None:
        return [operator.attrgetter(str(node.target))(_owner(node))] * mesh.world
    if node.op != "call_function" or not callable(node.target):
        raise ValueError(f"simulate runs function calls only, not {node.op}")
    target = node.target
    args = [_resolve(node.args, env, mesh, rank) for rank in range(mesh.world)]
    kwargs = [_resolve(node.kwargs, env, mesh, rank) for rank in range(mesh.world)]
    if not isinstance(target, OpOverload) or not _is_collective(target):
        return [target(*args[rank], **kwargs[rank]) for rank in range(mesh.world)]
    if str(target) not in COLLECTIVES:
        raise ValueError(f"simulate doesn't know the collective {target}; it knows {sorted(COLLECTIVES)}")
    return _over_groups(target, [by_name(target, args[rank], kwargs[rank]) for rank in range(mesh.world)], mesh)


def _owner(node: Node) -> Any:
    return node.graph.owning_module


def _resolve(value: Any, env: dict[Node, Ranks], mesh: Mesh, rank: int) -> Any:
    """An argument as `rank` sees it."""

    def resolve(leaf: Any) -> Any:
        if isinstance(leaf, Node):
            return env[leaf][rank]
        return leaf.at(mesh.coordinate(rank, DATA_PARALLEL)) if isinstance(leaf, PerRank) else leaf

    return map_aggregate(value, resolve)


def _flat(output: Node) -> tuple[Any, ...]:
    (flat,) = output.args
    return tuple(flat) if isinstance(flat, (list, tuple)) else (flat,)


def _is_collective(op: OpOverload) -> bool:
    return str(op) in COLLECTIVES or "c10d" in op.namespace or argument_index(op, "group_name") is not None


def _over_groups(op: OpOverload, calls: list[Call], mesh: Mesh) -> Ranks:
    group = calls[0].get("group_name", calls[0].get("group"))
    results: Ranks = [None] * mesh.world
    for rank in range(mesh.world):
        peers = [rank] if group is None else mesh.peers(rank, mesh.axis_of_group(group).name)
        if rank == peers[0]:
            outputs = COLLECTIVES[str(op)]([calls[peer] for peer in peers])
            for peer, output in zip(peers, outputs, strict=True):
                results[peer] = output
    return results


def _tensors(calls: list[Call]) -> list[Tensor]:
    """What the ranks bring to a collective, which must be alike."""
    tensors = [call["input"] for call in calls]
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in tensors}
    if len(kinds) > 1:
        raise ValueError(f"the ranks bring tensors that differ to one collective: {sorted(kinds, key=str)}")
    size = calls[0].get("group_size", len(calls))
    if size != len(calls):
        raise ValueError(f"group_size is {size}, but the group has {len(calls)} ranks")
    return tensors


def _fold(tensors: list[Tensor], how: str) -> Tensor:
    folds: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "sum": torch.add,
        "avg": torch.add,
        "max": torch.maximum,
        "min": torch.minimum,
    }
    if how not in folds:
        raise ValueError(f"simulate reduces with {sorted(folds)}, not {how!r}")
    total = reduce(folds[how], tensors)
    return total / len(tensors) if how == "avg" else total


def _copies(tensor: Tensor, calls: list[Call]) -> list[Tensor]:
    """One for each rank, so that none sees what another writes to it."""
    return [tensor.clone(memory_format=torch.contiguous_format) for _ in calls]


def _part(tensor: Tensor, dim: int, parts: int, place: int) -> Tensor:
    """Rows of one place, if the rows of `dim` are cut into `parts`."""
    size = tensor.shape[dim]
    start = min(place * chunk_rows(size, parts), size)
    rows = tensor.narrow(dim, start, rows_at(size, parts, place))
    return rows.clone(memory_format=torch.contiguous_format)


def _all_gather(calls: list[Call]) -> Ranks:
    return _copies(torch.cat(_tensors(calls)), calls)


def _all_reduce(calls: list[Call]) -> Ranks:
    return _copies(_fold(_tensors(calls), calls[0]["reduce_op"]), calls)


def _reduce_scatter(calls: list[Call]) -> Ranks:
    total = _fold(_tensors(calls), calls[0]["reduce_op"])
    if total.shape[0] % len(calls):
        raise ValueError(f"{total.shape[0]} rows can't be scattered evenly over {len(calls)} ranks")
    return [_part(total, 0, len(calls), place) for place in range(len(calls))]


def _broadcast(calls: list[Call]) -> Ranks:
    return _copies(_tensors(calls)[calls[0]["src"]], calls)


def _all_to_all(calls: list[Call]) -> Ranks:
    sent = [call["input"].split(call["input_split_sizes"]) for call in calls]
    received = [[pieces[place] for pieces in sent] for place in range(len(calls))]
    for call, pieces in zip(calls, received, strict=True):
        if [len(piece) for piece in pieces] != list(call["output_split_sizes"]):
            raise ValueError(f"output_split_sizes {call['output_split_sizes']} aren't what the other ranks send")
    return [torch.cat(pieces) for pieces in received]


def _coalesced(one: Callable[[list[Call]], Ranks]) -> Callable[[list[Call]], Ranks]:
    def each(calls: list[Call]) -> Ranks:
        columns = [one([call | {"input": call["inputs"][i]} for call in calls]) for i in range(len(calls[0]["inputs"]))]
        return [[column[place] for column in columns] for place in range(len(calls))]

    return each


def _unshard(calls: list[Call]) -> Ranks:
    dim, size = calls[0]["dim"], tuple(calls[0]["size"])
    if dim == REPLICATED:
        return [call["shard"].clone() for call in calls]
    for place, call in enumerate(calls):
        rows = (call["shard"].shape[dim], call["rows"], rows_at(size[dim], len(calls), place))
        if len(set(rows)) > 1:
            raise ValueError(
                f"the shard has {rows[0]} rows, the op says {rows[1]}, rank {place} of the group has {rows[2]}"
            )
    return _copies(torch.cat([call["shard"] for call in calls], dim), calls)


def _reduce_grad(calls: list[Call]) -> Ranks:
    dim, mean = calls[0]["dim"], _fold(_tensors([{"input": call["grad"]} for call in calls]), "avg")
    if dim == REPLICATED:
        return _copies(mean, calls)
    parts = [_part(mean, dim, len(calls), place) for place in range(len(calls))]
    for call, part in zip(calls, parts, strict=True):
        if call["rows"] != part.shape[dim]:
            raise ValueError(f"the op says {call['rows']} rows, the rank stores {part.shape[dim]}")
    return parts


COLLECTIVES: dict[str, Callable[[list[Call]], Ranks]] = {
    "zerofx.unshard.default": _unshard,
    "zerofx.reduce_grad.default": _reduce_grad,
    "_c10d_functional.all_gather_into_tensor.default": _all_gather,
    "_c10d_functional.all_gather_into_tensor_coalesced.default": _coalesced(_all_gather),
    "_c10d_functional.reduce_scatter_tensor.default": _reduce_scatter,
    "_c10d_functional.reduce_scatter_tensor_coalesced.default": _coalesced(_reduce_scatter),
    "_c10d_functional.all_reduce.default": _all_reduce,
    "_c10d_functional.all_reduce_coalesced.default": _coalesced(_all_reduce),
    "zerofx.all_gather_p2p.default": _coalesced(_all_gather),
    "zerofx.reduce_scatter_p2p.default": _coalesced(_reduce_scatter),
    "_c10d_functional.all_to_all_single.default": _all_to_all,
    "_c10d_functional.broadcast.default": _broadcast,
    "_c10d_functional.wait_tensor.default": lambda calls: [call["tensor"] for call in calls],
}
