"use strict";
/* The views of one step: the list of passes, the graph, the details of what is selected, and the textual difference. */
zx.passList = function () {
  const program = zx.program;
  const items = program.steps.map((step, place) => {
    const { added, changed, gone } = zx.counts(program, place);
    const marks = place === 0 ? [] : [added ? zx.el("span", { class: "plus" }, ` +${added}`) : null, gone ? zx.el("span", { class: "minus" }, ` −${gone}`) : null,
      changed ? zx.el("span", { class: "tilde" }, ` ~${changed}`) : null];
    return zx.el("li", {}, zx.el("button", { "aria-current": place === zx.step ? "true" : "false", onclick: () => zx.go(place) },
      zx.el("b", {}, step.name), zx.el("small", {}, `${step.nodes.toLocaleString("en")} nodes, ${step.seconds.toFixed(2)} s`, ...marks)));
  });
  return zx.el("div", { class: "side" }, zx.el("h3", {}, "After each pass ( [ and ] )"), zx.el("ol", { class: "passes" }, items),
    zx.el("p", { class: "soft" }, zx.el("span", { class: "plus" }, "+ new"), " ", zx.el("span", { class: "minus" }, "− removed"), " ", zx.el("span", { class: "tilde" }, "~ changed"), " against the step before"));
};

zx.go = function (step) {
  zx.step = Math.max(0, Math.min(step, zx.program.steps.length - 1));
  zx.show(zx.tab === "diff" ? "diff" : "graph");
};

zx.graphNow = function () {
  const graphs = zx.graphs(zx.program, zx.step);
  return graphs.find((graph) => graph.name === zx.graphName) || graphs[0];
};

zx.views = {};
zx.views.graph = function (main) {
  const graph = zx.graphNow();
  zx.graphName = graph.name;
  const graphs = zx.graphs(zx.program, zx.step);
  const pick = zx.el("select", { "aria-label": "graph", onchange: (e) => { zx.graphName = e.target.value; zx.opened = new Set(); zx.show("graph"); } },
    graphs.map((each) => zx.el("option", { selected: each === graph }, each.name)));
  const gone = zx.el("input", { type: "checkbox", checked: zx.showGone, onchange: (e) => { zx.showGone = e.target.checked; zx.redraw(); } });
  const keys = Object.keys(zx.KINDS).map((kind) => zx.el("span", {}, zx.el("i", { class: "swatch " + kind }), zx.KINDS[kind]));
  const bar = zx.el("div", { class: "bar" }, pick, zx.el("button", { onclick: () => { zx.opened = new Set(); zx.redraw(); } }, "Close all"),
    zx.el("button", { onclick: () => { zx.openSome(zx.root); zx.openLevel(); zx.redraw(); } }, "Open a level"), zx.el("button", { onclick: () => zx.cy?.fit(undefined, 24) }, "Fit"),
    zx.el("label", {}, gone, " show removed"), zx.el("span", { class: "key" }, keys));
  const place = zx.el("div", { class: "drawing", id: "drawing", role: "img", "aria-label": "graph; the search box reaches every node by keyboard" });
  const side = zx.el("aside", { class: "side right", id: "details" });
  main.append(zx.el("div", { class: "work" }, zx.passList(), zx.el("div", { class: "middle" }, bar, place), side));
  zx.root = zx.tree(zx.program, zx.step, graph);
  if (![...zx.root.modules.values()].some((module) => zx.opened.has(module.id))) zx.openSome(zx.root);
  zx.draw(place, zx.root, graph);
  if (zx.selected && graph.byName.has(zx.selected)) zx.select(zx.selected);
  else zx.showStep();
};

zx.openLevel = function () {
  const walk = (branch) => {
    for (const module of branch.modules.values()) zx.opened.has(module.id) ? walk(module) : zx.opened.add(module.id);
  };
  walk(zx.root);
};

/* Draws again, and keeps in the middle what was clicked. */
zx.redraw = function (id) {
  const graph = zx.graphNow();
  zx.root = zx.tree(zx.program, zx.step, graph);
  zx.draw(document.getElementById("drawing"), zx.root, graph);
  const at = id && zx.cy?.getElementById(id);
  if (at?.length) {
    at.addClass("chosen");
    if (zx.cy.zoom() < 0.7) { zx.cy.zoom(Math.max(0.5, Math.min(0.9, (zx.cy.height() - 60) / at.boundingBox().h))); zx.cy.center(at); }
  }
};

