"use strict";
/* The report's data, decoded, and what all views ask of it. Every file adds its functions to `zx`. */
const zx = { data: null, program: null, step: 0, tab: "overview", selected: null };

zx.decode = async function () {
  const packed = document.getElementById("data").textContent.trim();
  const bytes = Uint8Array.from(atob(packed), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  zx.data = await new Response(stream).json();
};

zx.numbers = function (runs) {
  const out = [];
  for (const [first, count] of runs) for (let i = first; i < first + count; i++) out.push(i);
  return out;
};

/* A row that is a node, as an object; rows are shared by all steps. */
zx.node = function (program, row) {
  program.cache ??= new Map();
  let node = program.cache.get(row);
  if (node === undefined) {
    const told = program.nodes[row];
    if (told) {
      const [name, target, type, bytes, role, params, reads, module, source, backward] = told;
      node = { row, name, target, type, bytes, role, params, reads, backward: !!backward };
      node.module = program.modules[module];
      node.source = program.sources[source];
      node.kind = zx.kindOf(node);
    } else node = null;
    program.cache.set(row, node);
  }
  return node;
};

/* What a node is to a reader: this decides its colour. */
zx.kindOf = function (node) {
  const op = node.target.split(".")[1] || "";
  if (!node.target) return "parameter";
  if (op === "wait_tensor") return "wait";
  if (op.startsWith("all_gather") || node.target.startsWith("zerofx.unshard")) return "gather";
  if (op.startsWith("reduce_scatter") || node.target.startsWith("zerofx.reduce_grad")) return "scatter";
  if (op.startsWith("all_reduce")) return "reduce";
  if (op === "update") return "update";
  if (op === "convert_element_type" || op === "_to_copy") return "cast";
  return "op";
};

zx.KINDS = {
  gather: "all-gather / unshard", scatter: "reduce-scatter", reduce: "all-reduce", wait: "wait", cast: "cast",
  parameter: "input / parameter", update: "update",
};

/* The graphs of a step: name, nodes in order (inputs first), and by name. */
zx.graphs = function (program, step) {
  const told = program.steps[step];
  told.made ??= told.graphs.map((graph) => {
    const inputs = zx.numbers(graph.inputs).map((row) => zx.node(program, row));
    const ops = zx.numbers(graph.ops).map((row) => zx.node(program, row));
    const outputs = zx.numbers(graph.outputs).map((row) => zx.node(program, row));
    const nodes = inputs.concat(ops);
    const returned = new Map();
    for (const each of outputs) {
      const what = [each.role || "out", ...each.params].join(" ");
      returned.set(each.name, (returned.get(each.name) || []).concat(what));
    }
    return { name: graph.name, nodes, inputs, ops, outputs, returned, byName: new Map(nodes.map((n) => [n.name, n])) };
  });
  return told.made;
};

/* For each node name of a step: new, changed or same, against the step before; and the nodes that are gone. */
zx.changes = function (program, step) {
  const told = program.steps[step];
  if (told.changes) return told.changes;
  const state = new Map(), gone = [];
  if (step > 0) {
    const before = new Map(), now = new Map();
    for (const graph of zx.graphs(program, step - 1)) for (const n of graph.nodes) before.set(n.name, { n, graph: graph.name });
    for (const graph of zx.graphs(program, step)) for (const n of graph.nodes) now.set(n.name, n);
    for (const [name, n] of now) {
      const old = before.get(name);
      if (!old) state.set(name, "new");
      else if (old.n.row !== n.row) state.set(name, "changed");
    }
    for (const [name, { n, graph }] of before) if (!now.has(name)) gone.push({ n, graph });
  }
  told.changes = { state, gone };
  return told.changes;
};

zx.counts = function (program, step) {
  const { state, gone } = zx.changes(program, step);
  let added = 0, changed = 0;
  for (const value of state.values()) value === "new" ? added++ : changed++;
  return { added, changed, gone: gone.length };
};

/* The node after which a storage that the node made is given back, where the last step is shown. */
zx.lastUse = function (program, step, graph, name) {
  const memory = step === program.steps.length - 1 && program.memory.find((each) => each.graph === graph.name);
  const own = memory ? memory.storages.filter((storage) => storage[0] === name) : [];
  if (!own.length) return null;
  return graph.nodes[Math.max(...own.map((storage) => storage[4]))]?.name || "the end of the graph";
};

/* Numbers for people. */
zx.bytes = function (count) {
  if (count === null || count === undefined) return "?";
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (count < 1024 || unit === "GiB") return (unit === "B" ? count : count.toPrecision(count < 1000 ? 3 : 4)) + " " + unit;
    count /= 1024;
  }
};
zx.time = function (seconds) {
  if (seconds === 0) return "0";
  return seconds >= 1 ? seconds.toPrecision(3) + " s" : seconds >= 1e-3 ? (seconds * 1e3).toPrecision(3) + " ms" : (seconds * 1e6).toPrecision(3) + " us";
};
zx.short = (node) => (node.target ? node.target.split(".")[1] || node.target : node.name);

/* An element: zx.el("td", { class: "number" }, "text", other elements). */
zx.el = function (tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
};
zx.chip = (kind) => zx.el("span", { class: "chip " + kind }, zx.KINDS[kind] || kind);
zx.colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
