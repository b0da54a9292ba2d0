"use strict";
/* Puts the page together: tabs, search, keyboard, light and dark. */
const TABS = ["overview", "graph", "diff", "memory", "timeline", "collectives", "parameters", "pipeline", "ranks"];
zx.plots = [];

zx.tabs = () => TABS.filter((tab) => (zx.program || ["overview", "ranks", "pipeline"].includes(tab)) && (tab !== "pipeline" || zx.data.pipeline));

zx.show = function (tab) {
  zx.tab = tab;
  zx.plots.forEach((plot) => plot.destroy());
  zx.plots = [];
  zx.cy?.destroy();
  zx.cy = null;
  const main = document.getElementById("main");
  main.replaceChildren();
  document.getElementById("tabs").replaceChildren(...zx.tabs().map((name, i) => zx.el("button", { role: "tab", "aria-selected": name === tab ? "true" : "false", onclick: () => zx.show(name) }, name[0].toUpperCase() + name.slice(1), zx.el("kbd", {}, i + 1))));
  zx.views[tab](main);
};

zx.choose = function (place) {
  zx.program = zx.data.programs[place];
  zx.step = zx.program.steps.length - 1;
  zx.opened = new Set();
  zx.selected = zx.graphName = null;
  zx.pinned = false;
  document.getElementById("program").value = place;
  zx.show(zx.tab);
};

zx.find = function (text) {
  const wanted = text.trim().toLowerCase(), found = [];
  if (!wanted || !zx.program) return found;
  for (const graph of zx.graphs(zx.program, zx.step))
    for (const node of graph.nodes) {
      const param = node.params.find((name) => name.toLowerCase().includes(wanted));
      if (param || node.name.toLowerCase().includes(wanted) || node.target.toLowerCase().includes(wanted) || node.module.toLowerCase().includes(wanted))
        found.push({ graph: graph.name, node, rank: node.name === wanted ? 0 : param && node.params.length === 1 ? 1 : param ? 2 : 3, param });
    }
  return found.sort((a, b) => a.rank - b.rank);
};

zx.listFound = function () {
  const list = document.getElementById("found"), found = zx.find(document.getElementById("search").value);
  list.hidden = !document.getElementById("search").value;
  list.replaceChildren(...found.slice(0, 60).map(({ graph, node, param }) => zx.el("li", {}, zx.el("button", { onclick: () => zx.pickFound(graph, node) }, zx.el("span", { class: "mono" }, node.name), " ", node.kind === "op" ? "" : zx.chip(node.kind), zx.el("br"), zx.el("span", { class: "soft" }, `${graph} · ${param || node.module || "-"}`)))),
    ...(found.length ? (found.length > 60 ? [zx.el("li", { class: "soft" }, `${found.length - 60} more: type more of the name`)] : []) : [zx.el("li", { class: "soft" }, "Nothing has this name in the step that is shown.")]));
};

zx.pickFound = function (graph, node) {
  document.getElementById("found").hidden = true;
  zx.graphName = graph;
  zx.reveal(node.name);
};

zx.keys = function (event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName), search = document.getElementById("search");
  if (event.key === "Escape") { document.getElementById("found").hidden = true; search.blur(); return; }
  if (event.target === search && event.key === "Enter") { document.querySelector("#found button")?.click(); search.blur(); return; }
  if (event.target === search && event.key === "ArrowDown") { document.querySelector("#found button")?.focus(); event.preventDefault(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") { search.focus(); search.select(); event.preventDefault(); }
  else if (event.key === "t") zx.theme();
  else if (zx.program && (event.key === "[" || event.key === "]")) zx.go(zx.step + (event.key === "]" ? 1 : -1));
  else if (/^[1-9]$/.test(event.key) && zx.tabs()[event.key - 1]) zx.show(zx.tabs()[event.key - 1]);
};

zx.theme = function (name) {
  const root = document.documentElement;
  root.dataset.theme = name || (root.dataset.theme === "dark" ? "light" : "dark");
  if (zx.data) zx.show(zx.tab);
};

zx.start = async function () {
  zx.theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  await zx.decode();
  cytoscape.use(cytoscapeDagre);
  const { data } = zx, choice = document.getElementById("program");
  document.getElementById("title").textContent = `zerofx · ${data.model}`;
  choice.append(...data.programs.map((program, i) => zx.el("option", { value: i }, program.label)));
  choice.parentElement.hidden = !data.programs.length;
  choice.addEventListener("change", () => zx.choose(+choice.value));
  document.getElementById("search").addEventListener("input", zx.listFound);
  document.getElementById("theme").addEventListener("click", () => zx.theme());
  document.addEventListener("keydown", zx.keys);
  document.addEventListener("click", (event) => { if (!event.target.closest("#found, #search")) document.getElementById("found").hidden = true; });
  const first = Math.max(0, data.programs.findIndex((program) => program.kind === "train"));
  if (data.programs.length) zx.choose(first);
  else zx.show("overview");
  document.body.dataset.ready = "true";
};

window.addEventListener("resize", () => { clearTimeout(zx.later); zx.later = setTimeout(() => (zx.plots.length ? zx.show(zx.tab) : zx.cy?.resize()), 250); });
zx.start().catch((error) => {
  document.getElementById("main").replaceChildren(zx.el("p", { class: "page" }, `This report cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