zx.showStep = function () {
  const step = zx.program.steps[zx.step], graph = zx.graphNow();
  const { added, changed, gone } = zx.counts(zx.program, zx.step);
  const names = (nodes) => zx.el("ul", {}, nodes.slice(0, 40).map((n) => zx.el("li", {}, zx.link(n.name))), nodes.length > 40 ? zx.el("li", {}, `and ${nodes.length - 40} more`) : null);
  const changes = zx.changes(zx.program, zx.step);
  const fresh = graph.nodes.filter((n) => changes.state.get(n.name) === "new");
  zx.details(zx.el("h2", {}, step.name), zx.el("p", {}, `${graph.nodes.length.toLocaleString("en")} nodes and inputs in ${graph.name}. Click a module to open it, double-click an open one to close it.`),
    zx.step ? zx.el("p", {}, `Against the step before: ${added} new, ${gone} removed, ${changed} changed. `, zx.el("button", { onclick: () => zx.show("diff") }, "See the text")) : null,
    fresh.length ? zx.el("h3", {}, `New in ${graph.name}`) : null, fresh.length ? names(fresh) : null);
};

zx.details = (...parts) => document.getElementById("details")?.replaceChildren(...parts.filter(Boolean));
zx.link = (name) => zx.el("button", { class: "link mono", onclick: () => zx.reveal(name) }, name);

zx.showModule = function (branch) {
  const kinds = Object.entries(branch.kinds).map(([kind, count]) => zx.el("li", {}, `${count} `, zx.chip(kind)));
  zx.details(zx.el("h2", {}, branch.id || "model"), zx.el("p", {}, `${branch.count} nodes`, branch.added ? `, ${branch.added} new` : "", branch.gone ? `, ${branch.gone} removed` : ""),
    zx.el("ul", {}, kinds), zx.opened.has(branch.id) ? zx.el("button", { onclick: () => zx.close(branch) }, "Close this module") : zx.el("button", { onclick: () => zx.open(branch) }, "Open this module"),
    zx.el("h3", {}, "Inside"), zx.el("ul", {}, [...branch.modules.values()].map((m) => zx.el("li", {}, zx.el("button", { class: "link", onclick: () => zx.open(m) }, `${m.name} (${m.count})`))),
      branch.leaves.slice(0, 60).map(({ node }) => zx.el("li", {}, zx.link(node.name)))));
};

/* Selects a node of the graph that is drawn, and tells all that is known of it. */
zx.select = function (name) {
  const graph = zx.graphNow(), changes = zx.changes(zx.program, zx.step);
  const node = graph.byName.get(name) || changes.gone.find(({ n }) => n.name === name)?.n;
  if (!node) return;
  zx.selected = name;
  zx.cy?.elements().removeClass("chosen");
  zx.cy?.getElementById("n:" + name).addClass("chosen");
  const users = graph.nodes.filter((n) => n.reads.includes(name)).map((n) => n.name);
  const state = graph.byName.has(name) ? changes.state.get(name) : "gone";
  const before = state === "changed" ? zx.graphs(zx.program, zx.step - 1).map((g) => g.byName.get(name)).find(Boolean) : null;
  const list = (names) => (names.length ? [...new Set(names)].slice(0, 60).flatMap((n) => [zx.link(n), " "]) : "nothing");
  const last = zx.lastUse(zx.program, zx.step, graph, name), again = zx.program.texts[node.row].includes("recompute=True");
  const facts = [["op", node.target || "input"], ["result", node.type], ["bytes", zx.bytes(node.bytes)], ["role", node.role || "-"],
    ["parameters", node.params.length ? node.params.join(", ") : "-"], ["module", node.module || "-"], ["source", node.source || "-"],
    ["returned", (graph.returned.get(name) || ["-"]).join(", ")], ["reads", list(node.reads)], ["read by", list(users)]];
  if (last) facts.push([node.role === "unshard" ? "released after" : "freed after", graph.byName.has(last) ? zx.link(last) : last]);
  if (again) facts.push(["release", "released after the forward, gathered again in the backward"]);
  zx.details(zx.el("h2", { class: "mono" }, name), node.kind === "op" ? null : zx.chip(node.kind),
    state ? zx.el("p", { class: { new: "plus", gone: "minus", changed: "tilde" }[state] }, { new: "new in this step", gone: "removed in this step", changed: "changed in this step" }[state]) : null,
    zx.el("dl", {}, facts.flatMap(([key, value]) => [zx.el("dt", {}, key), zx.el("dd", { class: "mono" }, value)])),
    zx.el("h3", {}, "Text"), zx.el("pre", { class: "code" }, zx.program.texts[node.row].trim()),
    before ? zx.el("h3", {}, "Before") : null, before ? zx.el("pre", { class: "code" }, zx.program.texts[before.row].trim()) : null);
};

