"""The textual form: what is shown reads back to the same text, and what isn't a program says why."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from zerofx.layout import Layout, ParamLayout, PerRank
from zerofx.mesh import Axis, Mesh
from zerofx.program import Level, Program, Tag, output_tags, outputs, placeholders, tag
from zerofx.text import TextError, parse, show

aten, higher_order = torch.ops.aten, torch.ops.higher_order

SHARDED = """\
mesh(dp=2)
param('fc.weight', f32[13, 7], dim=0)
param('fc.bias', bf16[13], dim=None, frozen=True, tied=['head.bias'])
param('scale', f64[()], dim=None)

def forward(w: f32[7, 7] @ shard('fc.weight'), x: f32[s77, 7], s77: sym(5)):
    constant_pad_nd: f32[7, 7] @ unshard('fc.weight') = aten.constant_pad_nd.default(w, [0, 0, 0, pad(13, 2)])
    gather: f32[14, 7] @ unshard('fc.weight') = c10d.all_gather_into_tensor.default(constant_pad_nd, 2, 'dp')
    wait: f32[14, 7] @ unshard('fc.weight') = c10d.wait_tensor.default(gather)
    slice_1: f32[13, 7] @ unshard('fc.weight') = aten.slice.Tensor(wait, 0, 0, 13)
    t: f32[7, 13](1, 7) = aten.t.default(slice_1)
    mm: f32[s77, 13] = aten.mm.default(x, t)
    mul: sym(2*s77) = operator.mul(s77, 2)
    new: f32[2*s77] = aten.new_zeros.default(mm, [mul], pin_memory=False)
    return [mm @ out, w @ saved('fc.weight'), s77 @ saved, None]

def backward(w: f32[7, 7] @ saved('fc.weight'), tangent: f32[s77, 13] @ tangent, s77: sym(5)):
    return [tangent @ grad('fc.weight', 'fc.bias'), None]
"""

ARGUMENTS = """\
mesh(dp=2, tp=3)

def inference(x: f32[4, 8], n: int(3), flag: bool(True), rate: float(0.5), gone: none, c: cuda.bf16[2](2)):
    split: (f32[2, 8], f32[2, 8]) = aten.split.Tensor(x, 2)
    getitem: f32[2, 8] = operator.getitem(split, 0)
    permute: f32[8, 2](1, 8) = aten.permute.default(getitem, [1, -2])
    as_strided: f32[1](7) = aten.as_strided.default(x, [1], [7])
    unbind: (f32[()],) = aten.unbind.int(as_strided)
    full: c64[()] = aten.full.default([], complex(1.0, -2.0), dtype=c64, layout=layout.strided, device=device('cpu'))
    fill: f32[4, 8] = aten.full_like.default(x, float('-inf'), memory_format=memory_format.preserve_format)
    not_a_number: f32[4, 8] = aten.add.Scalar(x, float('nan'))
    to: f8e4m3fn[4, 8] = aten._to_copy.default(x, dtype=f8e4m3fn)
    max_1: (f32[4], i64[4]) = aten.max.dim(x, 1)
    ge: bool[4, 8] = aten.ge.Scalar(x, 0.0)
    div: f32[4, 8] = aten.div.Tensor_mode(x, x, rounding_mode='floor')
    layer_norm: (f32[4, 8], f32[4, 1], f32[4, 1]) = aten.native_layer_norm.default(x, [8], None, None, 1e-05)
    index: f32[1, 8] = operator.getitem(x, slice(0, 1, None))
    on_gpu: cuda.bf16[2] = aten.relu.default(c)
    rest: f32[4, 8] = aten.constant_pad_nd.default(x, [0, 0, 0, pad(5, 2)])
    rows: f32[3, 8] = aten.slice.Tensor(x, 0, 0, rows(5, 2))
    sqrt: float(2.0) = math.sqrt(4)
    sym_max: int(3) = torch.sym_max(n, 2)
    reduced: f32[4, 8] = c10d.all_reduce.default(x, 'sum', group_name='tp')
    return [getitem, n]
"""

RANDOM = """\
mesh(dp=2)

def forward(x: f32[4, 8], on_gpu: cuda.f32[4], cuda_state: cuda.generator):
    kept: (u8[5056], f32[4, 8]) = higher_order.run_and_save_rng_state(aten.bernoulli.p, x, 0.5)
    getitem: u8[5056] = operator.getitem(kept, 0)
    noise: cuda.f32[4] = higher_order.graphsafe_run_with_rng_state(aten.bernoulli.p, on_gpu, 0.5, rng_state=cuda_state)
    return [x @ saved, getitem @ saved, noise @ out]

