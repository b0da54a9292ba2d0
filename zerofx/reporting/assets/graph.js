"use strict";
/* Draws the graph after a step: modules collapsed into boxes, opened by a click; cytoscape and dagre do the drawing. */
zx.opened = new Set();
zx.showGone = true;
const FEW = 40; // boxes on the first screen
const DRAWN = 900; // elements that are drawn without asking
const LEAVES = 80; // nodes side by side in one module before they are put together, and how many beside other modules
const BESIDE = 24;

/* The tree of modules of one graph; nodes that are gone hang in it as well. */
zx.tree = function (program, step, graph) {
  const changes = zx.changes(program, step);
  const root = { id: "", name: "", parent: null, modules: new Map(), leaves: [], count: 0, added: 0, gone: 0, kinds: {} };
  const add = (node, state, group) => {
    const path = group ? [group] : node.module ? node.module.split(".") : [];
    if (graph.name === "joint" && !group) path.unshift(node.backward ? "(backward)" : "(forward)");
    let at = root;
    const up = [root];
    for (const part of path) {
      if (!at.modules.has(part)) at.modules.set(part, zx.branch(at, part));
      up.push((at = at.modules.get(part)));
    }
    at.leaves.push({ node, state });
    for (const each of up) {
      if (state === "gone") each.gone++;
      else each.count++;
      if (state === "new") each.added++;
      if (node.kind !== "op" && state !== "gone") each.kinds[node.kind] = (each.kinds[node.kind] || 0) + 1;
    }
  };
  const aside = zx.aside(graph.nodes);
  for (const node of graph.nodes) add(node, changes.state.get(node.name) || "", aside.get(node.name));
  if (zx.showGone)
    for (const { n, graph: from } of changes.gone) {
      const here = from === graph.name || (graph.name !== "joint" && from === "joint" && n.backward === (graph.name === "backward"));
      if (here) add(n, "gone");
    }
  zx.chunk(root);
  return root;
};

/* What stands beside the modules: inputs, and what is made of stored parts before, or of gradients behind, a bucket. */
const STORED = "(parameters)", GIVEN = "(inputs)", REDUCED = "(gradients)";
zx.aside = function (nodes) {
  const found = new Map(), reduced = new Set();
  for (const node of nodes) {
    const sent = node.kind === "gather" || node.kind === "scatter" || node.kind === "reduce";
    if (node.kind === "parameter") found.set(node.name, node.params.length ? STORED : GIVEN);
    else if (sent && node.params.length > 1 && node.role === "reduce_grad") reduced.add(node.name);
    else if (node.role === "reduce_grad" && node.reads.some((name) => reduced.has(name))) {
      reduced.add(node.name);
      found.set(node.name, REDUCED);
    } else if (node.role === "unshard" && !sent && node.reads.length && node.reads.every((name) => found.get(name) === STORED)) found.set(node.name, STORED);
  }
  return found;
};

zx.branch = (parent, name) => ({
  id: parent.id ? parent.id + "." + name : name, name, parent, modules: new Map(), leaves: [], count: 0, added: 0, gone: 0, kinds: {},
});

/* Puts many nodes side by side into groups of nodes that follow one another. */
zx.chunk = function (branch) {
  for (const each of branch.modules.values()) zx.chunk(each);
  zx.chunkModules(branch);
  const plain = branch.leaves.filter((leaf) => leaf.node.kind === "op" || leaf.node.kind === "parameter");
  if (plain.length <= (branch.modules.size ? BESIDE : LEAVES)) return;
  const own = new Set(plain), size = Math.max(12, Math.ceil(plain.length / (branch.modules.size ? 12 : 50)));
  branch.leaves = branch.leaves.filter((leaf) => !own.has(leaf));
  for (let i = 0; i < plain.length; i += size) {
    const part = plain.slice(i, i + size);
    const made = zx.branch(branch, "[" + part[0].node.name + " … " + part[part.length - 1].node.name + "]");
    made.leaves = part;
    for (const { state, node } of part) {
      state === "gone" ? made.gone++ : made.count++;
      if (state === "new") made.added++;
      if (node.kind !== "op" && state !== "gone") made.kinds[node.kind] = (made.kinds[node.kind] || 0) + 1;
    }
    branch.modules.set(made.name, made);
  }
};

/* The same for many modules side by side, such as the layers of a deep model. */
zx.chunkModules = function (branch) {
  const all = [...branch.modules.values()];
  if (all.length <= FEW) return;
  const size = Math.ceil(all.length / Math.ceil(all.length / Math.ceil(Math.sqrt(all.length))));
  branch.modules = new Map();
  for (let i = 0; i < all.length; i += size) {
    const part = all.slice(i, i + size), made = zx.branch(branch, `[${part[0].name} … ${part[part.length - 1].name}]`);
    for (const each of part) {
      made.modules.set(each.name, each);
      for (const key of ["count", "added", "gone"]) made[key] += each[key];
      for (const [kind, count] of Object.entries(each.kinds)) made.kinds[kind] = (made.kinds[kind] || 0) + count;
    }
    branch.modules.set(made.name, made);
  }
};

