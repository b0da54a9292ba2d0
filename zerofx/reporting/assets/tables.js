"use strict";
/* The first screen in words, and the tables of collectives, parameters and ranks. */
const MOST = 400;

/* A table that sorts by a click on a column; cells are texts, elements, or { show, by } with the value to sort by. */
zx.table = function (head, rows, { numbers = [], filter = false } = {}) {
  const body = zx.el("tbody"), value = (cell) => (cell && cell.by !== undefined ? cell.by : cell);
  let order = rows, all = false, down = 1, column = -1, wanted = "";
  const fill = () => {
    const kept = wanted ? order.filter((row) => row.some((cell) => String(value(cell)).toLowerCase().includes(wanted))) : order;
    const shown = all ? kept : kept.slice(0, MOST);
    body.replaceChildren(...shown.map((row) => zx.el("tr", {}, row.map((cell, i) => zx.el("td", { class: numbers.includes(i) ? "number" : "" }, cell && cell.show !== undefined ? cell.show : cell)))));
    if (shown.length < kept.length) body.append(zx.el("tr", {}, zx.el("td", { colspan: head.length }, zx.el("button", { onclick: () => { all = true; fill(); } }, `${kept.length - shown.length} more`))));
  };
  const sort = (i) => {
    down = column === i ? -down : 1; column = i;
    order = [...rows].sort((a, b) => { const [x, y] = [value(a[i]), value(b[i])]; return (typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y), "en", { numeric: true })) * down; });
    fill();
  };
  fill();
  const table = zx.el("table", {}, zx.el("thead", {}, zx.el("tr", {}, head.map((name, i) => zx.el("th", { class: numbers.includes(i) ? "number" : "" }, zx.el("button", { onclick: () => sort(i) }, name))))), body);
  if (!filter) return table;
  return zx.el("div", {}, zx.el("p", {}, zx.el("input", { type: "search", placeholder: "filter", "aria-label": "filter", oninput: (e) => { wanted = e.target.value.toLowerCase(); fill(); } })), table);
};

zx.differences = function () {
  const { differences, world, recorded } = zx.data;
  if (differences.length)
    return zx.el("section", { class: "box bad", id: "differences" }, zx.el("h2", {}, differences.length === 1 ? "The ranks differ" : `The ranks differ in ${differences.length} ways`),
      differences.map(({ what, groups }) => zx.el("div", {}, zx.el("h3", {}, what), zx.el("table", {}, zx.el("tbody", {}, groups.map(({ ranks, value }) => zx.el("tr", {}, zx.el("td", {}, zx.el("b", {}, ranks)), zx.el("td", { class: "mono" }, value))))))));
  if (world === 1) return null;
  const all = zx.data.ranks.length === world;
  return zx.el("section", { class: "box good" }, all ? `All ${world} ranks agree: what should be equal on them is equal.` : `This report was made on ${recorded} of ${world}; record=... compares all of them.`);
};

zx.pipelineWords = function () {
  const { pipeline } = zx.data;
  if (!pipeline) return [];
  return [`The model runs as a pipeline of ${pipeline.stages.length} stages on ${pipeline.ranks} ranks, by ${pipeline.schedule} with ${pipeline.microbatches} micro-batches: a rank stands still for ${(100 * pipeline.bubble).toFixed(1)} % of a step. What follows is one stage.`];
};

