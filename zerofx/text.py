"""The textual form of a program, which is valid Python: `show` writes it and `parse` reads it back.

    mesh(dp=2)
    param('fc.weight', f32[13, 7], dim=0)

    def forward(w: f32[7, 7] @ shard('fc.weight'), x: f32[s77, 7], s77: sym(5)):
        constant_pad_nd: f32[7, 7] @ unshard('fc.weight') = aten.constant_pad_nd.default(w, [0, 0, 0, pad(13, 2)])
        ...
        return [addmm @ out, w @ saved]

- A line is `name: type @ role(parameters) = call`; the tag after `@` is there only where the node has one. The tag
  of a marker has `recompute=True` where the partition must not save it, and `keep=True` where it must.
- A type is `f32[4, 8]`, with strides where the tensor isn't contiguous (`f32[4, 8](1, 4)`) and the device where it
  isn't the cpu (`cuda.f32[()]`); `(f32[2], none)` for several results; `sym(s77 + 1)` for a symbolic number and
  `int(5)` for a known one.
- An input that is a symbol carries its value: `x: sym(s77, 5)`, or `s77: sym(5)` where the names agree. Symbols that
  no input stands for are listed before the graph: `symbols(s27=3)`.
- Groups are written as the names of the mesh's axes, and `c10d` stands for `torch.ops._c10d_functional`.
- `higher_order` stands for `torch.ops.higher_order`, whose operators are called with an op, as in
  `higher_order.run_with_rng_state(state, aten.native_dropout.default, x, 0.5, True)`.
- A node whose `meta` has no value, such as an assertion, is `untyped`.
- A `generator` is an input that is the state of a generator of random numbers (`cuda.generator`).
- An `object` is an input that is only handed through, such as a DTensor's mesh.
- `opaque('...')` stands for what the text has no form for, such as the graph of a branch of `torch.cond`; it can be
  shown but not parsed.

`Program.holds` isn't in the text, and its level follows from the graphs: see `parse`.
"""

from zerofx.parse import parse
from zerofx.read import TextError
from zerofx.show import show, show_graph, show_node, show_type

__all__ = ["TextError", "parse", "show", "show_graph", "show_node", "show_type"]