/* Opens the largest modules as long as all fits one screen. */
zx.openSome = function (root) {
  const shown = (branch) => branch.modules.size + branch.leaves.length;
  let total = shown(root);
  const closed = [...root.modules.values()].filter((branch) => ![STORED, GIVEN, REDUCED].includes(branch.name));
  while (closed.length) {
    closed.sort((a, b) => b.count + b.gone - a.count - a.gone);
    const next = closed.findIndex((branch) => total - 1 + shown(branch) <= FEW || (total < 5 && shown(branch) <= 2 * FEW));
    if (next < 0) return;
    const [branch] = closed.splice(next, 1);
    zx.opened.add(branch.id);
    total += shown(branch) - 1;
    closed.push(...branch.modules.values());
  }
};

/* What is seen: boxes of closed modules, frames of open ones, nodes, and one edge for all between two of them. */
zx.elements = function (root, graph) {
  const elements = [], seen = new Map();
  const visit = (branch, frame) => {
    for (const module of branch.modules.values()) {
      if (zx.opened.has(module.id)) {
        elements.push({ data: { id: "m:" + module.id, parent: frame, label: module.name, branch: module }, classes: "open" });
        visit(module, "m:" + module.id);
      } else {
        elements.push({ data: { id: "m:" + module.id, parent: frame, label: zx.boxLabel(module), branch: module }, classes: "closed " + (module.added ? "new" : module.gone ? "gone-inside" : "") });
        zx.within(module, (leaf) => seen.set(leaf.node.name, "m:" + module.id));
      }
    }
    for (const { node, state } of branch.leaves) {
      seen.set(node.name, "n:" + node.name);
      elements.push({ data: { id: "n:" + node.name, parent: frame, label: zx.nodeLabel(node), node }, classes: node.kind + " node " + state });
    }
  };
  visit(root, undefined);
  const edges = new Map();
  zx.within(root, ({ node, state }) => {
    for (const read of node.reads) {
      const from = seen.get(read), to = seen.get(node.name);
      if (!from || from === to) continue;
      const key = from + " " + to;
      if (edges.has(key)) edges.get(key).data.count++;
      else edges.set(key, { data: { id: "e:" + key, source: from, target: to, count: 1 }, classes: (state === "gone" ? "gone " : "") + (from.startsWith("m:(") ? "faint" : "") });
    }
  });
  return elements.concat([...edges.values()]);
};

zx.within = function (branch, visit) {
  for (const leaf of branch.leaves) visit(leaf);
  for (const module of branch.modules.values()) zx.within(module, visit);
};

zx.boxLabel = function (module) {
  const told = [`${module.count} node${module.count === 1 ? "" : "s"}`];
  if (module.added) told.push("+" + module.added);
  if (module.gone) told.push("−" + module.gone);
  const sent = ["gather", "scatter", "reduce"].filter((kind) => module.kinds[kind]).map((kind) => `${module.kinds[kind]} ${zx.KINDS[kind].split(" ")[0]}`);
  return [module.name, told.join("  "), ...(sent.length ? [sent.join(", ")] : [])].join("\n");
};

zx.nodeLabel = function (node) {
  const many = node.params.length > 1 ? `${node.params.length} parameters, ${zx.bytes(node.bytes)}` : node.params.length ? node.params[0].split(".").slice(-2).join(".") : "";
  const type = node.type.length > 26 ? node.type.slice(0, 25) + "…" : node.type;
  return zx.short(node) + "\n" + (node.kind === "op" || !many ? type : many);
};