zx.views.overview = function (main) {
  const { data, program } = zx, page = zx.el("div", { class: "page" });
  page.append(...[zx.differences()].filter(Boolean));
  if (program) {
    const sent = program.collectives.reduce((sum, row) => sum + (row.bytes || 0), 0), count = (kind) => program.collectives.filter((row) => row.kind.startsWith(kind)).length;
    const tile = (value, text, tab) => zx.el("button", { class: "tile", onclick: () => zx.show(tab) }, zx.el("b", {}, value), zx.el("span", {}, text));
    const peak = Math.max(0, ...program.memory.map((each) => each.peak));
    page.append(zx.el("h2", {}, `What ${program.label} does`), zx.el("ul", { class: "words" }, zx.pipelineWords().concat(program.words).map((text) => zx.el("li", {}, text))),
      zx.el("div", { class: "tiles" }, tile(count("all_gather"), "all-gathers", "collectives"), tile(count("reduce_scatter") + count("all_reduce"), "reductions", "collectives"), tile(zx.bytes(sent), "a rank sends", "collectives"), tile(program.memory.length ? zx.bytes(peak) : "?", "peak, without states", "memory"),
        tile(program.time ? zx.time(program.time.exposed) : "?", "exposed communication", "timeline"), tile(program.steps.length, "steps to look at", "graph")));
    if (data.plan) page.append(zx.el("h2", {}, "Planned and recorded"), zx.el("p", { id: "plan" }, data.plan.verdict), zx.table(["", "planned", "recorded"], data.plan.rows, { numbers: [1, 2] }), zx.el("p", { class: "soft" }, `Recorded are the graphs of one forward and backward. Planned for ${data.plan.asked}.`));
    if (data.programs.length > 1) page.append(zx.el("h2", {}, "All programs"), zx.table(["program", "steps", "nodes", "collectives", "sent by a rank", "peak", "predicted", ""], data.programs.map((each, i) => [each.label, each.steps.length, each.steps.at(-1).nodes, each.collectives.length, { show: zx.bytes(each.collectives.reduce((s, r) => s + (r.bytes || 0), 0)), by: each.collectives.length }, each.memory.length ? zx.bytes(Math.max(...each.memory.map((m) => m.peak))) : "?", each.time ? zx.time(each.time.step) : "?", zx.el("button", { onclick: () => zx.choose(i) }, i === data.programs.indexOf(program) ? "shown" : "show")]), { numbers: [1, 2, 3, 4, 5, 6] }));
    page.append(zx.el("h2", {}, "Where to look"), zx.el("ul", {}, ["Graph: the program after each pass, module by module; what a pass made is green, what it removed red.", "Diff: the same as text.", "Memory: what is alive at each node.", "Timeline: where computation waits for communication.", "Keys: / searches, [ and ] go through the passes, 1 to 9 through the views, t turns light into dark."].map((text) => zx.el("li", {}, text))));
  } else page.append(zx.el("p", {}, "No graph was captured: the run ended before the model was called, or before its first graph was compiled."));
  page.append(zx.el("h2", {}, "Asked for"), zx.el("dl", {}, Object.entries(data.config).flatMap(([key, value]) => [zx.el("dt", {}, key), zx.el("dd", { class: "mono" }, value)])), zx.el("p", { class: "soft" }, `Recorded ${data.made} on ${data.recorded} of ${data.world === 1 ? "1 rank" : data.world + " ranks"}.`));
  main.append(page);
};

const KIND = { all_gather_into_tensor: "gather", reduce_scatter_tensor: "scatter", all_reduce: "reduce" };
zx.views.collectives = function (main) {
  const rows = zx.program.collectives.map((row, i) => [i, row.part, { show: zx.chip(KIND[row.kind]), by: row.kind }, { show: zx.linkLast(row.name), by: row.name }, { show: zx.el("span", { class: "many mono" }, row.params.join(", ")), by: row.params.join(" ") }, row.params.length, row.dtype, row.group, { show: zx.bytes(row.bytes), by: row.bytes }, row.ahead === null ? "-" : row.ahead]);
  main.append(zx.el("div", { class: "wide" }, zx.el("h2", {}, "Buckets: the collectives of parameters and gradients, in the order in which they are issued"), zx.el("p", { class: "soft" }, "“ahead” counts the nodes between the collective and the first wait for it: computation that may hide it."),
    zx.table(["#", "half", "kind", "node", "parameters", "count", "dtype", "group", "a rank sends", "ahead"], rows, { numbers: [0, 5, 8, 9], filter: true })));
};

zx.views.parameters = function (main) {
  const rows = zx.program.params.map(([name, dtype, size, dim, whole, own, gathered, reduced, tied]) => [{ show: zx.el("button", { class: "link mono", onclick: () => zx.revealParam(name) }, name), by: name }, dtype, `[${size.join(", ")}]`, dim === null ? "replicated" : `cut on dim ${dim}`, { show: zx.bytes(whole), by: whole }, { show: zx.bytes(own), by: own }, gathered, reduced, tied.join(", ")]);
  main.append(zx.el("div", { class: "wide" }, zx.el("h2", {}, `${rows.length} parameters`), zx.el("p", { class: "soft" }, "A click shows where a parameter enters the graph. “gathered” and “reduced” count collectives of the last step's graphs."),
    zx.table(["parameter", "dtype", "size", "stored", "whole", "on this rank", "gathered", "reduced", "tied with"], rows, { numbers: [4, 5, 6, 7], filter: true })));
};

zx.revealParam = function (name) {
  const last = zx.program.steps.length - 1;
  for (const graph of zx.graphs(zx.program, last)) {
    const node = graph.nodes.find((n) => n.params.length === 1 && n.params[0] === name);
    if (node) return zx.reveal(node.name, last);
  }
};

zx.views.ranks = function (main) {
  const rows = zx.data.ranks.map(({ rank, place, graphs }) => [rank, Object.entries(place).map(([axis, at]) => `${axis} ${at}`).join(", ") || "-", graphs, zx.data.programs.filter((p) => p.ranks.includes(rank)).map((p) => p.label).join("; ")]);
  main.append(zx.el("div", { class: "page" }, zx.differences(), zx.el("h2", {}, "Ranks"), zx.table(["rank", "place on the mesh", "graphs", "programs"], rows, { numbers: [0, 2] })));
};