def backward(x: f32[4, 8], getitem: u8[5056], tangent: f32[4] @ tangent, state: generator):
    again: (f32[4, 8], bool[4, 8]) = higher_order.run_with_rng_state(getitem, aten.native_dropout.default, x, 0.5, True)
    return [again]
"""


def test_a_sharded_program_reads_back_to_the_same_text() -> None:
    assert show(parse(SHARDED)) == SHARDED


def test_what_draws_random_numbers_again_reads_back_with_its_op_and_its_state() -> None:
    program = parse(RANDOM)
    assert show(program) == RANDOM
    kept, _, noise, _ = (node for node in program.graphs["forward"].nodes if node.op != "placeholder")
    assert (kept.target, kept.args[0]) == (higher_order.run_and_save_rng_state, aten.bernoulli.p)
    assert noise.target is higher_order.graphsafe_run_with_rng_state
    assert noise.kwargs["rng_state"].meta["val"].device.type == "cuda"


def test_parse_gives_layout_tags_and_per_rank_ints() -> None:
    program = parse(SHARDED)
    assert program.layout["fc.bias"] == ParamLayout("fc.bias", (13,), torch.bfloat16, None, False, ("head.bias",))
    forward = program.graphs["forward"]
    assert tag(placeholders(forward)[0]) == Tag("shard", ("fc.weight",))
    assert output_tags(forward) == (Tag("out"), Tag("saved", ("fc.weight",)), Tag("saved"), None)
    assert [str(node) for node in outputs(forward)] == ["mm", "w", "s77", "None"]
    (pad,) = forward.find_nodes(op="call_function", target=torch.ops.aten.constant_pad_nd.default)
    assert isinstance(pad.args[1][3], PerRank) and pad.args[1][3].at(1) == 1


def test_what_the_partition_must_do_with_a_marker_is_shown_and_read_so() -> None:
    text = """\
mesh(dp=2)
param('w', f32[4], dim=0)

def joint(w: f32[2] @ shard('w')):
    read: f32[4] @ unshard('w', recompute=True) = zerofx.unshard.default(w, [4], 0, rows(4, 2), 'dp')
    kept: f32[4] @ unshard('w', keep=True) = zerofx.unshard.default(w, [4], 0, rows(4, 2), 'dp')
    again: f32[4] @ unshard('w') = zerofx.unshard.default(w, [4], 0, rows(4, 2), 'dp')
    return [read, kept, again]
"""
    program = parse(text)
    assert show(program) == text
    markers = outputs(program.graphs["joint"])
    assert [tag(node) for node in markers] == [Tag("unshard", ("w",))] * 3
    policies = [node.meta.get("recompute") for node in markers]
    assert policies == [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_SAVE, None]


def test_the_policy_of_what_takes_a_markers_place_is_not_shown() -> None:
    program = parse(SHARDED)
    for node in program.graphs["forward"].nodes:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    assert show(program) == SHARDED


def test_symbols_have_the_values_that_the_text_gives() -> None:
    mm = outputs(parse(SHARDED).graphs["forward"])[0]
    assert mm.meta["val"].shape[0].node.hint == 5


def test_every_kind_of_argument_and_type_reads_back() -> None:
    assert show(parse(ARGUMENTS)) == ARGUMENTS


ONE_ROW = """\
mesh(dp=2)

def inference(x: f32[4, 1], y: f32[0, 3]):
    t: f32[1, 4] = aten.t.default(x)
    t_1: f32[3, 0](7, 5) = aten.t.default(y)
    return [t @ out, t_1 @ out]