zx.look = function () {
  const c = zx.colour, text = c("text"), dark = document.documentElement.dataset.theme === "dark";
  const filled = dark ? "#0c0f14" : "#ffffff";
  const box = { shape: "round-rectangle", width: (n) => zx.textSize(n)[0], height: (n) => zx.textSize(n)[1], padding: "8px", label: "data(label)", "text-wrap": "wrap", "text-valign": "center", "text-halign": "center", "font-size": 12, color: text, "background-color": c("op"), "border-width": 1.2, "border-color": c("op-line") };
  const style = [
    { selector: "node", style: box },
    { selector: "node.closed", style: { "background-color": c("module"), "border-color": c("module-line"), "border-width": 1.6, "font-weight": 600, padding: "11px" } },
    { selector: "node.open", style: { "background-color": c("open"), "border-color": c("module-line"), "border-style": "dashed", "text-valign": "top", "text-halign": "center", "font-weight": 600, color: c("soft"), padding: "14px" } },
    { selector: "edge", style: { width: (e) => 1 + Math.min(4, Math.log2(e.data("count"))), "line-color": c("op-line"), "target-arrow-color": c("op-line"), "target-arrow-shape": "triangle", "arrow-scale": 0.9, "curve-style": "bezier", opacity: 0.75 } },
  ];
  for (const kind of ["gather", "scatter", "reduce", "cast", "update", "wait"])
    style.push({ selector: "node." + kind, style: { "background-color": c(kind), "border-color": c(kind), color: filled, "font-weight": 600 } });
  style.push(
    { selector: "node.parameter", style: { "border-color": c("param"), "border-width": 2, shape: "cut-rectangle" } },
    { selector: "node.new", style: { "border-color": c("new"), "border-width": 4 } },
    { selector: "node.changed", style: { "border-color": c("changed"), "border-width": 3 } },
    { selector: "node.gone", style: { "border-color": c("gone"), "border-width": 2, "border-style": "dashed", "background-color": c("cut-back"), color: c("gone"), opacity: 0.85 } },
    { selector: "node.gone-inside", style: { "border-color": c("gone"), "border-style": "dashed" } },
    { selector: "edge.faint", style: { width: 1, opacity: 0.3, "line-style": "dashed" } },
    { selector: "edge.gone", style: { "line-style": "dashed", "line-color": c("gone"), "target-arrow-color": c("gone") } },
    { selector: "node:selected, node.chosen", style: { "overlay-color": c("link"), "overlay-opacity": 0.25, "overlay-padding": 6 } },
    { selector: "edge.near", style: { "line-color": c("link"), "target-arrow-color": c("link"), opacity: 1, "z-index": 9 } },
  );
  return style;
};

/* The size of a box, from its label. */
zx.textSize = function (element) {
  const lines = element.data("label").split("\n"), wide = element.hasClass("closed") || !element.hasClass("op") ? 7.2 : 6.7;
  return [Math.max(26, Math.max(...lines.map((line) => line.length)) * wide), lines.length * 14.5];
};

/* Draws into a place on the page; returns how many elements there are. */
zx.draw = function (place, root, graph, { force = false } = {}) {
  const elements = zx.elements(root, graph);
  zx.cy?.destroy();
  zx.cy = null;
  if (elements.length > DRAWN && !force) {
    place.replaceChildren(zx.el("p", { class: "wide" }, `${elements.length} boxes and arrows take a while to lay out. `,
      zx.el("button", { onclick: () => zx.draw(place, root, graph, { force: true }) }, "Draw them"), " or close a module with the buttons above."));
    return elements.length;
  }
  place.replaceChildren();
  zx.cy = cytoscape({ container: place, elements, style: zx.look(), minZoom: 0.03, maxZoom: 2.5,
    layout: { name: "dagre", rankDir: "TB", nodeSep: 26, rankSep: 44, edgeSep: 8, fit: true, padding: 24, animate: false } });
  if (zx.cy.zoom() > 1.1) { zx.cy.zoom(1.1); zx.cy.center(); }
  if (zx.cy.zoom() < 0.45) zx.readable();
  zx.cy.on("tap", "node", (event) => {
    const { branch, node } = event.target.data();
    if (node) zx.select(node.name);
    else if (event.target.hasClass("closed")) zx.open(branch);
    else zx.showModule(branch);
  });
  zx.cy.on("dbltap", "node.open", (event) => zx.close(event.target.data("branch")));
  zx.cy.on("mouseover", "node", (event) => event.target.connectedEdges().addClass("near"));
  zx.cy.on("mouseout", "node", (event) => event.target.connectedEdges().removeClass("near"));
  return elements.length;
};

/* A large drawing starts at its beginning, at a size that can be read. */
zx.readable = function () {
  const box = zx.cy.elements().boundingBox();
  zx.cy.zoom(0.7);
  zx.cy.pan({ x: zx.cy.width() / 2 - 0.7 * (box.x1 + box.w / 2), y: 20 - 0.7 * box.y1 });
};

zx.open = function (branch) {
  zx.opened.add(branch.id);
  if (branch.modules.size === 1 && !branch.leaves.length) zx.opened.add([...branch.modules.values()][0].id);
  zx.redraw("m:" + branch.id);
  zx.showModule(branch);
};
zx.close = function (branch) {
  for (const id of [...zx.opened]) if (id === branch.id || id.startsWith(branch.id + ".")) zx.opened.delete(id);
  zx.redraw("m:" + branch.id);
};
