"""A forward as a line of nodes that is cut between two of them: what may be cut, what crosses, what each part takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

from torch import Tensor
from torch.fx import Node

from zerofx.kernels import nbytes
from zerofx.node_facts import Facts, facts_of
from zerofx.planning.hardware import Hardware
from zerofx.whole_graph import WholeGraph

Range = tuple[int, int]
"""The nodes of a stage: those behind the first place, up to the second one."""


class Line:
    """The nodes of a whole graph in their order. A cut at a place is behind the node there.

    Nodes that depend on no parameter, draw no random numbers and make no matrix product are `replicated`: each stage
    that reads one computes it itself, from its own inputs. All else belongs to the one stage in whose range it is, and
    what later stages read of it is handed on from each stage to the next.
    """

    def __init__(self, whole: WholeGraph, machine: Hardware) -> None:
        self.whole, self.machine = whole, machine
        self.facts: Mapping[Node, Facts] = facts_of(whole, machine)
        self.nodes = list(whole.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.writers: dict[int, list[Node]] = {}
        for node in self.nodes[:-1]:
            for storage in self.facts[node].written:
                self.writers.setdefault(storage, []).append(node)
        self.replicated = self._find_replicated()
        own = [self.facts[node] if self.is_own(node) else Facts() for node in self.nodes]
        self.seconds = list(accumulate((each.seconds for each in own), initial=0.0))
        self.activations = list(accumulate((each.nbytes for each in own), initial=0))
        self.first = next(p for p, node in enumerate(self.nodes) if node.op not in ("placeholder", "get_attr"))
        self.last = len(self.nodes) - 1
        self.ends = self._ends()
        self.crossing_bytes, self.legal = self._look_at_cuts()

    def is_own(self, node: Node) -> bool:
        """Whether one stage alone computes the node."""
        return node.op not in ("placeholder", "get_attr", "output") and node not in self.replicated

    def is_region(self, node: Node) -> bool:
        """Whether it opens or closes a region, such as one without gradients: such nodes are in every stage."""
        facts = self.facts.get(node)
        return (
            facts is not None
            and node.op == "call_function"
            and not isinstance(facts.value, Tensor)
            and not facts.storages
            and all(self.is_region(source) for source in node.all_input_nodes)
        )

    def compute(self, start: int, end: int) -> float:
        """Seconds of forward and backward of the nodes behind `start` up to `end`."""
        return self.seconds[end + 1] - self.seconds[start + 1]

    def send(self, place: int) -> float:
        """Seconds that a cut takes: what crosses it, there and its gradient back."""
        return 2 * self.crossing_bytes[place] / self.machine.intra.bandwidth if self.first <= place < self.last else 0.0

    def crossing(self, place: int) -> list[Node]:
        """What crosses a cut, in the order of the nodes."""
        return [node for node in self.nodes[self.first : place + 1] if self.ends.get(node, -1) > place]

    def inputs_of(self, start: int, end: int) -> list[Node]:
        """The inputs of the whole graph that the nodes of a range read, also through replicated ones."""
        read = dict[Node, None]()
        for node in self.needed(start, end):
            read |= {source: None for source in node.all_input_nodes if source.op == "placeholder"}
        return sorted(read, key=lambda node: self.place[node])

    def needed(self, start: int, end: int) -> list[Node]:
        """The nodes that a stage computes: its own, replicated ones that they read, and bounds of regions."""
        wanted = [node for node in self.nodes[start + 1 : end + 1] if self.is_own(node)]
        if end == self.last:
            wanted += self.whole.outputs
        found, todo = set[Node](), list(wanted)
        while todo:
            node = todo.pop()
            if node in found or not (node in self.replicated or start < self.place[node] <= end):
                continue
            found.add(node)
            todo += node.all_input_nodes
            if node in self.replicated:
                todo += [w for storage in self.facts[node].storages for w in self.writers.get(storage, ())]
        return [n for n in self.nodes if n.op not in ("placeholder", "output") and (n in found or self.is_region(n))]

    def _find_replicated(self) -> frozenset[Node]:
        """Nodes that every stage may compute again; what shares memory with another kind of node is none."""
        inputs = self.whole.inputs
        written = set(self.writers)
        own = set[Node]()
        spoilt = set[int]()
        before = -1
        while before != len(own) + len(spoilt):
            before = len(own) + len(spoilt)
            for node in self.nodes:
                if node.op == "output":
                    continue
                facts = self.facts[node]
                if node.op == "placeholder":
                    state = inputs[node].kind == "param" or (inputs[node].kind != "batch" and facts.storages & written)
                    own |= {node} if state or (inputs[node].kind == "batch" and facts.storages & written) else set()
                    continue
                reads_own = any(source in own for source in node.all_input_nodes)
                if reads_own or facts.flops or facts.random or (facts.storages | facts.written) & spoilt:
                    own.add(node)
                    spoilt |= facts.written | (facts.storages if facts.written else frozenset())
        return frozenset(n for n in self.nodes if n.op not in ("output", "placeholder") and n not in own)

    def _ends(self) -> dict[Node, int]:
        """For each node of one stage alone, the place of the last one that reads it across stages."""
        ends = dict[Node, int]()
        for node in self.nodes:
            readers = [self.place[user] for user in node.users if not self.is_region(user)]
            if self.is_own(node) and not self.is_region(node) and readers:
                ends[node] = max(readers)
        return ends

    def _look_at_cuts(self) -> tuple[list[int], list[bool]]:
        """For each place the bytes that cross a cut there, and whether it is possible.

        It is not where a value crosses that is no tensor, or one that is written to later, or between two nodes that
        share a buffer that is written to.
        """
        step, count = [0] * (self.last + 2), [0] * (self.last + 2)
        for node, end in self.ends.items():
            start, facts = self.place[node], self.facts[node]
            step[start] += nbytes(facts.value) if facts.crosses else 0
            step[end] -= nbytes(facts.value) if facts.crosses else 0
            if not facts.crosses:
                count[start] += 1
                count[end] -= 1
        for start, end in self._written_ranges():
            count[start] += 1
            count[end] -= 1
        crossing, blocked = list(accumulate(step)), list(accumulate(count))
        legal = [self.first <= p < self.last - 1 and not blocked[p] and crossing[p] > 0 for p in range(self.last + 1)]
        return crossing[: self.last + 1], legal

    def _written_ranges(self) -> Iterator[Range]:
        touched: dict[int, list[int]] = defaultdict(list)
        for node in self.nodes[self.first : self.last]:
            facts = self.facts[node]
            read = {storage for source in node.all_input_nodes for storage in self.facts[source].storages}
            for storage in (facts.storages | facts.written | read) & self.writers.keys():
                if self.is_own(node):
                    touched[storage].append(self.place[node])
        for storage, places in touched.items():
            last_write = max(self.place[node] for node in self.writers[storage])
            state = any(storage in self.facts[node].storages for node in self.whole.inputs)
            yield places[0], max(places) if state else max(last_write, places[0])