"""


def test_strides_that_lead_to_no_other_element_may_be_any() -> None:
    program = parse(ONE_ROW)
    assert show(program) == ONE_ROW
    assert outputs(program.graphs["inference"])[0].meta["val"].stride() == (4, 1)
    with pytest.raises(TextError, match=r"t is written as f32\[1, 4\]\(1, 2\), but is"):
        parse(ONE_ROW.replace("t: f32[1, 4]", "t: f32[1, 4](1, 2)"))


def test_groups_are_shown_as_axes_and_read_as_groups_of_that_name() -> None:
    program = parse(ARGUMENTS)
    program.mesh = Mesh((Axis("dp", 2, "7"), Axis("tp", 3, "8")))
    (node,) = program.graphs["inference"].find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_reduce.default
    )
    node.update_kwarg("group_name", "8")
    assert show(program) == ARGUMENTS
    (node,) = parse(ARGUMENTS).graphs["inference"].find_nodes(op="call_function", target=node.target)
    assert node.kwargs == {"group_name": "tp"}


def test_groups_beside_the_mesh_keep_the_numbers_that_torch_gives_them() -> None:
    line = "    y: f32[2, 3] = c10d.all_reduce.default(x, 'sum', '3')\n"
    text = f"mesh(dp=2)\n\ndef joint(x: f32[2, 3]):\n{line}    return [y]\n"
    assert show(parse(text)) == text


@pytest.mark.parametrize(
    ("name", "call", "level"),
    [
        ("joint", "aten.clone.default(x)", Level.LOGICAL),
        ("forward", "zerofx.unshard.default(x, [2], 0, 1, 'dp')", Level.PHYSICAL),
        ("inference", "zerofx.unshard.default(x, [2], 0, 1, 'dp')", Level.LOGICAL),
        ("inference", "aten.clone.default(x)", Level.PHYSICAL),
    ],
)
def test_the_level_follows_from_the_graphs(name: str, call: str, level: Level) -> None:
    assert parse(f"mesh(dp=1)\ndef {name}(x: f32[2]):\n    y: f32[2] = {call}\n    return [y]").level is level


def test_symbols_that_no_input_stands_for_are_listed() -> None:
    text = "mesh(dp=1)\n\nsymbols(s27=3)\ndef joint(x: f32[2*s27]):\n    return [x]\n"
    assert show(parse(text)) == text


def test_wide_definitions_have_one_input_a_line() -> None:
    inputs = [f"input_{i}: f32[2, 3] @ shard('layers.{i}.weight')" for i in range(4)]
    text = show(parse(f"mesh(dp=1)\ndef joint({', '.join(inputs)}):\n    return []\n"))
    assert text.splitlines()[2:] == ["def joint(", *(f"    {line}," for line in inputs), "):", "    return []"]


GRAPH = "mesh(dp=2)\ndef joint(x: f32[2, 3]):\n    {}\n    return [x]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh(dp=", "line 1: not Python"),
        ("", "line 1: expected mesh"),
        ("mesh(dp=2)\nmesh(dp=2)", r"line 2: expected mesh\(...\) once"),
        ("mesh(dp='2')", "line 1: expected int, not '2'"),
        ("def joint():\n    return []", "line 1: no mesh"),
        ("mesh()\ndef f():\n    return []\ndef f():\n    return []", "line 4: the graph 'f' is there twice"),
        ("mesh()\nparam('w', f32[2])", "line 2: expected dim="),
        ("mesh()\nparam('w', f32[2], dim=1)", "line 2: dim=1 isn't a dim of 1-dimensional"),
        ("mesh()\nparam('w', f33[2], dim=0)", "line 2: no dtype 'f33'"),
        ("mesh()\nparam(f32[2], dim=0)", "line 2: expected param"),
        ("mesh()\ndef f(x):\n    return []", "line 2: the input 'x' has no type"),
        ("mesh()\ndef f(*x: f32[2]):\n    return []", "line 2: the inputs of a graph are"),
        ("mesh()\ndef f(x: f32[s1]):\n    return []", "line 2: no input and no symbols.* gives the value of 's1'"),
        ("mesh()\ndef f(n: sym(5)):\n    return []", "line 2: a symbol is an s and a number"),
        ("mesh()\ndef f(x: f99[2]):\n    return []", "line 2: no dtype 'f99'"),
        ("mesh()\ndef f(x: opaque('y')):\n    return []", r"line 2: opaque\('y'\) isn't a type"),
        ("mesh()\ndef f(x: f32[2] @ 3):\n    return []", "line 2: expected a tag"),
        ("mesh()\ndef f(f32: f32[2]):\n    return []", "line 2: a node can't have the name 'f32'"),
        ("mesh()\ndef f(x: f32[2]):\n    return x", r"line 3: expected the graph to end with return \[...\]"),
        (GRAPH.format("x: f32[2, 3] = aten.relu.default(x)"), "line 3: 'x' is defined twice"),
        (GRAPH.format("y = aten.relu.default(x)"), "line 3: expected `name: type = call"),
        (GRAPH.format("y: f32[2, 3] = aten.relu(x)"), "line 3: no op aten.relu;"),
        (GRAPH.format("y: f32[2, 3] @ unshard('w', twice=True) = aten.relu.default(x)"), "line 3: expected a tag"),
        (GRAPH.format("y: f32[2, 3] @ unshard('w', keep=False) = aten.relu.default(x)"), "line 3: expected a tag"),
        (
            GRAPH.format("y: f32[2, 3] @ unshard('w', recompute=True, keep=True) = aten.relu.default(x)"),
            "line 3: expected a tag",
        ),
        (GRAPH.format("y: f32[2, 3] = aten.rulu.default(x)"), "line 3: no op aten.rulu.default"),
        (GRAPH.format("y: f32[2, 3] = builtins.eval('x')"), "line 3: no op builtins.eval"),
        (GRAPH.format("y: f32[2, 3] = opaque('z')(x)"), "line 3: what is opaque can't be read back"),
        (GRAPH.format("y: f32[2, 3] = aten.relu.default(z)"), "line 3: 'z' is neither a node"),
        (GRAPH.format("y: f32[2, 3] = aten.relu.default(opaque('z'))"), r"line 3: opaque\('z'\) can't be read back"),
        (GRAPH.format("y: f32[2, 3] = aten.relu.default({})"), "line 3: {} isn't an argument"),
        (GRAPH.format("y: f32[2, 3] = aten.relu.default(layout.odd)"), "line 3: no layout 'odd'"),
        (GRAPH.format("y: f32[2, 3] = aten.mm.default(x, x)"), "line 3: aten.mm.default can't be run"),
        (
            GRAPH.format("y: f32[3, 2] = aten.relu.default(x)"),
            r"line 3: y is written as f32\[3, 2\], but is f32\[2, 3\]",
        ),
        (GRAPH.format("y: f32[3, 2] = aten.t.default(x)"), r"line 3: y is .* but is f32\[3, 2\]\(1, 3\)"),
        (GRAPH.format("y: f32[2, 3] = c10d.all_reduce.default(x, 'sum', 'tp')"), "line 3: the mesh has the axes"),
    ],
)
def test_what_is_no_program_is_refused_by_line(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse(text)


class Block(nn.Module):
    """The ops of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 11)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        rows, length, width = hidden.shape
        q, k, v = self.qkv(self.norm(hidden)).view(rows, length, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + F.dropout(mixed, 0.1)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def captured(model: Callable[..., Any], *args: Any, dynamic: bool) -> dict[str, Graph]:
    graphs: dict[str, Graph] = {}

    def keep(name: str) -> Callable[..., Any]:
        return lambda gm, _: graphs.setdefault(name, gm.graph) and gm

    def partition(joint: Any, inputs: Any, **kwargs: Any) -> Any:
        graphs["joint"] = joint.graph
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def backend(gm: Any, inputs: Any) -> Any:
        return aot_module_simplified(gm, inputs, keep("forward"), keep("backward"), partition_fn=partition)

    torch.compiler.reset()
    with warnings.catch_warnings(action="ignore"):
        torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=True)(*args).sum().backward()
    return graphs