/* Shows a node wherever it is: opens the modules around it, and goes to the middle of it. */
zx.reveal = function (name, step = zx.step) {
  zx.step = step;
  const graphs = zx.graphs(zx.program, step);
  const graph = graphs.find((each) => each.byName.has(name) && each.name === zx.graphName) || graphs.find((each) => each.byName.has(name));
  if (graph) zx.graphName = graph.name;
  if (zx.tab !== "graph") zx.show("graph");
  const root = zx.tree(zx.program, step, zx.graphNow());
  const find = (branch) => branch.leaves.some(({ node }) => node.name === name) ? [] : [...branch.modules.values()].map((m) => [m, find(m)]).filter(([, path]) => path).map(([m, path]) => [m.id, ...path])[0];
  for (const id of find(root) || []) zx.opened.add(id);
  zx.show("graph");
  zx.select(name);
  const at = zx.cy?.getElementById("n:" + name);
  if (at?.length) { zx.cy.zoom(Math.max(zx.cy.zoom(), 0.9)); zx.cy.center(at); }
};

const AROUND = 3, SHOWN = 3000;
zx.views.diff = function (main) {
  const program = zx.program, last = program.steps.length - 1;
  zx.against ??= Math.max(0, zx.step - 1);
  const from = zx.pinned ? Math.min(zx.against, last) : Math.max(0, zx.step - 1);
  const pick = (value, change, label) => zx.el("select", { "aria-label": label, onchange: (e) => change(+e.target.value) }, program.steps.map((step, i) => zx.el("option", { value: i, selected: i === value }, `${i} ${step.name}`)));
  const rows = [from, zx.step].map((step) => zx.numbers(program.steps[step].rows));
  const diff = Diff.diffArrays(rows[0], rows[1], { timeout: 3000 });
  const text = zx.el("div", { class: "diff", tabindex: 0 });
  const { lines, added, cut } = zx.diffLines(diff, program);
  const more = (start) => {
    text.append(...lines.slice(start, start + SHOWN));
    if (lines.length > start + SHOWN) { const button = zx.el("button", { onclick: () => { button.remove(); more(start + SHOWN); } }, `${lines.length - start - SHOWN} more lines`); text.append(button); }
  };
  more(0);
  if (!diff) text.append(zx.el("p", { class: "wide" }, "These two steps are too different to be compared line by line; compare steps that follow one another."));
  else if (!added && !cut) text.append(zx.el("p", { class: "wide" }, "Nothing has changed."));
  const bar = zx.el("div", { class: "bar" }, "from", pick(from, (value) => { zx.pinned = true; zx.against = value; zx.show("diff"); }, "step before"), "to", pick(zx.step, (value) => { zx.step = value; zx.show("diff"); }, "step after"),
    zx.el("button", { onclick: () => { zx.pinned = false; zx.show("diff"); } }, "the step before"), zx.el("span", { class: "plus" }, `+${added} lines`), zx.el("span", { class: "minus" }, `−${cut} lines`));
  main.append(zx.el("div", { class: "work two" }, zx.passList(), zx.el("div", { class: "middle" }, bar, text)));
};

zx.diffLines = function (diff, program) {
  const lines = [];
  let added = 0, cut = 0;
  (diff || []).forEach((part, place) => {
    const sign = part.added ? "+" : part.removed ? "-" : " ";
    const texts = part.value.map((row) => program.texts[row]);
    if (part.added) added += texts.length;
    if (part.removed) cut += texts.length;
    const kind = part.added ? "add" : part.removed ? "cut" : "";
    const line = (t) => zx.el("div", { class: kind }, sign + " " + t);
    if (kind || texts.length <= 2 * AROUND + 1) { lines.push(...texts.map(line)); return; }
    if (place) lines.push(...texts.slice(0, AROUND).map(line));
    lines.push(zx.el("div", { class: "gap" }, `… ${texts.length - AROUND * (place && place < diff.length - 1 ? 2 : 1)} equal lines …`));
    if (place < diff.length - 1) lines.push(...texts.slice(-AROUND).map(line));
  });
  return { lines, added, cut };
};