@pytest.mark.parametrize("dynamic", [False, True])
def test_graphs_of_a_transformer_read_back(dynamic: bool) -> None:
    tokens = torch.randint(0, 11, (3, 5))
    graphs = captured(Block(), tokens, tokens, dynamic=dynamic)
    assert list(graphs) == ["joint", "forward", "backward"]
    for name, graph in graphs.items():
        text = show(Program({name: graph}, Mesh.of(dp=2), Layout()))
        again = parse(text)
        assert show(again) == text
        assert [node.name for node in again.graphs[name].nodes] == [node.name for node in graph.nodes]


def test_symbols_that_are_found_equal_later_read_back() -> None:
    def model(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.view(x.shape[0] // 2, 2, -1).sum(1).repeat(2, 1) + y).relu()

    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(4, 6)
    graph = captured(model, x, y, dynamic=True)["joint"]
    text = show(Program({"joint": graph}, Mesh.of(dp=2), Layout()))
    assert show(parse(text)) == text


def test_graphs_inside_an_op_are_shown_but_not_read() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    graph = captured(model, torch.randn(4, requires_grad=True), dynamic=False)["joint"]
    text = show(Program({"joint": graph}, Mesh.of(dp=2), Layout()))
    assert "= opaque('get_attr true_graph_0')" in text
    with pytest.raises(TextError, match="what is opaque can't be read back"):
        parse(text)
